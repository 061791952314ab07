//! The turn of `--once-per`: a second lock, which stays closed until the job may run again.

use std::cell::Cell;
use std::future::Future;
use std::time::{Duration, SystemTime};

use clinch::{Capabilities, Guard, LockName, Locks, Mutex, Released};
use tokio::task::JoinHandle;

use crate::args::Run;
use crate::connect::{CLOSE_FOR, Limits, TRY_AGAIN, is_transient};
use crate::exit::{CONFLICT, Failure};
use crate::output::{closed_until as closed, describe, say};

/// What the name of that lock has more.
const SUFFIX: &str = "/once-per";

/// How long a turn is given back for at most, where the lock has no end by itself.
const GIVE_BACK_FOR: Duration = Duration::from_secs(30);

/// The name of the lock that remembers when a `--once-per` job of this one began; `None`: it would be too long for a name, so there is none.
pub(crate) fn name_of(name: &str) -> Option<String> {
    let name = format!("{name}{SUFFIX}");
    LockName::new(&name).is_ok().then_some(name)
}

/// Until when a `--once-per` job of this lock does not run again; `None`: it may run.
pub(crate) async fn closed_until(locks: &Locks, name: &str) -> clinch::Result<Option<SystemTime>> {
    let Some(name) = name_of(name) else { return Ok(None) };
    Ok(locks.state(&name).await?.and_then(|state| state.closed_until))
}

/// Refuses `--once-per` where it cannot work, before anything is waited for.
pub(crate) fn check(run: &Run) -> Result<(), Failure> {
    if run.once_per.is_none() || name_of(&run.name).is_some() {
        return Ok(());
    }
    let longest = LockName::MAX_LEN - SUFFIX.len();
    Err(Failure::usage(format!(
        "the name of the lock is too long for --once-per, which leaves it {longest} bytes: \"{}\"",
        run.name
    )))
}

/// Refuses what only a store that can keep a lock closed can do, before anything is locked.
pub(crate) fn refuse_to_linger(run: &Run, can: Capabilities) -> Result<(), Failure> {
    if can.linger || run.min_hold.is_none() && run.once_per.is_none() {
        return Ok(());
    }
    Err(Failure::usage("--min-hold and --once-per need a store that can keep a lock closed; this one cannot"))
}

/// With `--once-per`, takes the lock of the turn. Who is gone may have it for a while: it is then asked for again, and so is a store that does not
/// answer, as for the lock itself.
pub(crate) async fn take(locks: &Locks, limits: &Limits, run: &Run) -> Result<Option<Guard>, Failure> {
    let Some(name) = name_of(&run.name).filter(|_| run.once_per.is_some()) else { return Ok(None) };
    let mutex = locks.mutex(&name)?;
    let soon = limits.now() + CLOSE_FOR;
    let mut told = false;
    loop {
        let (why, is_held) = match limits.keep(attempt(locks, &mutex, &name)).await {
            Ok(Turn::Ours(turn)) => return Ok(Some(turn)),
            Ok(Turn::Over(until)) => {
                let (name, closed) = (&run.name, closed(until));
                return Err(Failure::taken(format!(
                    "\"{name}\" ran a short time ago, and is {closed} to --once-per"
                )));
            }
            // Nobody does the work for as long as that one is dead, say.
            Ok(Turn::Held(by)) => (Failure::new(CONFLICT, format!("lock \"{name}\" is held{by}")), true),
            Err(error) if is_transient(&error) => (error.into(), false),
            Err(error) => return Err(error.into()),
        };
        // Who may have the lock beside us has the turn for the moment in which its job begins.
        let begins = is_held && (run.share.shared || run.share.permits.is_some());
        if !(limits.go_on() || begins && limits.now() < soon) {
            return Err(why);
        }
        if limits.go_on() && !run.quiet && !std::mem::replace(&mut told, true) {
            say(format_args!("{}; asking again", why.message));
        }
        tokio::time::sleep(TRY_AGAIN).await;
    }
}

/// Whose turn it is.
enum Turn {
    Ours(Guard),
    /// There was one; there is none until then.
    Over(SystemTime),
    /// Another's, who is to begin its job: by whom.
    Held(String),
}

async fn attempt(locks: &Locks, mutex: &Mutex, name: &str) -> clinch::Result<Turn> {
    if let Some(turn) = mutex.try_lock().await? {
        return Ok(Turn::Ours(turn));
    }
    let state = locks.state(name).await?;
    let (closed, claims) = state.map(|state| (state.closed_until, state.claims)).unwrap_or_default();
    Ok(match (closed, claims.iter().find(|claim| claim.granted)) {
        (Some(until), _) => Turn::Over(until),
        (None, by) => Turn::Held(by.map(|by| format!(": {}", describe(by))).unwrap_or_default()),
    })
}

/// Keeps the lock of the turn closed for its time: the job has begun. Goes on also when nobody waits for it any more.
pub(crate) fn count(turn: Guard, period: Duration, name: String) -> JoinHandle<()> {
    tokio::spawn(async move {
        let why = match turn.release_closed(period).await {
            Ok(Released::Released) => return,
            Ok(Released::AlreadyLost(loss)) => loss.to_string(),
            Err(error) => error.to_string(),
        };
        say(format_args!("could not note that \"{name}\" ran; it may run again before its time: {why}"));
    })
}

/// With `--retry-failed`, opens the turn again after a job that failed; gives up when `hurried` completes. Only while its lock is held: after that,
/// the turn may be another's, whom nothing would tell from us.
pub(crate) async fn give_back(locks: &Locks, run: &Run, guard: &Guard, hurried: impl Future<Output = ()>) {
    let Some(name) = name_of(&run.name).filter(|_| run.retry_failed && guard.is_held()) else { return };
    let failure = Cell::new(None);
    let opened = async {
        loop {
            let step = async {
                // What is sent to a store that does not answer may arrive when the lock is another's.
                guard.verify().await?;
                locks.open(&name).await
            };
            match step.await {
                Err(error) if is_transient(&error) => failure.set(Some(error.to_string())),
                Err(error) => return Err(error.to_string()),
                Ok(()) => return Ok(()),
            }
            tokio::time::sleep(TRY_AGAIN).await;
        }
    };
    let unanswered = || failure.take().unwrap_or_else(|| "the store did not answer in time".to_owned());
    // As long as a release is tried, also where the lock is renewed meanwhile.
    let over = tokio::time::sleep(guard.remaining().unwrap_or(GIVE_BACK_FOR));
    let done = tokio::select! {
        biased;
        done = opened => done,
        loss = guard.lost() => Err(loss.to_string()),
        () = hurried => Err(unanswered()),
        () = over => Err(unanswered()),
    };
    if let Err(why) = done {
        let name = &run.name;
        say(format_args!(
            "could not note that \"{name}\" failed; it does not run again before its time: {why}"
        ));
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Verb};

    fn refused(options: &[&str], linger: bool) -> bool {
        let line = ["clinch", "run", "-u", "memory://"].iter().chain(options).chain(&["x", "true"]);
        let Verb::Run(run) = Cli::try_parse_from(line).unwrap().verb else { panic!("another verb") };
        let mut can = Capabilities::default();
        can.linger = linger;
        refuse_to_linger(&run, can).is_err_and(|failure| failure.code == crate::exit::USAGE)
    }

    #[test]
    fn a_store_that_cannot_close_locks_is_not_asked_to() {
        for options in [["--min-hold", "1h"], ["--once-per", "1h"]] {
            assert!(refused(&options, false) && !refused(&options, true), "{options:?}");
        }
        assert!(!refused(&["--max-hold", "1h"], false));
    }
}
