// A worker on @sesamecare-oss/redlock. worker.rs says what it may be told.
//
// Arguments: ports with commas between, key, lease (ms), pause between two tries (ms; - for the client's own).

const { once } = require('node:events');
const readline = require('node:readline');
const { setTimeout: sleep } = require('node:timers/promises');
const { Redlock, ExecutionError } = require('@sesamecare-oss/redlock');
const { Redis } = require('ioredis');

const [ports, key, lease, poll] = process.argv.slice(2);
// Without its servers, that is without its test, a worker ends.
const servers = ports.split(',').map((port) => new Redis({ port: Number(port), retryStrategy: () => process.exit(1) }));
// Counts what it does, unguarded by anything but the lock.
const [server] = servers;
const pauses = poll === '-' ? {} : { retryDelay: Number(poll), retryJitter: Number(poll) / 2 };
const redlock = new Redlock(servers, { retryCount: 0, ...pauses });
// Every vote against us is an event.
redlock.on('error', () => {});
let lock;

// Whether an act succeeded; it throws when it was not granted, or not the owner's any more.
async function succeeds(act) {
  try {
    await act();
    return true;
  } catch (error) {
    if (!(error instanceof ExecutionError)) throw error;
    return false;
  }
}

const acquire = async () => { lock = await redlock.acquire([key], Number(lease)); };

// Until it is granted. The client's own retries keep the votes of an attempt that lost, and count them against the next one.
async function acquirePatiently() {
  const { retryDelay, retryJitter } = redlock.settings;
  while (!(await succeeds(acquire))) await sleep(retryDelay + (Math.random() * 2 - 1) * retryJitter);
}

// Critical sections until the counter has its target; how many, and in how many somebody else was.
async function work(me, target, pause) {
  let done = 0;
  let overlaps = 0;
  for (;;) {
    await acquirePatiently();
    await server.set('holder', me);
    const count = Number(await server.get('counter'));
    if (count < target) {
      await sleep(1);
      await server.set('counter', count + 1);
      done += 1;
    }
    overlaps += (await server.get('holder')) !== me;
    await redlock.release(lock);
    if (count >= target) return `done ${done} ${overlaps}`;
    if (pause > 0) await sleep(Math.random() * pause);
  }
}

async function obey(order, words) {
  switch (order) {
    case 'try': return (await succeeds(acquire)) ? 'yes' : 'no';
    case 'lock': await acquirePatiently(); return 'locked';
    case 'extend': return (await succeeds(async () => { lock = await redlock.extend(lock, Number(lease)); })) ? 'extended' : 'lost';
    case 'release': return (await succeeds(() => redlock.release(lock))) ? 'released' : 'lost';
    case 'work': return work(words[0], Number(words[1]), Number(words[2]));
    default: throw new Error(`no order "${order}"`);
  }
}

const say = (line) => process.stdout.write(`${line}\n`);
const input = readline.createInterface({ input: process.stdin });
input.on('line', async (line) => {
  const [order, ...words] = line.split(' ');
  say(await obey(order, words));
});
input.on('close', () => process.exit(0));
Promise.all(servers.map((each) => once(each, 'ready'))).then(() => say('ready'));
