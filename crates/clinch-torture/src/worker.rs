//! A worker: a process whose tasks take turns at the locks until it is told to end, or killed.
//!
//! | told | effect |
//! | --- | --- |
//! | `harm FAULT STEP POLLS MS` | the next turn has this step, and this harm is done in it |
//! | `end` | the turns under way are the last; then the client is closed and the process says so |
//! | the end of the input | ends at once |
//!
//! | says | when |
//! | --- | --- |
//! | `ready`, with the steps that this store has | it is connected |
//! | `kill`, `stop` or `block`, with step, milliseconds and time | right before |
//! | `odd`, with what | something happened that never should |
//! | `closed` | nothing of it is left in the store, as far as it knows |

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clinch::{Clock, ErrorKind, Locks};

use crate::cells::Fault;
use crate::dice::Dice;
use crate::harm::Harm;
use crate::life::{Work, live};
use crate::log::Log;
use crate::say::say;
use crate::turn::Terms;

/// For how long the releases under way may take at the end.
const CLOSE: Duration = Duration::from_secs(60);

/// How many tasks of a steady worker hold a lock for long.
const LONG_TASKS: u64 = 2;

/// Everything a worker is told when it starts.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) url: String,
    pub(crate) history: String,
    pub(crate) process: String,
    pub(crate) prefix: String,
    pub(crate) seed: u64,
    pub(crate) tasks: u64,
    /// Whether some of its tasks hold a lock for long; nobody harms such a worker.
    pub(crate) steady: bool,
    pub(crate) longest_ttl_ms: u64,
    /// When the round has begun.
    pub(crate) began: u64,
}

impl Job {
    pub(crate) fn words(&self) -> Vec<String> {
        let Job { url, history, process, prefix, seed, tasks, steady, longest_ttl_ms, began } = self.clone();
        let numbers = [seed, tasks, longest_ttl_ms, began].map(|number| number.to_string());
        [vec!["worker".to_owned(), url, history, process, prefix, steady.to_string()], numbers.to_vec()]
            .concat()
    }

    pub(crate) fn read(words: &[String]) -> Option<Job> {
        let [url, history, process, prefix, steady, seed, tasks, longest, began] = words else { return None };
        Some(Job {
            url: url.clone(),
            history: history.clone(),
            process: process.clone(),
            prefix: prefix.clone(),
            seed: seed.parse().ok()?,
            tasks: tasks.parse().ok()?,
            steady: steady.parse().ok()?,
            longest_ttl_ms: longest.parse().ok()?,
            began: began.parse().ok()?,
        })
    }
}

/// What the worker was told and has not done yet.
#[derive(Debug, Default)]
pub(crate) struct Orders {
    harms: Mutex<VecDeque<Harm>>,
    ending: AtomicBool,
}

impl Orders {
    fn next_harm(&self) -> Option<Harm> {
        self.harms.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    fn add(&self, harm: Harm) {
        self.harms.lock().unwrap_or_else(PoisonError::into_inner).push_back(harm);
    }

    pub(crate) fn ends(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    /// Hears what the parent says, until it is gone.
    fn hear(&self) {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            match Harm::read(&line) {
                Some(harm) => self.add(harm),
                None => self.ending.store(true, Ordering::Release),
            }
        }
        std::process::exit(1);
    }
}

/// The main function of a worker.
pub(crate) fn run(job: &Job) {
    let orders = Arc::new(Orders::default());
    let heard = orders.clone();
    std::thread::spawn(move || heard.hear());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    // What is spawned stays on this thread.
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let Some(locks) = connect(job, &orders).await else { return say("closed") };
        let terms = Terms::of(&locks, Duration::from_millis(job.longest_ttl_ms));
        let steps: Vec<&str> = terms.steps().into_iter().map(crate::cells::Step::word).collect();
        say(&format!("ready {}", steps.join(" ")));
        let log = Log::open(Path::new(&job.history), &job.process, &job.prefix).expect("the history");
        let Job { steady, began, .. } = *job;
        let work = Arc::new(Work { locks, log, orders, steady, began });
        let task = |task| {
            let dice = Dice::of(job.seed, task);
            tokio::task::spawn_local(take_turns(work.clone(), terms.clone(), task, dice))
        };
        let tasks: Vec<_> = (0..job.tasks).map(task).collect();
        for task in tasks {
            if let Err(panic) = task.await {
                say(&format!("odd a task panicked: {panic}"));
            }
        }
        end(&work).await;
    });
}

/// Connects; while servers are harmed, that takes more than one try.
async fn connect(job: &Job, orders: &Orders) -> Option<Locks> {
    while !orders.ends() {
        match clinch::connect(&job.url).await {
            Ok(locks) => return Some(locks),
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
    None
}

async fn take_turns(work: Arc<Work>, terms: Terms, task: u64, mut dice: Dice) {
    let (orders, mut number) = (&work.orders, 0);
    let long = work.steady && task < LONG_TASKS;
    while !orders.ends() {
        // A turn that lasts has no room for what somebody wants to see soon.
        let harm = if long { None } else { orders.next_harm() };
        let soon = harm.is_some_and(|harm| harm.fault != Fault::Kill);
        let turn = match long {
            true => terms.roll_long(&mut dice, task == 0),
            false => terms.roll(&mut dice, work.time(), harm.map(|harm| harm.step), soon),
        };
        match live(&work, &turn, &format!("{task}-{number}"), harm).await {
            Ok(unused) => unused.into_iter().for_each(|harm| orders.add(harm)),
            Err(error) => say(&format!("odd a turn cannot begin: {error}")),
        }
        number += 1;
        tokio::time::sleep(dice.ms(0, 12)).await;
    }
}

/// Waits for the releases in the background, and tells whether anything is left.
async fn end(work: &Work) {
    let begun = Clock::host().now();
    // What was not answered is left to its lease, says an error: whether it goes is seen in the store.
    if let Err(error) = work.locks.close(CLOSE).await
        && error.kind() != ErrorKind::Unavailable
    {
        say(&format!("odd the client does not close: {error}"));
    }
    if !work.locks.capabilities().processes {
        // Nobody else can look.
        let mut left = work.locks.list(work.log.prefix()).await.unwrap_or_default();
        while !left.is_empty() && Clock::host().now().since(begun) < CLOSE {
            tokio::time::sleep(Duration::from_millis(50)).await;
            left = work.locks.list(work.log.prefix()).await.unwrap_or_default();
        }
        left.iter().for_each(|state| say(&format!("odd after the end, left in the store: {state:?}")));
    }
    if let Err(error) = work.log.written() {
        say(&format!("odd {error}"));
    }
    say("closed");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_reads_back() {
        let job = Job {
            url: "memory://".into(),
            history: "/tmp/h".into(),
            process: "w1".into(),
            prefix: "torture/1/".into(),
            seed: 3,
            tasks: 4,
            steady: true,
            longest_ttl_ms: 6,
            began: 5,
        };
        assert_eq!(Job::read(&job.words()[1..]).unwrap().words(), job.words());
    }
}
