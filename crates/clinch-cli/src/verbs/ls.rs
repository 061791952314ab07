//! `clinch ls`: locks that are held, waited for or kept closed.

use std::time::SystemTime;

use clinch::backend::{LockState, Survey};
use glob::Pattern;

use super::watch;
use crate::args::{Ls, Store};
use crate::connect::{insist_at_length, is_there};
use crate::documents::{LockJson, LocksJson, document};
use crate::exit::Outcome;
use crate::output::{say, show};
use crate::table::{Look, table};

pub(crate) async fn run(store: &Store, ls: &Ls) -> Outcome {
    let wanted = Wanted::of(ls);
    if let Some(every) = ls.watch {
        // It may be made later: then that is looked at.
        is_there(store)?;
        return watch::run(store, wanted, every).await;
    }
    let Survey { mut locks, unread } = match is_there(store)? {
        true => insist_at_length(store, async |locks| locks.survey(wanted.beginning).await).await?,
        false => Survey::default(),
    };
    locks.retain_mut(|lock| wanted.keeps(lock));
    if ls.json {
        show(&document(LocksJson { locks: locks.iter().map(LockJson::from).collect() })?)?;
    } else if !locks.is_empty() {
        show(&table(&locks, Look::of_stdout(ls.wide), SystemTime::now()))?;
    } else if unread.is_none() {
        say(wanted.none());
    }
    unread.map_or(Ok(0), |why| Err(why.into()))
}

/// What is to be listed.
pub(super) struct Wanted<'a> {
    pub(super) ls: &'a Ls,
    /// What names begin with in any case.
    pub(super) beginning: &'a str,
    pattern: Option<Pattern>,
}

impl<'a> Wanted<'a> {
    fn of(ls: &'a Ls) -> Wanted<'a> {
        let names = &ls.names;
        let beginning = names.split(['*', '?', '[']).next().unwrap_or_default();
        // More than one star says no more than one. What is no pattern is a beginning.
        let mut letters: Vec<char> = names.chars().collect();
        letters.dedup_by(|one, other| *one == '*' && *other == '*');
        let pattern = Pattern::new(&String::from_iter(letters)).ok().filter(|_| beginning != names);
        Wanted { ls, beginning, pattern }
    }

    /// Whether a lock is listed; takes from it the claims that are not.
    pub(super) fn keeps(&self, lock: &mut LockState) -> bool {
        let name = lock.name.as_str();
        // Names may hold a star, too.
        let is_named = name.starts_with(&self.ls.names)
            || self.pattern.as_ref().is_some_and(|pattern| pattern.matches(name));
        let Ls { held, waiting, .. } = *self.ls;
        if !held && !waiting {
            return is_named;
        }
        lock.claims.retain(|claim| if claim.granted { held } else { waiting });
        is_named && !lock.claims.is_empty()
    }

    /// That there is none.
    pub(super) fn none(&self) -> String {
        format!("no lock{} is {}", self.named(), self.stands())
    }

    fn named(&self) -> String {
        let names = &self.ls.names;
        match &self.pattern {
            _ if names.is_empty() => String::new(),
            None => format!(" whose name begins with \"{names}\""),
            Some(_) => format!(" whose name matches \"{names}\""),
        }
    }

    fn stands(&self) -> &'static str {
        match (self.ls.held, self.ls.waiting) {
            (true, true) => "held or waited for",
            (true, false) => "held",
            (false, true) => "waited for",
            (false, false) => "held, waited for or kept closed",
        }
    }
}
