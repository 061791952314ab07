//! What a worker does to itself in the middle of a step: it is killed, stopped or blocked there.
//!
//! From outside, a kill hits a chosen step by chance only. The worker says before what it is about to do, since nobody
//! else knows when that was.

use std::future::poll_fn;
use std::pin::pin;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};

use crate::cells::{Fault, Step};
use crate::say::{now, say};

/// Something to be done to a worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Harm {
    pub(crate) fault: Fault,
    /// Where.
    pub(crate) step: Step,
    /// After how many polls of it, or when it is done, if that is sooner.
    pub(crate) after: u32,
    /// For how long, where it ends.
    pub(crate) time: Duration,
}

impl Harm {
    /// The words by which a worker is told of it.
    pub(crate) fn order(&self) -> String {
        format!("harm {} {} {} {}", self.fault, self.step, self.after, self.time.as_millis())
    }

    pub(crate) fn read(order: &str) -> Option<Harm> {
        let mut words = order.strip_prefix("harm ")?.split(' ');
        Some(Harm {
            fault: Fault::from_word(words.next()?)?,
            step: Step::from_word(words.next()?)?,
            after: words.next()?.parse().ok()?,
            time: Duration::from_millis(words.next()?.parse().ok()?),
        })
    }

    pub(crate) fn strike(self) {
        say(&format!("{} {} {} {}", self.fault, self.step, self.time.as_millis(), now()));
        let signal = match self.fault {
            Fault::Kill => Signal::KILL,
            Fault::Stop => Signal::STOP,
            _ => return std::thread::sleep(self.time),
        };
        kill_process(getpid(), signal).expect("a signal to oneself");
    }
}

/// The same future, with harm done between two of its polls, or right after the last.
pub(crate) async fn harmed<T>(future: impl Future<Output = T>, mut harm: Option<Harm>) -> T {
    let mut future = pin!(future);
    let mut polls = 0;
    poll_fn(|context| {
        let outcome = future.as_mut().poll(context);
        polls += 1;
        if let Some(harm) = harm.take_if(|harm| outcome.is_ready() || polls >= harm.after) {
            harm.strike();
        }
        outcome
    })
    .await
}

/// The same future, dropped after so many polls.
pub(crate) async fn cancelled<T>(future: impl Future<Output = T>, polls: u32) -> Option<T> {
    let mut future = Box::pin(future);
    let mut left = polls;
    poll_fn(|context| {
        if left == 0 {
            return std::task::Poll::Ready(None);
        }
        left -= 1;
        let outcome = future.as_mut().poll(context);
        if outcome.is_pending() && left == 0 {
            return std::task::Poll::Ready(None);
        }
        outcome.map(Some)
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_reads_back() {
        let harm = Harm { fault: Fault::Stop, step: Step::Tend, after: 2, time: Duration::from_millis(1500) };
        let read = Harm::read(&harm.order()).unwrap();
        assert_eq!(read.order(), harm.order());
        assert!(Harm::read("end").is_none() && Harm::read("harm stop nowhere 1 2").is_none());
    }

    #[tokio::test]
    async fn a_request_is_dropped_after_its_polls() {
        assert_eq!(cancelled(async { 1 }, 1).await, Some(1));
        assert_eq!(cancelled(async { 1 }, 0).await, None);
        let twice = async {
            tokio::task::yield_now().await;
            1
        };
        assert_eq!(cancelled(twice, 1).await, None);
    }
}
