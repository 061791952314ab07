//! Rounds: some time of work and faults, then everything is let go, looked after and judged.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use crate::args::Args;
use crate::cells::{Cells, Fault, Step};
use crate::crew::Crew;
use crate::dice::{Deck, Dice};
use crate::harm::Harm;
use crate::judge::{self, Struck};
use crate::log::Log;
use crate::operator::{Found, Operator, Order};
use crate::say::now;
use crate::stage::{self, Extent, Stage};
use crate::total::Total;
use crate::worker::Job;
use crate::wrappers::{self, Place};

/// How long a run must be for every fault to meet every step. In a shorter one each must meet something.
const ENOUGH: Duration = Duration::from_secs(600);

/// Between two harms that workers do to themselves, in milliseconds.
const HARMS: (u64, u64) = (250, 700);

/// Between two claims that an operator takes away, in milliseconds.
const BREAKS: (u64, u64) = (800, 2500);

/// Between two workers that end in peace, in milliseconds.
const RETIREMENTS: (u64, u64) = (5000, 12_000);

/// How many jobs run under `clinch run` at a time.
const WRAPPERS: u64 = 2;

/// Between two faults of servers, in milliseconds.
const PAUSES: (u64, u64) = (100, 900);

/// Tortures one store, round by round.
pub(crate) fn run(store: &str, args: &Args) -> Total {
    let stage = stage::start(store).expect("a store");
    let until = Instant::now() + args.time;
    let mut cells = Cells::default();
    let (mut total, mut steps, mut number) = (Total::default(), Vec::new(), 0);
    while number == 0 || Instant::now() < until {
        number += 1;
        let time = args.round.min(until.saturating_duration_since(Instant::now()));
        let round = Round { store, args, stage: &*stage, number, time };
        let ended = round.run();
        println!("{store} round {number}: {}", ended.total);
        cells.merge(ended.cells);
        steps = ended.steps;
        total = total.and(ended.total);
        if total.violations > 0 {
            break;
        }
    }
    let faults = faults_of(&*stage);
    if has_wrappers(&*stage) {
        steps.push(Step::Job);
    }
    let mut empty = cells.empty(&faults, &steps);
    empty.retain(|(fault, step)| *fault != Fault::Break || stage.breaks().contains(step));
    if args.time < ENOUGH {
        // What is left of it then must be the bad luck of a short run.
        empty.retain(|(fault, step)| cells.is_inert(*fault, &steps) || cells.is_idle(*step, &faults));
    }
    empty.iter().for_each(|(fault, step)| println!("{store}: {fault} never met {step}"));
    println!("{store}, how often each fault met each step:\n{}", cells.table(&faults, &steps));
    total.empty += empty.len() as u64;
    println!("{store}, seed {}: {total}", args.seed);
    total
}

/// All that happens on a stage.
fn faults_of(stage: &dyn Stage) -> Vec<Fault> {
    let breaks = stage.direct().map(|_| Fault::Break);
    let mut faults = [stage.harms(), breaks.into_iter().collect(), stage.faults()].concat();
    if has_wrappers(stage) {
        faults.extend([Fault::KillWrapper, Fault::StopWrapper, Fault::KillJob]);
    }
    faults
}

/// Whether other processes see the store, and the command is there.
fn has_wrappers(stage: &dyn Stage) -> bool {
    stage.direct().is_some() && wrappers::clinch().is_some()
}

struct Round<'a> {
    store: &'a str,
    args: &'a Args,
    stage: &'a dyn Stage,
    number: u64,
    time: Duration,
}

struct Ended {
    total: Total,
    cells: Cells,
    steps: Vec<Step>,
}

impl Round<'_> {
    fn run(&self) -> Ended {
        let dir = clinch_testkit::temp_dir();
        let history = dir.path().join("history.jsonl");
        let prefix = format!("torture/{}/", self.number);
        let log = |process: &str| Log::open(&history, process, &prefix).expect("a history");
        let stop = AtomicBool::new(false);
        let (orders, ordered) = channel();
        let (crew, struck, found) = std::thread::scope(|scope| {
            let operator = self.stage.direct().map(|url| {
                let operator =
                    Operator::new(url, log("operator"), self.dice(1), self.stage.breaks().to_vec());
                scope.spawn(move || operator.run(&ordered))
            });
            let faults = scope.spawn(|| self.strike(&log("nemesis"), &stop));
            let place = self.place(&history, &prefix);
            let runs: Vec<_> = (0..self.wrappers())
                .map(|who| {
                    let (place, log, orders) = (place.clone(), log("runs"), orders.clone());
                    let (dice, stop) = (self.dice(16 + who), &stop);
                    scope.spawn(move || wrappers::run(&place, &log, dice, who, &orders, stop))
                })
                .collect();
            let mut crew = Crew::start(self.job(&history, &prefix), log("crew"), self.workers());
            self.harm(&mut crew, &orders);
            stop.store(true, Ordering::Release);
            // Faults end before the work does: what cannot go on then never will.
            while !faults.is_finished() {
                crew.tend(true);
                tell(&mut crew, &orders);
            }
            let struck = faults.join().expect("the nemesis does not panic");
            crew.end(|crew| tell(crew, &orders));
            tell(&mut crew, &orders);
            for run in runs {
                let run = run.join().expect("whoever runs jobs does not panic");
                crew.cells.merge(run.cells);
                crew.odd.extend(run.odd);
            }
            let _ = orders.send(Order::Finish);
            let found = operator.map(|operator| operator.join().expect("the operator does not panic"));
            (crew, struck, found.unwrap_or_default())
        });
        self.come_to(&history, crew, &struck, found)
    }

    fn dice(&self, whose: u64) -> Dice {
        Dice::of(self.args.seed, self.number << 8 | whose)
    }

    /// A store that is one process's own has one worker, and that all tasks.
    fn workers(&self) -> usize {
        if self.stage.direct().is_some() { self.args.workers } else { 1 }
    }

    /// How many jobs run under `clinch run` at a time.
    fn wrappers(&self) -> u64 {
        if has_wrappers(self.stage) { WRAPPERS } else { 0 }
    }

    fn place(&self, history: &Path, prefix: &str) -> Place {
        Place {
            url: self.stage.url(),
            history: history.display().to_string(),
            prefix: prefix.to_owned(),
            longest_ttl: self.stage.longest_ttl(),
            longest_stop: self.stage.longest_stop(),
            shared: self.stage.shared(),
            expiry: self.stage.expiry(),
        }
    }

    fn job(&self, history: &Path, prefix: &str) -> Job {
        let tasks = self.args.tasks * if self.workers() == 1 { self.args.workers as u64 } else { 1 };
        Job {
            url: self.stage.url(),
            history: history.display().to_string(),
            process: String::new(),
            prefix: prefix.to_owned(),
            seed: self.dice(2).next(),
            tasks,
            // Where there is one worker alone, that is harmed.
            steady: self.workers() > 1,
            longest_ttl_ms: u64::try_from(self.stage.longest_ttl().as_millis()).unwrap_or(u64::MAX),
            began: now(),
        }
    }

    /// Harms servers and the ways to them until it is to stop.
    fn strike(&self, log: &Log, stop: &AtomicBool) -> Vec<Struck> {
        let (mut dice, mut struck) = (self.dice(3), Vec::new());
        let faults = self.stage.faults();
        if faults.is_empty() {
            return struck;
        }
        let mut deck = Deck::new(faults);
        while !stop.load(Ordering::Acquire) {
            std::thread::sleep(dice.ms(PAUSES.0, PAUSES.1));
            let (fault, from) = (deck.deal(&mut dice), now());
            log.note(&format!("{fault} begins"), from);
            let extent = self.stage.strike(fault, &mut dice);
            if extent != Extent::None {
                struck.push(Struck { fault, extent, from, until: now() });
            }
            log.note(&format!("{fault} is over"), now());
        }
        struck
    }

    /// Harms workers, and has claims taken away, for the time of the round.
    fn harm(&self, crew: &mut Crew, orders: &Sender<Order>) {
        let mut dice = self.dice(4);
        let end = Instant::now() + self.time;
        let mut deck: Option<Deck<(Fault, Step)>> = None;
        let mut next = [HARMS, BREAKS, RETIREMENTS].map(|(from, to)| Instant::now() + dice.ms(from, to));
        while Instant::now() < end {
            crew.tend(true);
            tell(crew, orders);
            let (which, now) = (dice.next(), Instant::now());
            if deck.is_none() && !crew.steps.is_empty() {
                deck = Some(Deck::new(pairs(&self.stage.harms(), &crew.steps)));
            }
            if let Some(deck) = deck.as_mut().filter(|_| now >= next[0]) {
                let (fault, step) = deck.deal(&mut dice);
                let after = 1 + u32::try_from(dice.below(3)).unwrap_or(0);
                let longest = self.stage.longest_stop();
                let longest = if dice.chance(60) { longest.min(1500) } else { longest };
                let time = dice.ms(200, longest);
                crew.harm(Harm { fault, step, after, time }, which);
                // Who is alone is to do something in between.
                let rest = if self.workers() == 1 { time } else { Duration::ZERO };
                next[0] = now + rest + dice.ms(HARMS.0, HARMS.1);
            }
            if now >= next[1] {
                let _ = orders.send(Order::Break);
                next[1] = now + dice.ms(BREAKS.0, BREAKS.1);
            }
            if now >= next[2] && self.workers() > 1 {
                crew.retire(which);
                next[2] = now + dice.ms(RETIREMENTS.0, RETIREMENTS.1);
            }
        }
    }

    /// Judges what happened, and says what is wrong.
    fn come_to(&self, history: &Path, mut crew: Crew, struck: &[Struck], found: Found) -> Ended {
        let mut cells = std::mem::take(&mut crew.cells);
        cells.merge(found.cells);
        let mut total = Total { faults: struck.len() as u64 + cells.all(), ..Total::default() };
        let mut odd = [std::mem::take(&mut crew.odd), found.odd].concat();
        match judge::judge(history, &self.stage.rules(), struck) {
            Ok(judged) => {
                total.grants = judged.report.counts.grants;
                total.losses = judged.losses;
                total.violations = judged.report.counts.violations;
                cells.merge(judged.cells);
                odd.extend(judged.report.notes.iter().cloned());
                let stolen = judged.stolen.iter().filter(|_| self.stage.remembers());
                odd.extend(stolen.map(|claim| format!("claim {claim} was lost and nobody took it away")));
                let needless = judged.needless.iter();
                odd.extend(
                    needless.map(|at| format!("a lease ran out at t={at} although it could be renewed")),
                );
                print!("{}", judge::words(&judged.report));
                println!("{} questions stay open", judged.report.doubts.len());
            }
            Err(error) => odd.push(format!("the history cannot be judged: {error}")),
        }
        total.violations += odd.len() as u64;
        odd.iter().for_each(|odd| println!("{} round {}: {odd}", self.store, self.number));
        if total.violations > 0 || self.args.keep {
            println!("the history is {}", self.keep(history).display());
        }
        Ended { total, cells, steps: std::mem::take(&mut crew.steps) }
    }

    /// Puts a history where it stays.
    fn keep(&self, history: &Path) -> PathBuf {
        let dir = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
        let dir = dir.join("torture");
        let to = dir.join(format!("{}-{}-{}.jsonl", self.store, self.args.seed, self.number));
        let kept = std::fs::create_dir_all(&dir).and_then(|()| std::fs::copy(history, &to));
        kept.map_or_else(|error| format!("lost: {error}").into(), |_| to)
    }
}

/// Tells the operator who has left.
fn tell(crew: &mut Crew, orders: &Sender<Order>) {
    for left in crew.left.drain(..) {
        let _ = orders.send(Order::Left(left));
    }
}

/// All harms, each in all steps.
fn pairs(harms: &[Fault], steps: &[Step]) -> Vec<(Fault, Step)> {
    harms.iter().flat_map(|fault| steps.iter().map(|step| (*fault, *step))).collect()
}
