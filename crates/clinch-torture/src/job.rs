//! A job that `clinch run` runs: it holds what its wrapper has locked, for as long as it lives.

use std::path::Path;
use std::time::{Duration, Instant};

use clinch_verify::Mode;

use crate::cells::Step;
use crate::log::Log;
use crate::say::{now, say};

/// Between two signs of life: what is written last says until when a job that was killed held.
const SIGN: Duration = Duration::from_millis(10);

/// Everything a job is told when it starts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Task {
    pub(crate) history: String,
    pub(crate) process: String,
    pub(crate) prefix: String,
    pub(crate) lock: String,
    pub(crate) shared: bool,
    /// None where the lock ends with its process.
    pub(crate) ttl: Option<Duration>,
    pub(crate) hold: Duration,
    /// When its wrapper was started.
    pub(crate) asked: u64,
}

impl Task {
    pub(crate) fn words(&self) -> Vec<String> {
        let Task { history, process, prefix, lock, shared, ttl, hold, asked } = self.clone();
        let ms = |time: Duration| time.as_millis().to_string();
        let rest = [shared.to_string(), ttl.map_or_else(|| "-".to_owned(), ms), ms(hold), asked.to_string()];
        [vec!["job".to_owned(), history, process, prefix, lock], rest.to_vec()].concat()
    }

    pub(crate) fn read(words: &[String]) -> Option<Task> {
        let [history, process, prefix, lock, shared, ttl, hold, asked] = words else { return None };
        Some(Task {
            history: history.clone(),
            process: process.clone(),
            prefix: prefix.clone(),
            lock: lock.clone(),
            shared: shared.parse().ok()?,
            ttl: ttl.parse().ok().map(Duration::from_millis),
            hold: Duration::from_millis(hold.parse().ok()?),
            asked: asked.parse().ok()?,
        })
    }
}

/// The main function of a job.
pub(crate) fn run(task: &Task) {
    let log = Log::open(Path::new(&task.history), &task.process, &task.prefix).expect("the history");
    let mode = if task.shared { Mode::Shared } else { Mode::Exclusive };
    let claim = log.claim(&log.lock_name(&task.lock), &task.process, mode, task.ttl);
    let token = std::env::var("CLINCH_TOKEN").ok().and_then(|token| token.parse().ok());
    let begun = now();
    if task.ttl.is_none() {
        // When its wrapper had a place is not known.
        claim.enqueue(task.asked);
    }
    claim.acquire(task.asked).granted(begun, token, None);
    say(&std::process::id().to_string());
    let (end, mut seen) = (Instant::now() + task.hold, begun);
    while Instant::now() < end {
        std::thread::sleep(SIGN);
        let at = now();
        claim.renewed_since(seen, at, None);
        seen = at;
    }
    log.step(Step::Job, begun, now());
    claim.release(now());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_reads_back() {
        let task = Task {
            history: "/tmp/h".into(),
            process: "j1".into(),
            prefix: "torture/1/".into(),
            lock: "rwlock".into(),
            shared: true,
            ttl: None,
            hold: Duration::from_millis(70),
            asked: 8,
        };
        assert_eq!(Task::read(&task.words()[1..]), Some(task));
    }
}
