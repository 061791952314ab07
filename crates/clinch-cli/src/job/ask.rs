//! Telling all of a job a signal: a while at a time, since all else has to wait meanwhile, until nobody is left who was not told.
//!
//! What a handler of a signal starts is not to hear that, and nobody can tell it from what was started just before. So all are stopped until the last one is
//! found, and then told at once. Whoever starts others sees of that at most a CONT behind the signal, which systemd sends, too.

use std::collections::HashSet;
use std::mem::take;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, pidfd_send_signal};

use super::kin::{children, is_clinch, raw};
use super::parts::Part;
use super::search::{Met, Search};
use super::signals::{asks_to_end, ends_by_default};
use super::sys;

/// How long is looked for those who are to be told, at a time.
const LOOK_FOR: Duration = Duration::from_millis(50);

/// How long is looked for them at all, for which the lock of a job that has ended is kept.
const ASK_FOR: Duration = Duration::from_secs(30);

/// How long a job is stopped at most to be told. The rest of a larger one is told as it is found.
pub(super) const FIND_FOR: Duration = Duration::from_millis(500);

/// How long of that is waited for one that is in a call which nothing stops: its child is to become another program, or it waits for storage.
const RETURNS_WITHIN: Duration = Duration::from_millis(20);

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
    /// When all were met for the first time. What one has started later is what it does about the signal.
    met: Option<Duration>,
    /// Whether anybody was told since.
    has_told: bool,
    /// Those that were found below a `clinch run`, which hear it from that.
    told_elsewhere: HashSet<Pid>,
    unreached: Unreached,
    /// Who is to be told as soon as all are found.
    hold: Option<Hold>,
}

/// Those who were found so far. They start nothing more.
#[derive(Debug)]
struct Hold {
    found: Vec<Found>,
    within: Duration,
    since: Option<Instant>,
    /// Since when nobody else was found.
    all_since: Option<Instant>,
    /// How many were found when the last look at all of them began, and whether they had stopped by then: one that has yet to may just be starting another.
    before: (usize, bool),
}

#[derive(Debug)]
struct Found {
    part: Part,
    hears: bool,
    /// Whether we have stopped it.
    is_held: bool,
    goes_on: bool,
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
        if sent == Err(Errno::PERM) && to.runs() && self.all.insert(to.pid) && !self.all.contains(&to.parent)
        {
            self.topmost.push(to.pid);
        }
        sent.is_ok()
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
    /// Tells those who are found by this search: where that could end them all at once, if they are found within this time.
    pub(super) fn new(signal: Signal, to: To, search: Search, within: Duration) -> Ask {
        let hold = Hold { found: Vec::new(), within, since: None, all_since: None, before: (0, true) };
        Ask {
            signal,
            to,
            search,
            spent: Duration::ZERO,
            met: None,
            has_told: false,
            told_elsewhere: HashSet::new(),
            unreached: Unreached::default(),
            hold: ends_by_default(signal).then_some(hold),
        }
    }

    /// How many were met.
    pub(super) fn met(&self) -> usize {
        self.search.count()
    }

    /// Whether some are stopped until all are found.
    pub(super) fn holds(&self) -> bool {
        self.hold.is_some()
    }

    /// Goes on for a while, says whether it is over, and who could not be told. Whoever has lost its parents meanwhile is a child of ours, or of a
    /// reaper in the job. `stops` hears of each before it is stopped.
    pub(super) fn go_on(
        &mut self,
        ours: impl Fn() -> Vec<(Pid, Pid)>,
        stops: impl FnMut(Pid),
    ) -> (bool, Vec<Beyond>) {
        let begun = Instant::now();
        let is_over = match self.hold.take() {
            Some(hold) => self.find(begun + LOOK_FOR, hold, &ours, stops),
            None => self.tell(begun + LOOK_FOR, &ours),
        };
        self.spent += begun.elapsed();
        let beyond = if self.to == To::All { Beyond::Unstoppable } else { Beyond::Deaf };
        (is_over || self.spent > ASK_FOR, take(&mut self.unreached.topmost).into_iter().map(beyond).collect())
    }

    /// Stops those that it finds, and tells all of them when nobody else is found; says whether everybody was told.
    fn find(
        &mut self,
        until: Instant,
        mut hold: Hold,
        ours: impl Fn() -> Vec<(Pid, Pid)>,
        mut stops: impl FnMut(Pid),
    ) -> bool {
        let since = *hold.since.get_or_insert_with(Instant::now);
        loop {
            let are_met = self.hold_more(until, &mut hold, &mut stops);
            let (before, were_still) = hold.before;
            let are_all = are_met && hold.found.len() == before;
            if are_all && were_still {
                hold.tell(self.signal);
                return true;
            }
            if are_met {
                hold.all_since = are_all.then(|| hold.all_since.unwrap_or_else(Instant::now));
                let is_waited_for = hold.all_since.is_some_and(|since| since.elapsed() > RETURNS_WITHIN);
                let are_still = hold.found.iter().all(|one| !one.is_held || one.part.is_still(is_waited_for));
                hold.before = (hold.found.len(), are_still);
                self.search.begin_anew(self.fallen(&ours));
            }
            if since.elapsed() > hold.within {
                // What one starts from now on is what it does about the signal.
                self.met = are_all.then(sys::since_boot);
                hold.tell(self.signal);
                return false;
            }
            if are_all || !are_met {
                self.hold = Some(hold);
                return false;
            }
        }
    }

    /// Stops those that it finds until then, says whether nobody else is to be looked at.
    fn hold_more(&mut self, until: Instant, hold: &mut Hold, mut stops: impl FnMut(Pid)) -> bool {
        let Ask { signal, to, search, told_elsewhere, unreached, .. } = self;
        search.go_on(Some(until), |one| {
            let (Some(part), reach) = (Part::met(one), Reach::of(one, *signal, *to)) else { return false };
            if told_elsewhere.contains(&one.pid) {
                return false;
            }
            if reach.passes_on {
                add_all_below(one.pid, told_elsewhere);
            }
            // It starts nothing then, and would pass on that it goes on.
            let stops_it = reach.hears && !reach.passes_on;
            let was_stopped = one.is_stopped();
            if stops_it && !was_stopped {
                stops(one.pid);
            }
            let is_held = stops_it && unreached.send(Signal::STOP, one);
            let goes_on = reach.goes_on || is_held && !was_stopped;
            hold.found.push(Found { part, hears: reach.hears, is_held, goes_on });
            reach.goes_below
        })
    }

    /// Tells those that it finds; says whether nobody is left who was not told.
    fn tell(&mut self, until: Instant, ours: impl Fn() -> Vec<(Pid, Pid)>) -> bool {
        loop {
            let Ask { signal, to, search, met, has_told, told_elsewhere, unreached, .. } = self;
            let are_met = search.go_on(Some(until), |one| {
                // What one starts after all were met is what it does about the signal.
                let is_later = met.is_some_and(|met| one.begun().is_some_and(|begun| begun > met));
                if is_later || told_elsewhere.contains(&one.pid) {
                    return false;
                }
                *has_told = true;
                let reach = Reach::of(one, *signal, *to);
                if reach.passes_on {
                    // Before it hears anything: when it ends by that, what it leaves behind falls to us.
                    add_all_below(one.pid, told_elsewhere);
                }
                if reach.hears {
                    unreached.send(*signal, one);
                }
                if reach.goes_on {
                    let _ = pidfd_send_signal(&one.held, Signal::CONT);
                }
                reach.goes_below
            });
            if are_met && self.met.is_some() && !self.has_told {
                return true;
            }
            if !are_met {
                return false;
            }
            self.met.get_or_insert_with(sys::since_boot);
            self.has_told = false;
            self.search.begin_anew(self.fallen(&ours));
        }
    }

    /// Those who may have lost their parents. What falls to us from an inner run is as well what the job has left behind.
    fn fallen(&self, ours: impl Fn() -> Vec<(Pid, Pid)>) -> Vec<(Pid, Pid)> {
        if matches!(self.to, To::AllBut(_)) { Vec::new() } else { ours() }
    }
}

impl Hold {
    /// Children first: no parent sees that one was stopped.
    fn tell(self, signal: Signal) {
        let children_first = || self.found.iter().rev();
        children_first().filter(|one| one.hears).for_each(|one| _ = one.part.send(signal));
        children_first().filter(|one| one.goes_on).for_each(|one| _ = one.part.send(Signal::CONT));
    }
}

fn add_all_below(one: Pid, all: &mut HashSet<Pid>) {
    let mut next = vec![one];
    while let Some(parent) = next.pop() {
        next.extend(children(parent, true).filter(|child| all.insert(*child)));
    }
}

/// What is to be done about one that was found.
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
