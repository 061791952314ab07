//! The command of a job: its words, its environment, and starting it.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Command;

use clinch::{Guard, Owner};
use rustix::io::{FdFlags, fcntl_setfd};

use super::children::Child;
use super::door::Door;
use super::fork::{Before, NotBegun, Start, fork};
use super::kin::Kin;
use super::nesting;
use super::sys;
use super::watch::{Orders, Watch};
use crate::args::Run;
use crate::exit::{Failure, LOST, NOT_EXECUTABLE, NOT_FOUND};

/// The command that was asked for, with nothing said to it yet.
pub(crate) fn command(run: &Run) -> Result<Command, Failure> {
    let mut command = match (&run.shell_command, run.command.split_first()) {
        (Some(line), _) => {
            let mut command = Command::new(shell());
            command.arg("-c").arg(line);
            command
        }
        (None, Some((program, arguments))) => {
            let mut command = Command::new(program);
            command.args(arguments);
            command
        }
        (None, None) => return Err(Failure::usage("no command was given")),
    };
    if std::env::var_os("CLINCH_URL").is_some_and(|url| clinch::holds_secret(&url.to_string_lossy())) {
        command.env("CLINCH_URL", "withheld://");
    }
    Ok(command)
}

/// Who runs a line of `-c`: as flock does, whose lines are to mean the same here.
fn shell() -> OsString {
    std::env::var_os("SHELL").filter(|shell| !shell.is_empty()).unwrap_or_else(|| "/bin/sh".into())
}

/// Tells the job what it holds, and where runs inside it enter that: an empty address is nowhere.
pub(crate) fn tell(command: &mut Command, guard: &Guard, door: &str) {
    let held = std::env::var(nesting::HELD).unwrap_or_default();
    let (name, claim) = (guard.name().as_str(), guard.claim_id());
    command.env("CLINCH_NAME", name);
    command.env("CLINCH_TOKEN", guard.token().to_string());
    command.env("CLINCH_CLAIM", claim.to_string());
    command.env(nesting::HELD, nesting::with(&held, name, claim, door));
}

/// Tells a command of ours of no job around us, not to be taken for a part of it; nor which store is meant.
pub(crate) fn forget_jobs(command: &mut Command) {
    let ours = std::env::vars_os().map(|(name, _)| name);
    for name in ours.filter(|name| name.as_encoded_bytes().starts_with(b"CLINCH_")) {
        command.env_remove(name);
    }
}

/// Starts the job. It has yet to become the command, which takes a while or fails.
///
/// Where the kernel frees a lock with its last descriptor, the job inherits one, and so does a watch, so that killing us does not free
/// the lock under a running job. Elsewhere that watch ends all of the job if we are killed.
pub(crate) fn start(
    command: &Command,
    guard: &Guard,
    door: Door,
    orders: Orders<'_>,
) -> Result<(Child, Start), Failure> {
    let inherited = inherited(guard)?;
    let turn = match orders.turn {
        Some((turn, _)) => self::inherited(turn)?,
        None => None,
    };
    let mut watch = Watch::start(guard, inherited.as_ref(), turn.as_ref(), orders)
        .map_err(|error| Failure::system("cannot watch over the command", error))?;
    // The job is not to have it.
    drop(turn);
    // In this order: we may be stopped between any two of these.
    watch.lasts_until(guard.deadline());
    let now = sys::since_boot();
    let until = guard.remaining().map(|left| now.saturating_add(left));
    if !guard.is_held() {
        return Err(not_begun(command, guard, &NotBegun::TooLate));
    }
    let kin = Kin::new(orders.orphans, watch.pid());
    let before = Before { watch: &watch, until };
    let (pid, start) = fork(command, &before).map_err(|error| match error.kind() {
        // A word with a zero in it.
        io::ErrorKind::InvalidInput => not_started(command.get_program(), &error),
        _ => Failure::system("cannot start the command", error),
    })?;
    Ok((Child::new(pid, kin, door, watch), start))
}

/// The descriptor that keeps the lock in whoever inherits it, where there is one; open until it is dropped, also after an exec.
pub(crate) fn inherited(guard: &Guard) -> Result<Option<OwnedFd>, Failure> {
    let inherited = guard.descriptor();
    if let Some(descriptor) = &inherited {
        // There is no other thread that could start another process meanwhile.
        fcntl_setfd(descriptor.as_fd(), FdFlags::empty())
            .map_err(|error| Failure::system("cannot pass the lock on", error))?;
    }
    Ok(inherited)
}

/// Why the job did not begin. Where it was too late, another may have the lock.
pub(crate) fn not_begun(command: &Command, guard: &Guard, why: &NotBegun) -> Failure {
    match why {
        NotBegun::TooLate => too_late(guard),
        NotBegun::Failed(error) => not_started(command.get_program(), error),
    }
}

pub(crate) fn too_late(guard: &Guard) -> Failure {
    Failure::new(LOST, format!("lock \"{}\" was lost before the job began", guard.name()))
}

/// Why a command did not start, with a shell's exit code for it.
pub(crate) fn not_started(program: &OsStr, error: &io::Error) -> Failure {
    let code = if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { NOT_EXECUTABLE };
    Failure::new(code, format!("cannot run {}: {error}", program.to_string_lossy()))
}

/// What `clinch ls` shows when nobody gave a label: the program. Its arguments may hold secrets, and the store may be
/// read by more people than this host's `ps`. So may a word with a = in it, which was meant for the environment.
pub(crate) fn default_label(run: &Run) -> String {
    let program = run.command.first().filter(|_| run.shell_command.is_none()).cloned().unwrap_or_else(shell);
    let name = Path::new(&program).file_name().unwrap_or(&program).to_string_lossy();
    let program = if program.to_string_lossy().contains('=') { "".into() } else { name };
    program.chars().filter(|c| !c.is_control()).take(Owner::MAX_LABEL / 4).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clinch::{Env, Lane, Locks};
    use rustix::process::{WaitOptions, waitpid};

    use super::*;
    use crate::args::{Orphans, Store};

    fn store() -> Store {
        Store { url: "memory://".to_owned() }
    }

    fn orders(store: &Store) -> Orders<'_> {
        let (orphans, ttl) = (Orphans::Leave, Duration::ZERO);
        Orders { store, orphans, closed_until: None, turn: None, ttl, grace: None }
    }

    #[test]
    fn no_job_starts_without_its_lock() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let env = Env::host(Lane::here().unwrap());
            let locks = Locks::connect("memory://", env).await.unwrap();
            let guard =
                locks.max_hold(Duration::from_millis(1)).unwrap().mutex("x").unwrap().lock().await.unwrap();
            guard.lost().await;
            let started = start(&Command::new("true"), &guard, Door::open(), orders(&store()));
            assert_eq!(started.unwrap_err().code, LOST);
        });
    }

    #[test]
    fn a_start_that_took_too_long_is_none() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let env = Env::host(Lane::here().unwrap());
            let locks = Locks::connect("memory://", env).await.unwrap();
            let guard = locks.mutex("x").unwrap().lock().await.unwrap();
            let watch = Watch::start(&guard, None, None, orders(&store())).unwrap();
            let before = Before { watch: &watch, until: Some(Duration::ZERO) };
            let (pid, start) = fork(&Command::new("true"), &before).unwrap();
            assert!(!start.has_begun().await && matches!(start.failure(), Some(NotBegun::TooLate)));
            waitpid(Some(pid), WaitOptions::empty()).unwrap();
        });
    }
}
