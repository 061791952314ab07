//! A job that is all of a pid namespace but its process 1, which is us, where no `/proc` shows it: one call reaches whatever is there.

use std::io;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, getpid, kill_process, waitid, waitpid,
};

use super::kin::can_look;
use super::signals::asks_to_end;
use super::sys;

/// Whether the job is to be reached so: nothing shows its parts.
pub(crate) fn is_the_job() -> bool {
    getpid().is_init() && can_look().is_err()
}

/// Whether all parts of a job can be reached, in one way or the other.
pub(crate) fn can_reach_all() -> io::Result<()> {
    can_look().or_else(|error| if getpid().is_init() { Ok(()) } else { Err(error) })
}

/// How long is waited for those who were killed to be gone. Whoever is left then is another user's, or stuck, and ends with us.
const GONE_WITHIN: Duration = Duration::from_secs(1);

/// Sends all of it a signal that is to end it; says whether any part is left to wait for. `since`: when it was sent for the first time.
pub(crate) fn end(signal: Signal, since: Instant) -> bool {
    sys::kill_everybody(signal);
    // Who is stopped does not hear it.
    sys::kill_everybody(Signal::CONT);
    // Whoever lost its parents is a child of ours. The watch is none that is waited for.
    let look = WaitIdOptions::NOHANG | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    waitid(WaitId::All, look).is_ok() && since.elapsed() < GONE_WITHIN
}

/// Passes a signal on, which all of our process group may have already. What is meant for all goes to all, since nobody can tell who is in which
/// group; all else to the first process, while there is one.
pub(crate) fn pass_on(signal: Signal, first: Option<Pid>, group_has_it: bool) {
    if asks_to_end(signal) || signal == Signal::CONT {
        if !group_has_it {
            sys::kill_everybody(signal);
        }
    } else if let Some(first) = first.filter(|first| !(group_has_it && sys::is_in_our_group(*first))) {
        let _ = kill_process(first, signal);
    }
}

/// Reaps every child that has ended, but for one that is looked at elsewhere; says whether any other is left.
pub(crate) fn reap_all(but: Option<Pid>) -> bool {
    loop {
        match sys::next_ended() {
            Ok(Some(pid)) if Some(pid) != but => _ = waitpid(Some(pid), WaitOptions::NOHANG),
            // Its end is seen first, and the others are reaped then.
            Ok(_) => return true,
            Err(_) => return false,
        }
    }
}
