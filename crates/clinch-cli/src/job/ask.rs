//! Telling all of a job a signal: a while at a time, since all else has to wait meanwhile, until nobody is left who was not told.
//!
//! What a handler of a signal starts is not to hear that. So all are found first and told at once, and what those who live on start from then on is theirs. But
//! what has lost its parent may be of one that nobody has told, and is told. Nobody is stopped meanwhile, which programs notice.

use std::collections::HashSet;
use std::mem::take;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, getpid, pidfd_send_signal};

use super::kin::{children, is_clinch, raw};
use super::parts::Part;
use super::search::{Met, Search};
use super::signals::asks_to_end;
use super::{stat, sys};

/// How long is looked for those who are to be told, at a time.
const LOOK_FOR: Duration = Duration::from_millis(50);

/// How long is looked for them at all, for which the lock of a job that has ended is kept.
const ASK_FOR: Duration = Duration::from_secs(30);

/// How long of that all are looked for before anybody is told. The rest of a larger job is told as it is found.
pub(super) const FIND_FOR: Duration = Duration::from_millis(500);

/// How often they are, while there are more each time.
const MOST_LOOKS: usize = 5;

/// How long one may block a signal while it starts another.
const STARTS_WITHIN: Duration = Duration::from_millis(250);

/// How soon who was told and has no use for it ends at the latest, unless it is stuck, and when it was started what that or one that nobody has told leaves behind.
const ENDS_WITHIN: Duration = Duration::from_secs(1);

/// How many are named that cannot be stopped, of which some may be orphaned without end.
const MOST_NAMED: usize = 16;

/// Who is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum To {
    /// All, also who is stopped.
    All,
    /// Those in these process groups. A `clinch run` among them passes it on to what is below it.
    Groups([Option<i32>; 2]),
    /// All but those in this process group, who have it. Who is stopped goes on if that asks it to end.
    AllBut(Option<i32>),
}

/// A signal that is being told.
#[derive(Debug)]
pub(super) struct Ask {
    pub(super) signal: Signal,
    pub(super) to: To,
    search: Search,
    /// How long was looked so far.
    spent: Duration,
    /// Those that were found, until they are told.
    found: Option<Vec<Found>>,
    /// For how long others are looked for before they are.
    within: Duration,
    /// How many of them one look after another had found.
    looks: Vec<usize>,
    /// When those were told.
    met: Option<Moment>,
    /// Whether this look has told anybody.
    has_told: bool,
    /// Whether some of those who were told were about to end when it began.
    were_dying: bool,
    /// Who was told, and may yet leave others behind by ending.
    told: Vec<Part>,
    /// Those that were found below a `clinch run`, which hear it from that.
    told_elsewhere: HashSet<Pid>,
    unreached: Unreached,
}

#[derive(Debug)]
struct Found {
    part: Part,
    parent: Pid,
    reach: Reach,
}

/// The moment before those who were found are told.
#[derive(Clone, Copy, Debug)]
struct Moment {
    at: Duration,
    /// An id that was given right then, if it is known: others are given later ones.
    id: Option<Pid>,
}

impl Moment {
    fn now() -> Moment {
        // In this order: what began in the ticks before it was there by then.
        let at = sys::since_boot();
        Moment { at, id: sys::new_id() }
    }

    /// Whether it was one that was told who started this one, as far as is known.
    fn is_before(self, one: &Met) -> bool {
        let Some(begun) = one.begun() else { return false };
        if one.parent == getpid() {
            // It fell to us. Who started it is gone, perhaps before anybody has seen that.
            return begun > self.at + ENDS_WITHIN;
        }
        begun > self.at
            || begun + stat::TICK > self.at && self.id.is_some_and(|id| is_after(raw(one.pid), raw(id)))
    }
}

/// Whether an id was given after another one, a moment before or later. They begin anew when there are no more.
fn is_after(one: i32, other: i32) -> bool {
    const FAR: i32 = 1 << 14;
    let by = one.wrapping_sub(other);
    (1..FAR).contains(&by) || by < -FAR
}

/// One that runs and may not be sent a signal: another user's, by `sudo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beyond {
    /// It was to end for the lock's sake.
    Unstoppable(Pid),
    /// One was passed on to it.
    Deaf(Pid),
}

/// All of them that were met.
#[derive(Debug, Default)]
pub(super) struct Unreached {
    all: HashSet<Pid>,
    /// Those of them whose parent is none.
    pub(super) topmost: Vec<Pid>,
}

impl Unreached {
    /// Whether a signal has reached it.
    pub(super) fn send(&mut self, signal: Signal, to: &Met) -> bool {
        let sent = pidfd_send_signal(&to.held, signal);
        if sent == Err(Errno::PERM) && to.runs() {
            self.add(to.pid, to.parent);
        }
        sent.is_ok()
    }

    fn add(&mut self, one: Pid, parent: Pid) {
        if self.all.insert(one) && !self.all.contains(&parent) {
            self.topmost.push(one);
        }
    }
}

/// Those of them of which it was said.
#[derive(Debug, Default)]
pub(crate) struct Named {
    unstoppable: Those,
    deaf: Those,
}

#[derive(Debug, Default)]
struct Those {
    all: HashSet<Pid>,
    are_more: bool,
}

impl Named {
    /// What is to be said of one, if it was not.
    pub(crate) fn words(&mut self, one: Beyond) -> Option<String> {
        match one {
            Beyond::Unstoppable(pid) => self.unstoppable.words(
                pid,
                "and cannot be stopped: it runs on without the lock",
                "there are others of the job that cannot be stopped",
            ),
            Beyond::Deaf(pid) => self.deaf.words(
                pid,
                "and hears no signal from this one",
                "there are others of the job that hear no signal from this one",
            ),
        }
    }
}

impl Those {
    fn words(&mut self, pid: Pid, what: &str, others: &str) -> Option<String> {
        if self.all.contains(&pid) {
            return None;
        }
        if self.all.len() < MOST_NAMED {
            self.all.insert(pid);
            return Some(format!("process {pid} of the job is another user's {what}"));
        }
        let is_new = !std::mem::replace(&mut self.are_more, true);
        is_new.then(|| others.to_owned())
    }
}

impl Ask {
    /// Tells those who are found by this search, all who are within this time at once.
    pub(super) fn new(signal: Signal, to: To, search: Search, within: Duration) -> Ask {
        Ask {
            signal,
            to,
            search,
            spent: Duration::ZERO,
            found: Some(Vec::new()),
            looks: Vec::new(),
            met: None,
            has_told: false,
            were_dying: true,
            within,
            told: Vec::new(),
            told_elsewhere: HashSet::new(),
            unreached: Unreached::default(),
        }
    }

    /// Whether nobody was told yet.
    pub(super) fn is_finding(&self) -> bool {
        self.found.is_some()
    }

    /// How many were met.
    pub(super) fn met(&self) -> usize {
        self.search.count()
    }

    /// Looks once more for what has been left behind since.
    pub(super) fn again(&mut self, ours: impl Fn() -> Vec<(Pid, Pid)>) {
        if self.found.is_none() {
            self.spent = Duration::ZERO;
            self.look_anew(ours);
        }
    }

    /// Goes on for a while, says whether it is over, and who could not be told. Whoever has lost its parents meanwhile is a child of ours, or of a
    /// reaper in the job.
    pub(super) fn go_on(&mut self, ours: impl Fn() -> Vec<(Pid, Pid)>) -> (bool, Vec<Beyond>) {
        let begun = Instant::now();
        let until = begun + LOOK_FOR;
        self.find(until, &ours);
        let is_over = self.found.is_none() && self.tell(until, &ours);
        // No longer, since we may have been stopped.
        self.spent += begun.elapsed().min(2 * LOOK_FOR);
        let beyond = if self.to == To::All { Beyond::Unstoppable } else { Beyond::Deaf };
        let beyond = take(&mut self.unreached.topmost).into_iter().map(beyond).collect();
        (is_over || self.spent > ASK_FOR && self.found.is_none(), beyond)
    }

    /// Finds those who are to be told, until then, and tells them when a whole look finds nobody else.
    fn find(&mut self, until: Instant, ours: impl Fn() -> Vec<(Pid, Pid)>) {
        while let Some(mut found) = self.found.take() {
            let are_met = self.search.go_on(Some(until), |one| {
                let Some(part) = Part::met(one) else { return false };
                let reach = Reach::of(one, self.signal, self.to);
                found.push(Found { part, parent: one.parent, reach });
                reach.goes_below
            });
            if are_met {
                self.look_anew(&ours);
                self.looks.push(found.len());
            }
            let is_late = self.spent > self.within || self.looks.len() == MOST_LOOKS;
            let are_all = are_met && self.looks.iter().rev().nth(1) == Some(&found.len());
            if are_all || is_late {
                self.met = Some(Moment::now()).filter(|_| are_met);
                return self.tell_found(found);
            }
            self.found = Some(found);
            if !are_met {
                return;
            }
        }
    }

    fn look_anew(&mut self, ours: impl Fn() -> Vec<(Pid, Pid)>) {
        self.has_told = false;
        // In this order: what one of them leaves behind has fallen to us when it has ended.
        self.were_dying = self.are_dying();
        // What falls to us from an inner run is as well what the job has left behind.
        let next = if matches!(self.to, To::AllBut(_)) { Vec::new() } else { ours() };
        self.search.begin_anew(next);
    }

    /// Tells those that were found.
    fn tell_found(&mut self, mut found: Vec<Found>) {
        // Before anybody hears anything: when a run ends by that, what it leaves behind falls to us.
        for Found { part, reach, .. } in found.iter_mut().filter(|one| one.reach.passes_on) {
            reach.passes_on = is_clinch(raw(part.pid()));
            match reach.passes_on {
                true => add_all_below(part.pid(), &mut self.told_elsewhere),
                // It has become its command.
                false => self.search.goes_below(part),
            }
        }
        // Parents first: one whose child has ended by it would take that for done.
        for Found { part, parent, reach } in found {
            let sent = reach.hears.then(|| part.send(self.signal));
            if reach.goes_on {
                let _ = part.send(Signal::CONT);
            }
            match sent {
                Some(Err(Errno::PERM)) => self.unreached.add(part.pid(), parent),
                Some(Ok(())) => self.told.push(part),
                _ => {}
            }
        }
    }

    /// Tells those that it finds until then; says whether nobody is left who was not told.
    fn tell(&mut self, until: Instant, ours: impl Fn() -> Vec<(Pid, Pid)>) -> bool {
        loop {
            let Ask { signal, to, search, met, has_told, told, told_elsewhere, unreached, .. } = self;
            let mut theirs = Vec::new();
            let are_met = search.go_on(Some(until), |one| {
                if met.is_some_and(|met| met.is_before(one)) {
                    // It may fall to us.
                    theirs.push(one.pid);
                    return false;
                }
                if told_elsewhere.contains(&one.pid) {
                    return false;
                }
                *has_told = true;
                let reach = Reach::of(one, *signal, *to);
                if reach.passes_on {
                    add_all_below(one.pid, told_elsewhere);
                }
                if reach.hears && unreached.send(*signal, one) {
                    told.extend(Part::met(one));
                }
                if reach.goes_on {
                    let _ = pidfd_send_signal(&one.held, Signal::CONT);
                }
                reach.goes_below
            });
            search.forget(theirs);
            if !are_met {
                return false;
            }
            let has_told = self.has_told;
            if self.met.is_some() && !has_told && !self.were_dying && !self.search.has_missed() {
                return true;
            }
            self.met.get_or_insert_with(Moment::now);
            self.look_anew(&ours);
            if !has_told {
                return false;
            }
        }
    }

    /// Whether some of those who were told are about to end by that.
    fn are_dying(&mut self) -> bool {
        let may_end = asks_to_end(self.signal) || [Signal::USR1, Signal::USR2].contains(&self.signal);
        let since = self.met.map_or(ENDS_WITHIN, |met| sys::since_boot().saturating_sub(met.at));
        let is_dying = |one: &Part| one.is_to_end_by(self.signal, since > STARTS_WITHIN);
        self.told.retain(|one| may_end && since < ENDS_WITHIN && is_dying(one));
        !self.told.is_empty()
    }
}

pub(super) fn add_all_below(one: Pid, all: &mut HashSet<Pid>) {
    let mut next = vec![one];
    while let Some(parent) = next.pop() {
        next.extend(children(parent, true).filter(|child| all.insert(*child)));
    }
}

/// What is to be done about one that was found.
#[derive(Clone, Copy, Debug)]
struct Reach {
    hears: bool,
    /// Who is stopped does not hear it.
    goes_on: bool,
    passes_on: bool,
    goes_below: bool,
}

impl Reach {
    fn of(one: &Met, signal: Signal, to: To) -> Reach {
        let all = Reach { hears: true, goes_on: true, passes_on: false, goes_below: true };
        match to {
            To::All => all,
            To::Groups(groups) => {
                let is_run = is_clinch(raw(one.pid));
                let hears = one.group().is_some_and(|group| groups.contains(&Some(group)));
                Reach { hears, goes_on: false, passes_on: hears && is_run, goes_below: !is_run }
            }
            To::AllBut(but) => {
                let hears = but.is_none() || but != one.group();
                Reach { hears, goes_on: asks_to_end(signal), ..all }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_that_was_given_later_is_known_by_itself() {
        for (one, other, is_later) in
            [(5, 4, true), (4, 5, false), (4, 4, false), (301, 32_767, true), (32_767, 301, false)]
        {
            assert_eq!(is_after(one, other), is_later, "{one} {other}");
        }
    }

    /// A line is written for each, without end; or nobody hears of the others.
    #[test]
    fn of_many_that_cannot_be_stopped_some_are_named() {
        let mut named = Named::default();
        let said: Vec<String> = (1..=20)
            .cycle()
            .take(100)
            .filter_map(|id| named.words(Beyond::Unstoppable(Pid::from_raw(id)?)))
            .collect();
        assert_eq!(said.len(), MOST_NAMED + 1);
        assert!(said.last().is_some_and(|last| last.contains("others")), "{said:?}");
    }
}
