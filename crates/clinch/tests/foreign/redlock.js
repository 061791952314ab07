// A worker on @sesamecare-oss/redlock, with one server. worker.rs says what it may be told.
//
// Arguments: port, key, lease (ms), pause between two tries (ms; - for the client's own).

const readline = require('node:readline');
const { setTimeout: sleep } = require('node:timers/promises');
const { Redlock, ExecutionError } = require('@sesamecare-oss/redlock');
const { Redis } = require('ioredis');

const [port, key, lease, poll] = process.argv.slice(2);
// Without its server, that is without its test, a worker ends.
const server = new Redis({ port: Number(port), retryStrategy: () => process.exit(1) });
const pauses = poll === '-' ? {} : { retryDelay: Number(poll), retryJitter: Number(poll) / 2 };
const redlock = new Redlock([server], { retryCount: 0, ...pauses });
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

const acquire = async (settings) => { lock = await redlock.acquire([key], Number(lease), settings); };
const patient = { retryCount: -1 };

// Critical sections until the counter has its target; how many, and in how many somebody else was.
async function work(me, target, pause) {
  let done = 0;
  let overlaps = 0;
  for (;;) {
    await acquire(patient);
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
    case 'try': return (await succeeds(() => acquire())) ? 'yes' : 'no';
    case 'lock': await acquire(patient); return 'locked';
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
server.once('ready', () => say('ready'));
