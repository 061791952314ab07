//! Runs that enter the lock of the job around them: who may, and who has, as seen from outside.
//!
//! The job around them lets them in (`door.rs`), as long as it lives. When its wrapper was killed, they can be told by their environment only, which
//! names them and the claim, since they have become their command; and before that by their name.

use std::fs;
use std::iter::{once, successors};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime};

use clinch::backend::ClaimState;
use clinch::{ClaimId, Owner};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::{Pid, getpid, test_kill_process};
use rustix::system::uname;

use super::environment::environment;
use super::kin::may_be_wrapper;
use super::stat::Stat;
use super::sys;

/// Names this process and the claims that it has entered.
pub(crate) const REENTERED: &str = "CLINCH_REENTERED";

/// How often is looked for the same, at most. To be missed again and again takes as many parents that end just then.
const LOOKS: usize = 8;

/// How much later a process may have begun than its claim was made, by clocks that are not the same.
const CLOCKS_DIFFER: Duration = Duration::from_secs(1);

/// Looks until two looks in a row have met the same processes, or one has found what it is for: who loses its parent during a look falls
/// to where that look has been already. Among processes that come and go all the time, a few looks must do.
pub(crate) fn settled<T, M: PartialEq>(mut look: impl FnMut() -> (T, M), is_done: impl Fn(&T) -> bool) -> T {
    let (mut seen, mut met) = look();
    for _ in 1..LOOKS {
        if is_done(&seen) {
            break;
        }
        let again = look();
        let is_same = again.1 == met;
        (seen, met) = again;
        if is_same {
            break;
        }
    }
    seen
}

/// Tells by the name of this process whether it is about to enter a claim.
pub(crate) fn tell(is_about_to_enter: bool) {
    sys::set_name(if is_about_to_enter { c"clinch-enters" } else { c"clinch" });
}

/// What the command of this process has in [`REENTERED`]: one more than what this process had entered before.
pub(crate) fn mark(claim: ClaimId) -> String {
    with_mark(&std::env::var(REENTERED).unwrap_or_default(), claim, &std::process::id().to_string())
}

fn with_mark(inherited: &str, claim: ClaimId, own: &str) -> String {
    let new = format!("{claim},{own}");
    let is_own = |mark: &&str| *mark != new && mark.split_once(',').is_some_and(|(_, pid)| pid == own);
    inherited.split(' ').filter(is_own).chain([&*new]).collect::<Vec<_>>().join(" ")
}

/// Whether the run that holds a claim is one that this process descends from, or has become (`-F`), if it is of this host. Others do not wait for this process, though it
/// was told of their claim: `at` and batch systems start commands with the environment of whoever asked for it.
pub(crate) fn is_around(owner: &Owner) -> bool {
    let pid = i32::try_from(owner.pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| pid == getpid() || descends(getpid(), pid))
}

/// Whether the process that holds a claim is one of this host that is nowhere to be seen: it has ended, and its id may be another's, or is in another pid namespace.
pub(crate) fn is_gone(claim: &ClaimState) -> bool {
    let pid = i32::try_from(claim.owner.pid).ok().and_then(Pid::from_raw);
    is_here(&claim.owner)
        && pid.is_some_and(|pid| {
            // The wall clock may have been set since: a wrapper that lives is not taken for another by that alone.
            let is_another = |stat: &Stat| !had_begun(stat, claim) && !may_be_wrapper(pid);
            let is_over = |stat: Stat| stat.is_over || is_another(&stat);
            test_kill_process(pid) == Err(Errno::SRCH) || Stat::of(pid).is_some_and(is_over)
        })
}

/// Whether a process had begun when a claim was made, as far as clocks can tell.
fn had_begun(stat: &Stat, claim: &ClaimState) -> bool {
    let ago = sys::since_boot().saturating_sub(stat.begun);
    SystemTime::now().checked_sub(ago).is_some_and(|begun| begun <= claim.since + CLOCKS_DIFFER)
}

/// Those from which this process descends, from its parent on.
pub(crate) fn above() -> impl Iterator<Item = Pid> {
    successors(parent_of(getpid()), |pid| parent_of(*pid))
}

/// Whether the process that holds a claim is, as far as can be known, one that this one descends from or has become: it has this id, on a host of this name, and had begun
/// when the claim was made. Process 1 is one in each container.
pub(crate) fn is_held_around(claim: &ClaimState) -> bool {
    let had_begun = |pid: Pid| Stat::of(pid).is_some_and(|stat| had_begun(&stat, claim));
    let is_it = |pid: &Pid| u32::try_from(pid.as_raw_nonzero().get()) == Ok(claim.owner.pid);
    is_here(&claim.owner)
        && once(getpid()).chain(above()).find(is_it).is_some_and(|pid| !pid.is_init() && had_begun(pid))
}

/// Whether a process that holds a claim is no job's: it neither is a wrapper nor was told of the claim, as a job is that its wrapper has become. So it has taken that
/// itself, or it was acquired for that process, which may be this one: of what this runs nothing holds anything yet.
pub(crate) fn is_no_jobs(claim: &ClaimState) -> bool {
    let pid = i32::try_from(claim.owner.pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| {
        let is_wrapper = pid != getpid() && may_be_wrapper(pid);
        !is_wrapper && was_told(pid, claim.id) == Some(false)
    })
}

/// Whether this process has inherited the descriptor of a lock for which it waits: one of a file that it has open itself, too. Only who unlocks that file frees
/// the lock before this has ended: a wrapper that lives.
pub(crate) fn inherits_what_it_waits_for() -> bool {
    // The kernel lists what is locked by each descriptor, and its flags in octal.
    let told_of = |fd: &str| fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap_or_default();
    let is_ours = |told: &str| {
        let flags = told.lines().find_map(|line| line.strip_prefix("flags:"));
        flags
            .and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok())
            .is_some_and(|flags| OFlags::from_bits_retain(flags).contains(OFlags::CLOEXEC))
    };
    let open = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let locked = open.filter_map(|entry| {
        let told = told_of(entry.file_name().to_str()?);
        let file = fs::metadata(entry.path()).ok().filter(|_| told.contains("OFDLCK"))?;
        Some((is_ours(&told), (file.dev(), file.ino())))
    });
    let (ours, inherited): (Vec<_>, Vec<_>) = locked.partition(|(is_ours, _)| *is_ours);
    inherited.iter().any(|(_, file)| ours.iter().any(|(_, own)| own == file))
}

/// Whether this host has the name under which a claim was made.
pub(crate) fn is_here(owner: &Owner) -> bool {
    uname().nodename().to_bytes() == owner.host.as_bytes()
}

/// Whether a process descends from this one.
pub(crate) fn is_below(pid: Pid) -> bool {
    descends(pid, getpid())
}

fn descends(pid: Pid, from: Pid) -> bool {
    let look = || {
        let above: Vec<Pid> = successors(parent_of(pid), |pid| parent_of(*pid)).collect();
        (above.contains(&from), above)
    };
    settled(look, |descends| *descends)
}

fn parent_of(pid: Pid) -> Option<Pid> {
    Pid::from_raw(Stat::of(pid)?.parent)
}

/// Whether a process has entered a claim, or is about to. `None`: cannot be told yet.
pub(crate) fn has_entered(pid: Pid, claim: ClaimId) -> Option<bool> {
    // In this order: it changes its name last.
    let name = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    let is_about_to = name == b"clinch-enters\n";
    let environment = environment(pid)?;
    // What it has started has inherited this, and is not it.
    let mark = own_id(pid).map(|own| format!("{claim},{own}"));
    let marks = environment.split(|byte| *byte == 0).filter_map(|entry| {
        entry.strip_prefix(REENTERED.as_bytes()).and_then(|entry| entry.strip_prefix(b"="))
    });
    let has_entered = marks
        .flat_map(|marks| marks.split(|byte| *byte == b' '))
        .any(|one| Some(one) == mark.as_deref().map(str::as_bytes));
    Some(has_entered || is_about_to && holds(&environment, claim))
}

/// Whether a process was told of a claim. `None`: cannot be told yet.
pub(crate) fn was_told(pid: Pid, claim: ClaimId) -> Option<bool> {
    Some(holds(&environment(pid)?, claim))
}

fn holds(environment: &[u8], claim: ClaimId) -> bool {
    let claim = claim.to_string();
    environment.windows(claim.len()).any(|part| part == claim.as_bytes())
}

/// The id that a process has for itself.
fn own_id(pid: Pid) -> Option<String> {
    let status = fs::read(format!("/proc/{pid}/status")).ok()?;
    // Its name may be no text.
    let status = String::from_utf8_lossy(&status);
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    ids.split_ascii_whitespace().last().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a row of looks find and meet, and how many are taken.
    fn look_at(looks: &[(bool, &[i32])]) -> (bool, usize) {
        let mut taken = 0;
        let look = || {
            let (found, met) = looks[taken.min(looks.len() - 1)];
            taken += 1;
            (found, met.to_vec())
        };
        (settled(look, |found| *found), taken)
    }

    #[test]
    fn a_process_keeps_the_marks_of_all_that_it_has_entered() {
        let [one, two] = [1, 2].map(ClaimId::from_bits);
        let first = with_mark("", one, "7");
        assert_eq!(first, format!("{one},7"));
        assert_eq!(with_mark(&first, two, "7"), format!("{one},7 {two},7"));
        assert_eq!(with_mark(&first, two, "70"), format!("{two},70"), "what was inherited");
        assert_eq!(with_mark(&first, one, "7"), first, "once");
    }

    #[test]
    fn who_loses_its_parent_during_a_look_is_met_by_the_next() {
        assert_eq!(look_at(&[(false, &[1]), (true, &[1, 2])]), (true, 2));
        assert_eq!(look_at(&[(false, &[1]), (false, &[1, 3]), (true, &[2, 3])]), (true, 3));
    }

    #[test]
    fn nobody_is_looked_for_without_end() {
        assert_eq!(look_at(&[(false, &[1]), (false, &[1])]), (false, 2));
        assert_eq!(look_at(&[(true, &[1])]), (true, 1));
        let churn = [1, 2, 3, 4, 5, 6, 7, 8, 9].map(|pid| [pid]);
        let churn = churn.each_ref().map(|met| (false, &met[..]));
        assert_eq!(look_at(&churn), (false, LOOKS));
    }

    /// Which would look so after a step of the wall clock, though the wrapper lives.
    #[test]
    fn a_wrapper_that_seems_to_have_begun_after_its_claim_is_not_gone_but_another_program_is() {
        for (name, is_gone_then) in [("clinch", false), ("sleeper", true)] {
            let dir = tempfile::tempdir().unwrap();
            let program = dir.path().join(name);
            // By another process: a child of a test beside this one may have what we write open.
            let copied = std::process::Command::new("sh")
                .args(["-c", "cp \"$(command -v sleep)\" \"$0\""])
                .arg(&program)
                .status();
            assert!(copied.unwrap().success());
            let mut process = std::process::Command::new(&program).arg("60").spawn().unwrap();
            let began = std::time::Instant::now();
            let is_named = || {
                fs::read(format!("/proc/{}/comm", process.id())).unwrap() == format!("{name}\n").as_bytes()
            };
            while !is_named() {
                assert!(began.elapsed() < Duration::from_secs(30), "it becomes {name}");
            }
            let claim = ClaimState {
                id: ClaimId::from_bits(1),
                mode: clinch::Mode::Exclusive,
                granted: true,
                token: None,
                owner: Owner {
                    host: String::from_utf8(uname().nodename().to_bytes().to_vec()).unwrap(),
                    pid: process.id(),
                    user: String::new(),
                    label: String::new(),
                },
                since: SystemTime::now() - Duration::from_secs(3600),
                expires_in: None,
            };
            let then = is_gone(&claim);
            process.kill().unwrap();
            process.wait().unwrap();
            assert_eq!((then, is_gone(&claim)), (is_gone_then, true), "{name}");
        }
    }
}
