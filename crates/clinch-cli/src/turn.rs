//! The turn of `--once-per`: a second lock, which stays closed until the job may run again.

use std::time::SystemTime;

use clinch::{Guard, LockName, Locks, Released};

use crate::args::Run;
use crate::connect::{CLOSE_FOR, Limits};
use crate::exit::Failure;
use crate::output::{closed_until as closed, say};

/// What the name of that lock has more.
const SUFFIX: &str = "/once-per";

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

/// With `--once-per`, takes the lock of the turn.
pub(crate) async fn take(locks: &Locks, limits: &Limits, run: &Run) -> Result<Option<Guard>, Failure> {
    let Some(name) = name_of(&run.name).filter(|_| run.once_per.is_some()) else { return Ok(None) };
    let mutex = locks.mutex(&name)?;
    if let Some(turn) = limits.keep(mutex.try_lock()).await? {
        return Ok(Some(turn));
    }
    let state = limits.keep(locks.state(&name)).await?;
    Err(Failure::taken(match state.and_then(|state| state.closed_until) {
        Some(until) => {
            format!("\"{}\" ran a short time ago, and is {} to --once-per", run.name, closed(until))
        }
        None => format!("lock \"{name}\" is held"),
    }))
}

/// Keeps the lock of the turn closed for its time: the job has begun.
pub(crate) async fn count(turn: Option<Guard>, run: &Run) {
    let (Some(turn), Some(period)) = (turn, run.once_per) else { return };
    let why = match turn.release_closed(period).await {
        Ok(Released::Released) => return,
        Ok(Released::AlreadyLost(loss)) => loss.to_string(),
        Err(error) => error.to_string(),
    };
    let name = &run.name;
    say(format_args!("could not note that \"{name}\" ran; it may run again before its time: {why}"));
}

/// With `--retry-failed`, opens the turn again after a job that failed. Only while its lock is held: after that, the turn may be another's, whom
/// nothing would tell from us.
pub(crate) async fn give_back(locks: &Locks, run: &Run, guard: &Guard) {
    let Some(name) = name_of(&run.name).filter(|_| run.retry_failed && guard.is_held()) else { return };
    let opened = async {
        // What is sent to a store that does not answer may arrive when the lock is another's.
        guard.verify().await?;
        locks.open(&name).await
    };
    let within = guard.remaining().map_or(CLOSE_FOR, |left| left.min(CLOSE_FOR));
    let why = match tokio::time::timeout(within, opened).await {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "the store did not answer in time".to_owned(),
    };
    let name = &run.name;
    say(format_args!("could not note that \"{name}\" failed; it does not run again before its time: {why}"));
}
