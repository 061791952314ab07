#!/usr/bin/env bash
# A worker as shell scripts lock: SET NX PX, and a delete that compares. worker.rs says what it may be told.
#
# Arguments: port, key, lease (ms), pause between two tries (ms; - for the 100 ms that scripts like).
# One redis-cli is asked line by line: a process for every command would take ten times as long.

set -u
port=$1 key=$2 lease=$3 poll=$4
[ "$poll" = - ] && poll=100
coproc cli { exec redis-cli -h 127.0.0.1 -p "$port"; }
turn=0

# Without its server, that is without its test, a worker ends.
ask() {
  printf '%s\n' "$*" >&"${cli[1]}" && IFS= read -r reply <&"${cli[0]}" || exit 1
}

pause() {
  sleep "$(printf '%d.%03d' $(($1 / 1000)) $(($1 % 1000)))"
}

try() {
  token="$$-$((++turn))"
  ask SET "$key" "$token" NX PX "$lease"
  [ "$reply" = OK ]
}

wait_for_it() {
  until try; do pause "$poll"; done
}

# Runs a command of Redis on the key if it is ours.
owned() {
  ask EVAL "\"return redis.call('get', KEYS[1]) == ARGV[1] and redis.call($1) or 0\"" 1 "$key" "$token" "$lease"
  [ "$reply" = 1 ]
}

release() {
  owned "'del', KEYS[1]"
}

# Critical sections until the counter has its target; how many, and in how many somebody else was.
work() {
  local me=$1 target=$2 between=$3 finished=0 overlaps=0 count
  while :; do
    wait_for_it
    ask SET holder "$me"
    ask GET counter
    count=${reply:-0}
    if [ "$count" -lt "$target" ]; then
      pause 1
      ask SET counter $((count + 1))
      finished=$((finished + 1))
    fi
    ask GET holder
    [ "$reply" = "$me" ] || overlaps=$((overlaps + 1))
    release || { echo "lost while working"; exit 1; }
    [ "$count" -lt "$target" ] || break
    [ "$between" = 0 ] || pause $((RANDOM % (between + 1)))
  done
  echo "done $finished $overlaps"
}

ask PING
echo ready
while read -r order words; do
  case $order in
    try) try && echo yes || echo no ;;
    lock) wait_for_it && echo locked ;;
    extend) owned "'pexpire', KEYS[1], ARGV[2]" && echo extended || echo lost ;;
    release) release && echo released || echo lost ;;
    work) work $words ;;
  esac
done
