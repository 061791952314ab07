//! Telling what is waited for: on a terminal by one line that is rewritten, with `-v` and in events by one for each change.
//!
//! The wait itself knows nothing of this. The store is asked beside it, once a second, and only where somebody looks.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::future::{Future, pending};
use std::pin::pin;
use std::time::{Duration, SystemTime};

use clinch::backend::{ClaimState, LockState, NOTICE};
use clinch::{ClaimId, Instant, Locks};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use crate::args::Run;
use crate::connect::Limits;
use crate::documents::{ClaimJson, moment, whole_ms};
use crate::job::events::{Event, Events};
use crate::job::kin::may_be_wrapper;
use crate::job::reentry;
use crate::output::{closed_until, is_foreign, say, short};
use crate::status;
use crate::writer::WRITER;

/// How long a wait lasts before it is called one: an ordinary acquire is over by then.
const CALLED_WAITING: Duration = Duration::from_millis(20);

/// How long it lasts before it is shown on a terminal.
pub(crate) const SHOWN_AFTER: Duration = Duration::from_secs(1);

/// How often the store is asked, and the line rewritten.
const EVERY: Duration = Duration::from_secs(1);

/// How long the store may take to answer before that is told.
const SILENT: Duration = Duration::from_secs(3);

/// A wait for a lock, as others see it.
pub(crate) struct Waiting<'a> {
    name: &'a str,
    since: Instant,
    limits: &'a Limits,
    /// Who hears of changes.
    events: Option<&'a Events>,
    is_verbose: bool,
    is_shown: bool,
    /// Whether it is told in any case that it is the job around us that is waited for.
    warns: bool,
    claim: Cell<Option<ClaimId>>,
    /// What was told last.
    seen: RefCell<Option<Seen>>,
}

/// What is known of the lock.
#[derive(Debug, Default)]
struct Seen {
    holder: Option<ClaimState>,
    ahead: Option<usize>,
    closed_until: Option<SystemTime>,
    error: Option<String>,
}

impl<'a> Waiting<'a> {
    /// Of `clinch run`.
    pub(crate) fn of_run(run: &'a Run, limits: &'a Limits, events: &'a Events) -> Waiting<'a> {
        let waits = !run.patience.no_wait;
        let is_verbose = waits && run.verbose;
        // Not in a script or beside a pager: others write there, too.
        let is_shown = waits && !run.verbose && !run.quiet && !run.skip && status::is_alone();
        let mut waiting = Waiting::new(&run.name, limits, is_shown);
        waiting.events = Some(events).filter(|events| waits && events.wanted());
        waiting.is_verbose = is_verbose;
        waiting.warns = waits && !run.quiet && !run.skip;
        waiting
    }

    /// Of somebody who has no other way to hear of it than a terminal, if `is_shown` there.
    pub(crate) fn new(name: &'a str, limits: &'a Limits, is_shown: bool) -> Waiting<'a> {
        Waiting {
            name,
            since: limits.since,
            limits,
            events: None,
            is_verbose: false,
            is_shown: is_shown && status::is_possible(),
            warns: false,
            claim: Cell::default(),
            seen: RefCell::default(),
        }
    }

    /// Says so, once, if that is for who waits for us.
    pub(crate) fn warning(mut self, warns: bool) -> Waiting<'a> {
        self.warns = warns;
        self
    }

    /// Notes with which claim it waits from now on.
    pub(crate) fn waits_with(&self, claim: ClaimId) {
        self.claim.set(Some(claim));
    }

    /// Waits, and tells meanwhile what for. `locks`: whom to ask; `None` while there is no connection.
    pub(crate) async fn beside<T>(&self, locks: Option<&Locks>, wait: impl Future<Output = T>) -> T {
        tokio::select! {
            biased;
            done = wait => done,
            never = self.look_on(locks) => match never {},
            never = self.warn(locks) => match never {},
        }
    }

    /// Says it if it is for the job around us, which may be waiting for us. It may as well be about to end, so it is no error.
    async fn warn(&self, locks: Option<&Locks>) -> Infallible {
        let Some(locks) = locks.filter(|_| self.warns) else { return pending().await };
        sleep(SHOWN_AFTER.saturating_sub(self.waited())).await;
        // A store is not asked in vain by each that waits. A job that its clinch has become (-F) is seen nowhere but where the lock is a file.
        if !locks.capabilities().crash_release && !reentry::above().any(may_be_wrapper) {
            return pending().await;
        }
        let claims = loop {
            match timeout(SILENT, locks.state(self.name)).await {
                Ok(Ok(state)) => break state.map(|state| state.claims).unwrap_or_default(),
                _ => sleep(EVERY).await,
            }
        };
        let is_inherited = reentry::inherits_what_it_waits_for();
        let is_around = |one: &&ClaimState| one.granted && (is_inherited || reentry::is_held_around(one));
        if let Some(holder) = claims.iter().find(is_around) {
            let (name, pid) = (self.name, holder.owner.pid);
            if !is_inherited && reentry::is_no_jobs(holder) {
                let who = match pid == std::process::id() {
                    true => "which this has become: it waits for itself",
                    false => "from which this descends and which may be waiting for this",
                };
                // Where no lease ends by itself, one that does is of an `acquire`. Elsewhere it may be as well what a program holds that renews it,
                // and what has a notice left at most may be taken away from one.
                match holder.expires_in.filter(|left| !locks.capabilities().expiry && *left > NOTICE) {
                    Some(left) => say(format_args!(
                        "lock \"{name}\" is held by `clinch acquire` for process {pid}, {who}; that lasts for {} unless it is renewed, and `clinch release` \
                         ends it",
                        short(left)
                    )),
                    None => say(format_args!("lock \"{name}\" is held by process {pid}, {who}")),
                }
            } else {
                say(format_args!(
                    "lock \"{name}\" is held for the job around this one (process {pid}), which may be waiting for this, without end; a `clinch run` \
                     inside a job enters its lock by CLINCH_HELD, which sudo --preserve-env=CLINCH_HELD,CLINCH_URL keeps"
                ));
            }
        }
        pending().await
    }

    async fn look_on(&self, locks: Option<&Locks>) -> Infallible {
        let tells_changes = self.is_verbose || self.events.is_some();
        if !tells_changes && !self.is_shown {
            return pending().await;
        }
        let first = match locks {
            Some(_) if tells_changes => CALLED_WAITING,
            _ => SHOWN_AFTER.saturating_sub(self.waited()),
        };
        sleep(first).await;
        let mut seconds = interval(EVERY);
        seconds.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            // The first is there at once.
            seconds.tick().await;
            let mut look = pin!(self.look(locks));
            let seen = loop {
                tokio::select! {
                    biased;
                    seen = &mut look => break seen,
                    _ = seconds.tick() => self.show(),
                }
            };
            seen.into_iter().for_each(|seen| self.tell(seen));
            self.show();
        }
    }

    /// Asks what is known of the lock; `None`: it is ours by now, which the wait is about to hear.
    async fn look(&self, locks: Option<&Locks>) -> Option<Seen> {
        let failed = |error| Some(Seen { error: Some(error), ..Seen::default() });
        let Some(locks) = locks else { return failed("it could not be reached yet".to_owned()) };
        match timeout(SILENT, locks.state(self.name)).await {
            Ok(Ok(state)) => Seen::of(state, self.claim.get(), locks.capabilities().queue),
            Ok(Err(error)) => failed(error.to_string()),
            Err(_) => failed(format!("asked {} ago", short(SILENT))),
        }
    }

    /// Tells of a change, if it is one.
    fn tell(&self, seen: Seen) {
        let is_new = self.seen.borrow().as_ref().is_none_or(|before| before.key() != seen.key());
        if is_new {
            let waited_ms = whole_ms(self.waited());
            self.events.into_iter().for_each(|events| events.emit(|| seen.event(waited_ms)));
            if self.is_verbose {
                say(format_args!("lock \"{}\": waiting, {}", self.name, seen.text()));
            }
        }
        *self.seen.borrow_mut() = Some(seen);
    }

    /// Rewrites the line on the terminal.
    fn show(&self) {
        let seen = self.seen.borrow();
        if self.is_shown && self.waited() >= SHOWN_AFTER {
            let what = seen.as_ref().map_or_else(|| "the store has not answered yet".to_owned(), Seen::text);
            WRITER.status(Some(format!("waiting for \"{}\": {what}, {}", self.name, clock(self.waited()))));
        }
    }

    fn waited(&self) -> Duration {
        self.limits.now().since(self.since)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.is_shown {
            WRITER.status(None);
        }
    }
}

/// By what is seen that something has changed.
type Key = (Option<(ClaimId, String)>, Option<usize>, Option<SystemTime>, bool);

impl Seen {
    /// `None`: the claim holds the lock.
    fn of(state: Option<LockState>, claim: Option<ClaimId>, has_queue: bool) -> Option<Seen> {
        let Some(LockState { claims, closed_until, .. }) = state else { return Some(Seen::default()) };
        let own = claims.iter().position(|one| Some(one.id) == claim);
        if own.and_then(|own| claims.get(own)).is_some_and(|own| own.granted) {
            return None;
        }
        let holder = claims.into_iter().find(|claim| claim.granted);
        Some(Seen { holder, ahead: own.filter(|_| has_queue), closed_until, error: None })
    }

    fn key(&self) -> Key {
        let holder = self.holder.as_ref().map(|holder| (holder.id, holder.owner.host.clone()));
        (holder, self.ahead, self.closed_until, self.error.is_some())
    }

    fn event(&self, waited_ms: u64) -> Event {
        Event::Waiting {
            ahead: self.ahead.and_then(|ahead| u64::try_from(ahead).ok()),
            holder: self.holder.as_ref().map(|holder| Box::new(ClaimJson::from(holder))),
            closed_until: moment(self.closed_until),
            error: self.error.clone(),
            waited_ms,
        }
    }

    fn text(&self) -> String {
        if let Some(error) = &self.error {
            return format!("the store does not answer ({error})");
        }
        let what = match (&self.holder, self.closed_until) {
            (Some(holder), _) => held_by(holder),
            (None, Some(until)) => closed_until(until),
            (None, None) => "not granted yet".to_owned(),
        };
        let ahead = self.ahead.filter(|ahead| *ahead > 0);
        what + &ahead.map(|ahead| format!(", {ahead} ahead")).unwrap_or_default()
    }
}

/// Who holds it, in short.
fn held_by(holder: &ClaimState) -> String {
    let owner = &holder.owner;
    if is_foreign(holder) {
        return format!("held by {}", owner.host);
    }
    let label = if owner.label.is_empty() { String::new() } else { format!(" ({})", owner.label) };
    // Where the clock of who holds it is ahead of ours, nobody can tell for how long.
    let time = SystemTime::now().duration_since(holder.since).ok();
    let time = time.map(|time| format!(" for {}", short(coarse(time)))).unwrap_or_default();
    format!("held by {}@{}{label}{time}", owner.user, owner.host)
}

/// A time without what changes too often to be read.
fn coarse(time: Duration) -> Duration {
    let seconds = time.as_secs();
    Duration::from_secs(if seconds < 60 { seconds.max(1) } else { seconds - seconds % 60 })
}

/// A time as a clock shows it.
fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    let (h, m, s) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if h > 0 { format!("{h}:{m:02}:{s:02}") } else { format!("{m}:{s:02}") }
}

#[cfg(test)]
mod tests {
    use clinch::{Mode, Owner};

    use super::*;

    fn holder(label: &str, pid: u32) -> ClaimState {
        ClaimState {
            id: ClaimId::from_bits(1),
            mode: Mode::Exclusive,
            granted: true,
            token: None,
            owner: Owner { host: "web-3".into(), pid, user: "deploy".into(), label: label.into() },
            since: SystemTime::now() - Duration::from_secs(725),
            expires_in: None,
        }
    }

    #[test]
    fn what_is_waited_for_is_told_in_short() {
        let seen = |holder, ahead| Seen { holder, ahead, ..Seen::default() }.text();
        assert_eq!(
            seen(Some(holder("backup.sh", 7)), Some(2)),
            "held by deploy@web-3 (backup.sh) for 12m, 2 ahead"
        );
        assert_eq!(seen(Some(holder("", 7)), None), "held by deploy@web-3 for 12m");
        assert_eq!(seen(Some(holder("", 0)), Some(1)), "held by web-3, 1 ahead");
        assert_eq!(seen(None, Some(0)), "not granted yet");
        let [short, long] = [34, 3725].map(|time| clock(Duration::from_secs(time)));
        assert_eq!((short.as_str(), long.as_str()), ("0:34", "1:02:05"));
    }

    #[test]
    fn nothing_new_is_told_of_what_is_as_it_was() {
        let one = || Seen { holder: Some(holder("", 7)), ahead: Some(1), ..Seen::default() };
        assert_eq!(one().key(), one().key());
        assert_ne!(one().key(), Seen { ahead: Some(2), ..one() }.key());
        assert_ne!(one().key(), Seen { error: Some("gone".to_owned()), ..Seen::default() }.key());
    }
}
