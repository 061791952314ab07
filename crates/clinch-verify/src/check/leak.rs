//! Leak: a lock that nobody can hold, or that others hold together, is granted to somebody who waits, within the slack.
//!
//! The sweep looks at the times in which nothing can stand in a waiter's way, and asks whether one sat through more than
//! the slack of one.

use std::collections::{BTreeSet, HashSet};
use std::iter::Peekable;
use std::vec::IntoIter;

use super::busy::{self, Busy, Gap, Load};
use super::hold::excludes;
use super::model::{At, Claim, Lock, Model, span};
use super::report::{Findings, Property};
use crate::event::Mode;

pub(super) fn judge(model: &Model<'_>, findings: &mut Findings<'_>) {
    let Some(end) = model.last else { return };
    for (name, lock) in &model.locks {
        let waiters = waiters(lock, end);
        let waits: Vec<_> = busy::waits(lock, end).into_iter().map(|(_, busy)| busy).collect();
        let slack = findings.rules.slack;
        let (late, sure): (Vec<_>, Vec<_>) =
            busy::all(lock).into_iter().partition(|busy| is_behind(busy, &waiters, slack));
        let fifo = findings.rules.fifo;
        let mut found = HashSet::new();
        for view in views(&waits, &sure, if fifo { &[] } else { &late }) {
            let mut waiters = Waiters::of(&waiters, view.mode);
            for gap in busy::gaps(&view.loads, view.room, end) {
                let Some((waiter, from, until)) = waiters.starved(&gap, slack) else { continue };
                // A lock that nobody holds is seen twice by those who could share it.
                if found.insert((waiter.asked, gap.closed_by.index)) {
                    report(name, waiter, (from, until), &gap, &late, findings);
                }
            }
        }
        if !fifo && found.is_empty() && !late.is_empty() {
            doubt(name, &waiters, &views(&waits, &sure, &[]), end, findings);
        }
    }
}

fn report<'h>(
    name: &str,
    waiter: &Waiter<'_, 'h>,
    (from, until): (u64, u64),
    gap: &Gap<'h>,
    late: &[Busy<'h>],
    findings: &mut Findings<'_>,
) {
    findings.add(Property::Leak, || {
        let claim = waiter.claim;
        let text = format!(
            "lock \"{name}\": {claim} waited for {} although nobody can have stood in its way from t={} on",
            span(until.saturating_sub(from)),
            gap.from
        );
        let mut witness = vec![claim.acquire, claim.granted, claim.failed, Some(gap.closed_by)];
        // A waiter that was withdrawn or killed waited until then.
        witness.push(claim.ended().filter(|_| claim.granted.is_none()));
        witness.extend(gap.freed_by.iter().copied());
        // That they came too late to stand in its way.
        let behind = late.iter().filter(|busy| busy.from < until && busy.until > gap.from);
        witness.extend(behind.flat_map(|busy| busy.proof.iter().copied()));
        (text, witness)
    });
}

/// Where no order is promised, claims that asked later may have been served first: what became of them is not known.
fn doubt<'h>(
    name: &str,
    waiters: &[Waiter<'_, 'h>],
    views: &[View<'h>],
    end: At<'h>,
    findings: &mut Findings<'_>,
) {
    let slack = findings.rules.slack;
    for view in views {
        let mut waiters = Waiters::of(waiters, view.mode);
        let starved = busy::gaps(&view.loads, view.room, end).into_iter().find_map(|gap| {
            waiters
                .starved(&gap, slack)
                .map(|(waiter, from, until)| (waiter.claim, until.saturating_sub(from)))
        });
        if let Some((claim, time)) = starved {
            findings.doubt(Property::Leak, || {
                format!(
                    "lock \"{name}\": {claim} waited for {} while only claims that asked later, and of which nobody \
                     knows what became, can have held",
                    span(time)
                )
            });
        }
    }
}

/// Whether it is the doubtful claim of one that asked when another had long been waiting, and waited on: where first
/// come is first served, it cannot have been granted.
fn is_behind(busy: &Busy<'_>, waiters: &[Waiter<'_, '_>], slack: u64) -> bool {
    let before = waiters.partition_point(|waiter| waiter.from.saturating_add(slack) < busy.from);
    let patience =
        before.checked_sub(1).and_then(|last| waiters.get(last)).map_or(0, |waiter| waiter.longest);
    busy.in_doubt && patience >= busy.until
}

/// The lock as waiters see it.
struct View<'h> {
    /// Of which mode they are; all, if none.
    mode: Option<Mode>,
    loads: Vec<Load<'h>>,
    /// How much may be taken without standing in their way.
    room: u64,
}

/// All waiters see a lock that nobody holds. Those who can share see more; whoever waits for what they cannot share may
/// be due before them.
fn views<'h>(waits: &[Busy<'h>], sure: &[Busy<'h>], late: &[Busy<'h>]) -> Vec<View<'h>> {
    let held = |weight: &dyn Fn(Mode) -> u64| -> Vec<Load<'h>> {
        sure.iter().chain(late).map(|busy| busy.load(weight(busy.mode))).collect()
    };
    let mut views = vec![View { mode: None, loads: held(&|_| 1), room: 0 }];
    let modes: BTreeSet<_> = waits.iter().map(|wait| wait.mode).collect();
    for mode in modes {
        let (room, waiting) = match mode {
            Mode::Exclusive => continue,
            Mode::Permits { n, of } if n > of => continue,
            Mode::Shared => (0, 1),
            // A waiter takes the room of all permits, so that nobody but itself waits in a gap.
            Mode::Permits { n, of } => (of.saturating_add(of - n), of),
        };
        let weight = |other: Mode| match (mode, other) {
            (Mode::Permits { of, .. }, Mode::Permits { n, of: total }) if of == total => n,
            (Mode::Permits { of, .. }, _) => of.saturating_mul(2),
            _ => u64::from(excludes(mode, other)),
        };
        let mut loads = held(&weight);
        loads.extend(waits.iter().map(|wait| wait.load(weight(wait.mode).min(1) * waiting)));
        views.push(View { mode: Some(mode), loads, room });
    }
    views
}

struct Waiter<'a, 'h> {
    claim: &'a Claim<'h>,
    /// The place of its request in the history.
    asked: usize,
    from: u64,
    until: u64,
    /// The longest that any waiter up to this one waits.
    longest: u64,
}

/// All who surely waited, in the order in which they surely did.
fn waiters<'a, 'h>(lock: &'a Lock<'h>, end: At<'h>) -> Vec<Waiter<'a, 'h>> {
    let claims = lock.claims().into_iter().filter(|claim| claim.granted.is_some() || claim.unknown.is_none());
    let mut waiters: Vec<_> = claims
        .filter_map(|claim| {
            let asked = claim.acquire?;
            let ends = [claim.granted, claim.failed, claim.ended(), Some(end)];
            let until = ends.into_iter().flatten().map(|at| at.earliest()).min()?;
            Some(Waiter { claim, asked: asked.index, from: asked.latest(), until, longest: 0 })
        })
        .collect();
    waiters.sort_by_key(|waiter| waiter.from);
    let mut longest = 0;
    for waiter in &mut waiters {
        longest = longest.max(waiter.until);
        waiter.longest = longest;
    }
    waiters
}

/// The waiters of a lock, taken in while the sweep moves on.
struct Waiters<'w, 'a, 'h> {
    later: Peekable<IntoIter<&'w Waiter<'a, 'h>>>,
    /// Of those taken in, the one that waits longest.
    patient: Option<&'w Waiter<'a, 'h>>,
}

impl<'w, 'a, 'h> Waiters<'w, 'a, 'h> {
    /// Those of a mode, or all. One that keeps its place without a TTL may say late that it was granted.
    fn of(waiters: &'w [Waiter<'a, 'h>], mode: Option<Mode>) -> Self {
        let judged = waiters.iter().filter(|waiter| waiter.claim.granted.is_none() || waiter.claim.ttl() > 0);
        let judged: Vec<_> =
            judged.filter(|waiter| mode.is_none_or(|mode| mode == waiter.claim.mode())).collect();
        Waiters { later: judged.into_iter().peekable(), patient: None }
    }

    /// The first waiter that sat through more than the slack of a gap, and from when until when it did.
    ///
    /// Gaps must come in order. Whoever came before a gap is represented by the one who stayed longest.
    fn starved(&mut self, gap: &Gap<'h>, slack: u64) -> Option<(&'w Waiter<'a, 'h>, u64, u64)> {
        let mut done = false;
        while !done {
            if self.patient.is_some_and(|waiter| overlap(waiter, gap) > slack) {
                break;
            }
            done = match self.later.next_if(|waiter| waiter.from < gap.until) {
                Some(next) => {
                    if self.patient.is_none_or(|patient| next.until > patient.until) {
                        self.patient = Some(next);
                    }
                    false
                }
                None => true,
            };
        }
        let waiter = self.patient.filter(|waiter| overlap(waiter, gap) > slack)?;
        Some((waiter, waiter.from.max(gap.from), waiter.until.min(gap.until)))
    }
}

fn overlap(waiter: &Waiter<'_, '_>, gap: &Gap<'_>) -> u64 {
    waiter.until.min(gap.until).saturating_sub(waiter.from.max(gap.from))
}
