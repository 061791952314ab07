//! What a task does in one turn: how it asks, what it does while it holds, how it lets go. Plain values, thrown by dice.

use std::sync::OnceLock;
use std::time::Duration;

use clinch::{Capabilities, ClaimId, Guard, Locks, Result, WriteGuard};
use clinch_verify::Mode;

use crate::cells::Step;
use crate::dice::Dice;

/// How a lock is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    Mutex,
    /// Alone, and perhaps shared later on.
    Write,
    Read,
    Permits(u32),
}

/// How many permits there are, wherever there are some.
const CAPACITY: u32 = 3;

/// The locks of a round and how each is asked for: one kind each, and one where all kinds meet.
const LOCKS: &[(&str, &[Ask])] = &[
    ("all", &[Ask::Mutex, Ask::Write, Ask::Read, Ask::Permits(1), Ask::Permits(2), Ask::Permits(3)]),
    ("mutex", &[Ask::Mutex]),
    ("pair", &[Ask::Mutex]),
    ("permits", &[Ask::Permits(1), Ask::Permits(2), Ask::Permits(1), Ask::Permits(3)]),
    ("readers", &[Ask::Read, Ask::Read, Ask::Read, Ask::Write]),
    ("rwlock", &[Ask::Read, Ask::Write]),
];

/// How many there are of each: what a dead holder has left keeps a lock from all for a while, and the others go on.
const COPIES: u64 = 8;

/// How many turns of a hundred are taken at the first of them, which is crowded.
const CROWDED: u64 = 20;

/// How long a turn that somebody wants to see waits for its lock; if in vain, another is thrown.
const SOON: Duration = Duration::from_secs(3);

/// A lock that is held all the time with a lease of ten minutes that nobody renews. What others, with short leases, do to it shows
/// only when what they have left is over, and only if nobody comes meanwhile.
const LONG: &str = "long";

/// When others come there: in the first seconds, and again after more than a minute.
const COME: (Duration, Duration) = (Duration::from_secs(8), Duration::from_secs(70));

/// A lock that is held all the time with a lease that is renewed.
const STEADY: &str = "steady";

/// Such leases, in milliseconds: nobody loses one while a minority of servers is away.
const RENEWED: std::ops::RangeInclusive<u128> = 5000..=10_000;

/// How those ask who meet such a holder. None of them waits for its end.
const BESIDE_LONG: &[Ask] = &[Ask::Mutex, Ask::Write, Ask::Read, Ask::Permits(1), Ask::Permits(3)];

/// How many turns of a hundred are taken there then.
const AT_LONG: u64 = 25;

/// TTLs side by side, in milliseconds. The short ones come more often, since they end within a round.
const TTLS: &[u64] =
    &[200, 300, 600, 600, 1000, 1000, 1500, 2000, 2000, 3000, 5000, 7000, 8000, 30_000, 600_000];

/// A TTL that a stop or a wait outlives.
const SHORT: Duration = Duration::from_secs(2);

/// How a request begins.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Start {
    /// Waits, for no longer than this.
    Wait(Option<Duration>),
    Try,
    /// Drops the request after so many polls.
    Cancel(u32),
}

/// What is done while the lock is held.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Act {
    Extend(Duration),
    Verify,
    Downgrade,
}

/// How a hold ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    Release,
    /// Released, and closed for so long.
    Linger(Duration),
    Drop,
    /// Left to itself for so long, perhaps renewed, and then freed.
    Detach {
        renewed: bool,
    },
}

/// One turn.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    pub(crate) lock: String,
    pub(crate) ask: Ask,
    pub(crate) ttl: Duration,
    /// Whether the lease is renewed in the background.
    pub(crate) renewed: bool,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) start: Start,
    pub(crate) hold: Duration,
    pub(crate) acts: Vec<Act>,
    pub(crate) end: End,
}

/// What a store can do of all that.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    can: Capabilities,
    ttls: Vec<Duration>,
}

impl Terms {
    /// `longest`: the longest lease that shall be asked for.
    pub(crate) fn of(locks: &Locks, longest: Duration) -> Terms {
        let ttls = TTLS.iter().map(|ms| Duration::from_millis(*ms)).filter(|ttl| *ttl <= longest).collect();
        Terms { can: locks.capabilities(), ttls }
    }

    /// The names of all locks that workers ask for.
    pub(crate) fn locks() -> impl Iterator<Item = String> {
        let copies = LOCKS.iter().flat_map(|(kind, _)| (0..COPIES).map(|number| copy(kind, number)));
        copies.chain([LONG, STEADY].map(str::to_owned))
    }

    /// The steps that there are on this store.
    pub(crate) fn steps(&self) -> Vec<Step> {
        let can = |step: &Step| match step {
            Step::Downgrade => self.can.shared,
            Step::Detach | Step::Tend => self.can.detached,
            // Another's.
            Step::Job => false,
            _ => true,
        };
        Step::ALL.iter().copied().filter(can).collect()
    }

    fn allows(&self, ask: Ask) -> bool {
        match ask {
            Ask::Mutex => true,
            Ask::Write | Ask::Read => self.can.shared,
            Ask::Permits(_) => self.can.permits,
        }
    }

    /// Throws a turn that has this step, if it comes so far, with a lease that ends soon if it is to.
    /// `time`: since the round has begun.
    pub(crate) fn roll(&self, dice: &mut Dice, time: Duration, wanted: Option<Step>, soon: bool) -> Turn {
        let comes = time.as_secs() % COME.1.as_secs() < COME.0.as_secs();
        let (lock, asks) = match wanted {
            None if comes && dice.chance(AT_LONG) => (LONG, BESIDE_LONG),
            _ => *dice.pick(LOCKS),
        };
        let asks: Vec<Ask> = asks.iter().copied().filter(|ask| self.allows(*ask)).collect();
        let mut ask = if asks.is_empty() { Ask::Mutex } else { *dice.pick(&asks) };
        let acts = self.roll_acts(dice, wanted);
        let downgrades = acts.iter().any(|act| matches!(act, Act::Downgrade));
        if downgrades {
            ask = Ask::Write;
        }
        let mut ttl = *dice.pick(&self.ttls);
        if soon || lock == LONG {
            ttl = ttl.min(SHORT);
        }
        let renewed = !dice.chance(15);
        let max_hold = (wanted.is_none() && dice.chance(8)).then(|| dice.ms(20, 300));
        let hold = match max_hold {
            // Let go just about when it is over.
            Some(time) => time.saturating_sub(Duration::from_millis(5)) + dice.ms(0, 10),
            None if !renewed && ttl <= SHORT && dice.chance(50) => ttl.mul_f64(1.3),
            None => roll_hold(dice),
        };
        // Who goes on as a reader needs a lock that has readers.
        let lock = if downgrades && lock != LONG { *dice.pick(&["all", "readers", "rwlock"]) } else { lock };
        let number = if dice.chance(CROWDED) { 0 } else { dice.below(COPIES) };
        Turn {
            lock: if lock == LONG { LONG.to_owned() } else { copy(lock, number) },
            ask,
            ttl,
            renewed,
            max_hold,
            start: match roll_start(dice, wanted) {
                Start::Wait(None) if lock == LONG => Start::Wait(Some(dice.ms(100, 2000))),
                start => start,
            },
            hold,
            acts,
            end: self.roll_end(dice, wanted, ask),
        }
    }

    /// Throws a turn that lasts for longer than what short leases leave behind: of a lease that is renewed, or of one that is as long.
    pub(crate) fn roll_long(&self, dice: &mut Dice, renewed: bool) -> Turn {
        let steady = self.ttls.iter().copied().filter(|ttl| RENEWED.contains(&ttl.as_millis()));
        let steady: Vec<Duration> = steady.filter(|_| renewed).collect();
        let longest = self.ttls.iter().copied().max().unwrap_or(SHORT);
        Turn {
            lock: if renewed { STEADY.to_owned() } else { LONG.to_owned() },
            ask: if self.can.shared { Ask::Read } else { Ask::Mutex },
            ttl: if steady.is_empty() { longest } else { *dice.pick(&steady) },
            renewed,
            max_hold: None,
            start: Start::Wait(None),
            hold: if renewed { dice.ms(20_000, 60_000) } else { Duration::from_secs(180) },
            acts: Vec::new(),
            end: End::Release,
        }
    }

    fn roll_acts(&self, dice: &mut Dice, wanted: Option<Step>) -> Vec<Act> {
        let mut acts = Vec::new();
        let extend = Act::Extend(*dice.pick(&self.ttls));
        if wanted == Some(Step::Extend) || dice.chance(20) {
            acts.push(extend);
        }
        if wanted == Some(Step::Verify) || dice.chance(20) {
            acts.push(Act::Verify);
        }
        if self.can.shared && (wanted == Some(Step::Downgrade) || dice.chance(15)) {
            acts.push(Act::Downgrade);
        }
        dice.shuffle(&mut acts);
        acts
    }

    fn roll_end(&self, dice: &mut Dice, wanted: Option<Step>, ask: Ask) -> End {
        let renewed = dice.chance(50);
        match wanted {
            Some(Step::Release) => End::Release,
            Some(Step::Drop) => End::Drop,
            Some(Step::Detach | Step::Tend) if ask != Ask::Write => End::Detach { renewed },
            _ => match dice.below(100) {
                0..45 => End::Release,
                45..70 => End::Drop,
                70..80 if self.can.linger && ask != Ask::Write => End::Linger(dice.ms(20, 400)),
                80..95 if self.can.detached && ask != Ask::Write => End::Detach { renewed },
                _ => End::Release,
            },
        }
    }
}

fn roll_start(dice: &mut Dice, wanted: Option<Step>) -> Start {
    match wanted {
        Some(Step::Try) => Start::Try,
        Some(Step::Cancel) => Start::Cancel(1 + u32::try_from(dice.below(4)).unwrap_or(0)),
        Some(_) => Start::Wait(Some(SOON)),
        None => match dice.below(100) {
            0..10 => Start::Wait(None),
            10..60 => Start::Wait(Some(dice.ms(1, 2000))),
            60..80 => Start::Try,
            _ => Start::Cancel(u32::try_from(dice.below(5)).unwrap_or(0)),
        },
    }
}

fn roll_hold(dice: &mut Dice) -> Duration {
    match dice.below(100) {
        0..50 => dice.ms(0, 20),
        50..85 => dice.ms(20, 300),
        85..99 => dice.ms(300, 1200),
        _ => dice.ms(1200, 5000),
    }
}

fn copy(lock: &str, number: u64) -> String {
    format!("{lock}-{number}")
}

impl Ask {
    pub(crate) fn mode(self) -> Mode {
        match self {
            Ask::Mutex | Ask::Write => Mode::Exclusive,
            Ask::Read => Mode::Shared,
            Ask::Permits(n) => Mode::Permits { n: n.into(), of: CAPACITY.into() },
        }
    }

    /// Waits for the lock. Before it does, it tells by which id the store will know the claim.
    pub(crate) async fn wait(
        self,
        locks: &Locks,
        name: &str,
        patience: Option<Duration>,
        told: &OnceLock<ClaimId>,
    ) -> Result<Held> {
        // Each primitive's request is of another type.
        macro_rules! wait {
            ($request:expr) => {{
                let mut request = $request;
                let _ = told.set(request.claim_id()?);
                match patience {
                    Some(patience) => request.timeout(patience).await?,
                    None => request.await?,
                }
            }};
        }
        let (mutex, rwlock) = (locks.mutex(name)?, locks.rwlock(name)?);
        let semaphore = locks.semaphore(name, CAPACITY)?;
        Ok(match self {
            Ask::Mutex => Held::Guard(wait!(mutex.lock())),
            Ask::Write => Held::Writer(wait!(rwlock.write())),
            Ask::Read => Held::Guard(wait!(rwlock.read())),
            Ask::Permits(n) => Held::Guard(wait!(semaphore.acquire(n)?)),
        })
    }

    pub(crate) async fn attempt(self, locks: &Locks, name: &str) -> Result<Option<Held>> {
        Ok(match self {
            Ask::Mutex => locks.mutex(name)?.try_lock().await?.map(Held::Guard),
            Ask::Write => locks.rwlock(name)?.try_write().await?.map(Held::Writer),
            Ask::Read => locks.rwlock(name)?.try_read().await?.map(Held::Guard),
            Ask::Permits(n) => locks.semaphore(name, CAPACITY)?.try_acquire(n).await?.map(Held::Guard),
        })
    }
}

/// What was granted.
#[derive(Debug)]
pub(crate) enum Held {
    Guard(Guard),
    Writer(WriteGuard),
}

impl Held {
    pub(crate) fn guard(&self) -> &Guard {
        match self {
            Held::Guard(guard) => guard,
            Held::Writer(writer) => writer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms() -> Terms {
        let mut can = Capabilities::default();
        (can.shared, can.permits, can.linger, can.detached) = (true, true, true, true);
        Terms { can, ttls: TTLS.iter().map(|ms| Duration::from_millis(*ms)).collect() }
    }

    /// A step that no turn comes to would leave its cells empty for ever.
    #[test]
    fn a_wanted_step_is_part_of_the_turn() {
        let (terms, mut dice) = (terms(), Dice::of(5, 0));
        for step in terms.steps() {
            for _ in 0..50 {
                let turn = terms.roll(&mut dice, Duration::ZERO, Some(step), true);
                let acts = |wanted: fn(&Act) -> bool| turn.acts.iter().any(wanted);
                let waits = matches!(turn.start, Start::Wait(_));
                let found = match step {
                    Step::Lock | Step::Hold => waits,
                    Step::Try => matches!(turn.start, Start::Try),
                    Step::Cancel => matches!(turn.start, Start::Cancel(_)),
                    Step::Extend => waits && acts(|act| matches!(act, Act::Extend(_))),
                    Step::Verify => waits && acts(|act| matches!(act, Act::Verify)),
                    Step::Downgrade => waits && acts(|act| matches!(act, Act::Downgrade)),
                    Step::Detach | Step::Tend => {
                        waits && (matches!(turn.end, End::Detach { .. }) || turn.ask == Ask::Write)
                    }
                    Step::Drop => waits && matches!(turn.end, End::Drop),
                    Step::Release => waits && matches!(turn.end, End::Release),
                    Step::Job => false,
                };
                assert!(found, "{step}: {turn:?}");
                assert!(turn.ttl <= SHORT);
            }
        }
    }
}
