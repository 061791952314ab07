//! The command in our place, for `--no-fork`: the kernel keeps its lock by the descriptor that it inherits, until the last copy of that is
//! closed. Nobody is left to renew a lease, to tell of a loss, or to let runs inside in.

use clinch::{Capabilities, Guard};
use rustix::process::Signal;

use super::fork::{exec, forget_handlers};
use super::signals::which_asked_to_end;
use super::spawn;
use crate::args::Run;
use crate::exit::{Failure, LOST};
use crate::writer::WRITER;

/// Why the command did not take our place. The lock is ours still.
pub(crate) enum Stayed {
    Signalled(Signal),
    Because(Failure),
}

/// Refuses a store whose locks need somebody who renews them, before anything is locked.
pub(crate) fn refuse(run: &Run, can: Capabilities) -> Result<(), Failure> {
    if !run.no_fork || can.crash_release && !can.expiry {
        return Ok(());
    }
    Err(Failure::usage(
        "--no-fork leaves nobody to renew the lock, which this store would give to another while the command runs; \
         it is for file://, where the kernel keeps a lock for whoever has its descriptor",
    ))
}

/// Becomes the command. Returns only if it did not.
pub(crate) fn become_command(run: &Run, guard: &Guard) -> Stayed {
    match prepared(run, guard) {
        Ok(stayed) => stayed,
        Err(failure) => Stayed::Because(failure),
    }
}

fn prepared(run: &Run, guard: &Guard) -> Result<Stayed, Failure> {
    let mut command = spawn::command(run)?;
    spawn::tell(&mut command, guard, "");
    let Some(_descriptor) = spawn::inherited(guard)? else {
        return Err(Failure::new(LOST, format!("lock \"{}\" was lost before the job began", guard.name())));
    };
    WRITER.finish();
    // In this order: a signal that comes from now on ends us, or the command, as it ends who does not catch it.
    forget_handlers();
    if let Some(signal) = which_asked_to_end() {
        return Ok(Stayed::Signalled(signal));
    }
    Err(spawn::not_started(command.get_program(), &exec(&command)))
}
