"""A worker on redis-py's Lock. worker.rs says what it may be told.

Arguments: port, key, lease (ms), pause between two tries (ms; - for the client's own).
"""

import random
import sys
import time

import redis
from redis.exceptions import LockError

port, key, lease, poll = sys.argv[1:]
server = redis.Redis(port=int(port), decode_responses=True)
options = {} if poll == "-" else {"sleep": int(poll) / 1000}
lock = server.lock(key, timeout=int(lease) / 1000, **options)


def owned(act):
    """Whether an act of the owner was still one."""
    try:
        act()
        return True
    except LockError:
        return False


def work(me, target, pause):
    """Critical sections until the counter has its target; how many, and in how many somebody else was."""
    done = overlaps = 0
    while True:
        lock.acquire()
        server.set("holder", me)
        count = int(server.get("counter") or 0)
        if count < target:
            time.sleep(0.001)
            server.set("counter", count + 1)
            done += 1
        overlaps += server.get("holder") != me
        lock.release()
        if count >= target:
            return f"done {done} {overlaps}"
        time.sleep(random.uniform(0, pause) / 1000)


def say(line):
    print(line, flush=True)


say("ready")
for line in sys.stdin:
    order, *words = line.split()
    if order == "try":
        say("yes" if lock.acquire(blocking=False) else "no")
    elif order == "lock":
        lock.acquire()
        say("locked")
    elif order == "extend":
        say("extended" if owned(lock.reacquire) else "lost")
    elif order == "release":
        say("released" if owned(lock.release) else "lost")
    elif order == "work":
        say(work(words[0], int(words[1]), int(words[2])))
