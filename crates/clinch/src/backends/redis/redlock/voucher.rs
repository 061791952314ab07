//! What clients leave on a server for those that come after them: which run of it they met, how far its clock was ahead of
//! the others' clocks, and since when. Pure.
//!
//! A client that has just started knows nothing of a server's past, and the server's own word is not enough: how long it
//! has run is told by its wall clock, which may have been set. What a run id and the clocks of the *other* servers say
//! cannot be wrong by the fault of one server. So a server's vote counts when so many other clocks that one of them must be
//! right have run evenly with its own, in one run of it, for the longest TTL.

use std::fmt;
use std::time::Duration;

use super::timing::{Evenness, Lead};

/// The most clocks that are kept: those of all servers, and of as many that they were compared with before.
const MOST: usize = 30;

/// What stands on one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Voucher {
    /// The run that was met.
    pub(super) run: String,
    /// The servers whose fences this run was given, one bit for each in the order of their addresses.
    pub(super) told: u64,
    witnesses: Vec<Witness>,
}

/// Another server, whose clock the server's was compared with.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Witness {
    /// Its run; of servers that forget nothing, its address: their clocks outlive a restart.
    of: String,
    /// Since when the two clocks have run evenly, and when they were compared last: on the server's clock, in microseconds.
    since: u64,
    at: u64,
    /// How far the other clock was ahead then.
    lead: Lead,
}

/// What a client sees at a moment: the server's clock, and how far those of others are ahead, by what [`Witness`]es are called.
pub(super) struct View<'a> {
    pub(super) run: &'a str,
    /// What the server's clock reads at least and at most, in microseconds.
    pub(super) earliest: u64,
    pub(super) latest: u64,
    pub(super) leads: &'a [(String, Lead)],
}

/// What counts as enough.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub(super) evenness: Evenness,
    /// How many clocks must agree with a server's: one more than can be wrong, the server's own included.
    pub(super) witnesses: usize,
    /// Whether the servers keep what they acknowledged over a restart. That excuses the restart; their clocks may be set all the same.
    pub(super) durable: bool,
}

/// What can be concluded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// The vote counts after this long.
    In(Duration),
    /// Clocks have come apart.
    Apart,
    /// Nothing.
    Unknown,
}

/// What is to be left on a server.
#[derive(Debug)]
pub(super) struct Renewed {
    pub(super) voucher: Voucher,
    /// It says something else than before, not only that the same still holds.
    pub(super) is_new: bool,
}

impl Voucher {
    /// Reads what [`Display`](fmt::Display) has written.
    pub(super) fn parse(text: &str) -> Option<Voucher> {
        let mut words = text.split(' ');
        let run = words.next()?.to_owned();
        let told = u64::from_str_radix(words.next()?, 16).ok()?;
        let witness = |word: &str| {
            let (of, numbers) = word.split_once('=')?;
            let mut numbers = numbers.split(',');
            Some(Witness {
                of: of.to_owned(),
                since: numbers.next()?.parse().ok()?,
                at: numbers.next()?.parse().ok()?,
                lead: Lead { least: numbers.next()?.parse().ok()?, most: numbers.next()?.parse().ok()? },
            })
        };
        Some(Voucher { run, told, witnesses: words.map(witness).collect::<Option<_>>()? })
    }

    /// Whether a server's vote counts, by what was left on it.
    pub(super) fn judge(known: Option<&Voucher>, view: &View<'_>, terms: Terms) -> Word {
        let known = known.filter(|known| terms.durable || (known.run == view.run && !view.run.is_empty()));
        let enough = terms.evenness.longest_lease();
        let (mut left, mut apart) = (Vec::new(), false);
        for (witness, lead) in known.into_iter().flat_map(|known| known.met(view.leads)) {
            match witness.agrees(*lead, view, terms.evenness) {
                Some(true) => {
                    let seen = Duration::from_micros(view.earliest.saturating_sub(witness.since));
                    left.push(enough.saturating_sub(seen));
                }
                Some(false) => apart = true,
                None => {}
            }
        }
        left.sort_unstable();
        match left.get(terms.witnesses - 1) {
            Some(left) => Word::In(*left),
            None if apart => Word::Apart,
            None => Word::Unknown,
        }
    }

    /// The witnesses that are there now.
    fn met<'a>(&'a self, leads: &'a [(String, Lead)]) -> impl Iterator<Item = (&'a Witness, &'a Lead)> {
        let lead_of = |of: &str| leads.iter().find(|(other, _)| other == of).map(|(_, lead)| lead);
        self.witnesses.iter().filter_map(move |witness| Some((witness, lead_of(&witness.of)?)))
    }

    /// The servers whose fences this run was given already.
    pub(super) fn told(known: Option<&Voucher>, run: &str) -> u64 {
        known.filter(|known| known.run == run).map_or(0, |known| known.told)
    }

    /// What is to be left on a server now, which has a fence to `learn` or not; `None`: there is nothing new to tell.
    pub(super) fn renewed(
        known: Option<&Voucher>,
        view: &View<'_>,
        learn: bool,
        terms: Terms,
    ) -> Option<Renewed> {
        let Terms { evenness, durable, .. } = terms;
        let run = view.run.to_owned();
        let same = known.filter(|known| durable || known.run == run);
        let mut witnesses = same.map(|known| known.witnesses.clone()).unwrap_or_default();
        let told = Voucher::told(known, &run);
        let mut is_new = learn || known.is_none_or(|known| known.run != run);
        let mut is_old = false;
        let close = view.leads.iter().filter(|(_, lead)| lead.is_close(evenness));
        let (known, strange): (Vec<_>, Vec<_>) =
            close.partition(|(other, _)| witnesses.iter().any(|witness| witness.of == *other));
        let mut agreed = 0;
        for (other, lead) in known {
            let Some(witness) = witnesses.iter_mut().find(|witness| witness.of == *other) else { continue };
            let met = |since| Witness { of: other.clone(), since, at: view.latest, lead: *lead };
            match witness.agrees(*lead, view, evenness) {
                Some(true) => {
                    agreed += 1;
                    let age = Duration::from_micros(view.earliest.saturating_sub(witness.at));
                    is_old |= age > evenness.max_ttl;
                    *witness = met(witness.since);
                }
                None if witness.lead.is_close(evenness) => {}
                Some(false) | None => {
                    is_new = true;
                    *witness = met(view.latest);
                }
            }
        }
        // Of servers that forget nothing, only a clock that was set is held against them: as long as it agrees with enough of
        // those that it was compared with before, one more knows as much as these.
        let since = match witnesses.iter().map(|witness| witness.since).max() {
            Some(since) if durable && agreed >= terms.witnesses => since,
            _ => view.latest,
        };
        is_new |= !strange.is_empty();
        witnesses.extend(strange.into_iter().map(|(other, lead)| Witness {
            of: other.clone(),
            since,
            at: view.latest,
            lead: *lead,
        }));
        witnesses.sort_by_key(|witness| std::cmp::Reverse(witness.at));
        witnesses.truncate(MOST);
        (is_new || is_old).then_some(Renewed { voucher: Voucher { run, told, witnesses }, is_new })
    }
}

impl Witness {
    /// Whether its clock and the server's have run evenly since they were compared; `None`: that cannot be told.
    fn agrees(&self, lead: Lead, view: &View<'_>, evenness: Evenness) -> Option<bool> {
        // A clock that was set back shows a time before they were compared.
        let elapsed = Duration::from_micros(view.latest.saturating_sub(self.at));
        self.lead.is_kept(lead, elapsed, evenness)
    }
}

/// `<run> <told> <another>=<since>,<compared at>,<lead at least>,<at most> ...`, all in microseconds.
impl fmt::Display for Voucher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:x}", self.run, self.told)?;
        for Witness { of, since, at, lead } in &self.witnesses {
            write!(f, " {of}={since},{at},{},{}", lead.least, lead.most)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drift::Drift;

    const SECOND: u64 = 1_000_000;

    fn terms(witnesses: usize, durable: bool) -> Terms {
        let evenness = Evenness { drift: Drift::DEFAULT, max_ttl: Duration::from_secs(30) };
        Terms { evenness, witnesses, durable }
    }

    /// Other servers, by how much they are ahead (µs).
    fn leads(ahead: &[(&str, i64)]) -> Vec<(String, Lead)> {
        ahead
            .iter()
            .map(|(run, ahead)| ((*run).to_owned(), Lead { least: ahead - 900, most: ahead + 900 }))
            .collect()
    }

    fn view(at: u64, leads: &[(String, Lead)]) -> View<'_> {
        View { run: "a", earliest: at * SECOND, latest: at * SECOND + 900, leads }
    }

    /// What somebody leaves who comes after so many seconds, if it is news.
    fn left(known: Option<&Voucher>, at: u64, ahead: &[(&str, i64)], terms: Terms) -> Option<Voucher> {
        Some(Voucher::renewed(known, &view(at, &leads(ahead)), false, terms)?.voucher)
    }

    fn judged(known: &Voucher, at: u64, ahead: &[(&str, i64)], terms: Terms) -> Word {
        Voucher::judge(Some(known), &view(at, &leads(ahead)), terms)
    }

    const GOOD: Word = Word::In(Duration::ZERO);

    #[test]
    fn who_comes_after_the_longest_ttl_need_not_wait() {
        let (one, terms) = ([("b", 500), ("c", -70_000)], terms(1, false));
        assert_eq!(Voucher::judge(None, &view(1000, &leads(&one)), terms), Word::Unknown);
        let first = left(None, 1000, &one, terms).unwrap();
        assert_eq!(Voucher::parse(&first.to_string()), Some(first.clone()));
        let Word::In(wait) = judged(&first, 1010, &one, terms) else { panic!("unknown") };
        assert!((Duration::from_secs(23)..Duration::from_secs(24)).contains(&wait), "{wait:?}");
        assert_eq!(judged(&first, 1034, &one, terms), GOOD);
        assert_eq!(left(Some(&first), 1020, &one, terms), None, "nothing new");
        // After a long time, with one of the two away, whose clock has strayed a bit.
        let later = left(Some(&first), 90_000, &[("b", 2500)], terms).unwrap();
        assert_eq!(judged(&later, 200_000, &[("b", 600_500)], terms), GOOD);
        assert_eq!(judged(&later, 200_000, &[("c", -71_000)], terms), GOOD, "the other is remembered");
        assert_eq!(judged(&later, 200_000, &[("d", 0)], terms), Word::Unknown);
    }

    #[test]
    fn another_run_is_not_vouched_for() {
        let (one, terms) = ([("b", 0), ("c", 0)], terms(1, false));
        let first = left(None, 1000, &one, terms).unwrap();
        let leads = leads(&one);
        let restarted = View { run: "a2", ..view(5000, &leads) };
        assert_eq!(Voucher::judge(Some(&first), &restarted, terms), Word::Unknown);
        let nameless = View { run: "", ..view(5000, &leads) };
        assert_eq!(Voucher::judge(Some(&first), &nameless, terms), Word::Unknown);
        let anew = Voucher::renewed(Some(&first), &restarted, false, terms).unwrap();
        assert!(anew.is_new && anew.voucher.run == "a2");
        let Word::In(wait) = Voucher::judge(Some(&anew.voucher), &restarted, terms) else {
            panic!("unknown")
        };
        assert!(wait > Duration::from_secs(30), "{wait:?}");
        // Others that were restarted are other witnesses.
        assert_eq!(judged(&first, 5000, &[("b2", 0), ("c2", 0)], terms), Word::Unknown);
    }

    #[test]
    fn whose_fences_a_run_was_given_is_noted() {
        let (one, terms) = ([("b", 0), ("c", 0)], terms(1, false));
        let first = Voucher { told: 0b110, ..left(None, 1000, &one, terms).unwrap() };
        assert_eq!(Voucher::parse(&first.to_string()), Some(first.clone()));
        let leads = leads(&one);
        let renewed = |view: &View<'_>, learn| {
            Voucher::renewed(Some(&first), view, learn, terms).map(|word| word.voucher.told)
        };
        assert_eq!(renewed(&view(1001, &leads), false), None, "nothing new");
        assert_eq!(renewed(&view(1001, &leads), true), Some(0b110));
        assert_eq!(
            renewed(&View { run: "a2", ..view(1001, &leads) }, true),
            Some(0),
            "another has forgotten"
        );
    }

    #[test]
    fn a_clock_that_was_set_is_seen_by_those_of_the_others() {
        const HOUR: i64 = 3_600_000_000;
        let steady = [("b", 0), ("c", 0)];
        let three = terms(1, false);
        let first = left(None, 1000, &steady, three).unwrap();
        // Its own: both others have fallen back.
        assert_eq!(judged(&first, 8600, &[("b", -HOUR), ("c", -HOUR)], three), Word::Apart);
        assert_eq!(judged(&first, 8600, &[("b", -HOUR)], three), Word::Apart);
        // Another's.
        assert_eq!(judged(&first, 5000, &[("b", HOUR), ("c", 0)], three), GOOD);
        assert_eq!(judged(&first, 5000, &[("b", HOUR)], three), Word::Apart, "whose was it?");
        // Of five servers two may be wrong.
        let five = terms(2, false);
        assert_eq!(judged(&first, 5000, &steady, five), GOOD);
        assert_eq!(judged(&first, 5000, &[("b", HOUR), ("c", 0)], five), Word::Apart);
        assert_eq!(judged(&first, 5000, &[("c", 0)], five), Word::Unknown);
        // From then on they are watched anew.
        let anew = left(Some(&first), 8600, &[("b", -HOUR), ("c", -HOUR)], three).unwrap();
        assert!(matches!(judged(&anew, 8610, &[("b", -HOUR)], three), Word::In(wait) if !wait.is_zero()));
        assert_eq!(judged(&anew, 8640, &[("b", -HOUR)], three), GOOD);
    }

    #[test]
    fn of_durable_servers_only_a_clock_that_was_set_does_not_vote() {
        const HOUR: i64 = 3_600_000_000;
        let (steady, terms) = ([("b", 0), ("c", 0)], terms(1, true));
        assert_eq!(Voucher::judge(None, &view(1000, &leads(&steady)), terms), Word::Unknown);
        let first = left(None, 1000, &steady, terms).unwrap();
        assert!(matches!(judged(&first, 1030, &steady, terms), Word::In(wait) if !wait.is_zero()));
        assert_eq!(judged(&first, 1034, &steady, terms), GOOD);
        let leads = leads(&steady);
        let restarted = View { run: "a2", ..view(1034, &leads) };
        assert_eq!(Voucher::judge(Some(&first), &restarted, terms), GOOD);
        assert_eq!(judged(&first, 4600, &[], terms), Word::Unknown, "nobody to compare it with");
        let set = [("b", -HOUR), ("c", -HOUR)];
        assert_eq!(judged(&first, 4600, &set, terms), Word::Apart);
        let anew = left(Some(&first), 4600, &set, terms).unwrap();
        assert!(matches!(judged(&anew, 4601, &set, terms), Word::In(wait) if !wait.is_zero()));
        // One that is met only then knows no better.
        let more = left(Some(&anew), 4602, &[("b", -HOUR), ("d", 0)], terms).unwrap();
        assert!(matches!(judged(&more, 4603, &[("d", 0)], terms), Word::In(wait) if !wait.is_zero()));
        assert_eq!(judged(&anew, 4634, &set, terms), GOOD);
    }

    /// Nor does it where the others are met for the first time: they know nothing of what was before.
    #[test]
    fn whoever_comes_later_does_not_vouch_for_a_durable_server_whose_clock_was_set() {
        const HOUR: i64 = 3_600_000_000;
        let terms = terms(1, true);
        let first = left(None, 1000, &[("b", 0)], terms).unwrap();
        for others in [&[("d", -HOUR)][..], &[("b", -HOUR), ("d", -HOUR)], &[("a", -HOUR), ("b", -HOUR)]] {
            assert_ne!(judged(&first, 4600, others, terms), GOOD, "{others:?}");
            let next = left(Some(&first), 4600, others, terms).unwrap();
            assert!(
                matches!(judged(&next, 4601, others, terms), Word::In(wait) if !wait.is_zero()),
                "{others:?}"
            );
        }
        // Where nothing was set, one more is as good.
        let next = left(Some(&first), 1010, &[("b", 0), ("d", 500)], terms).unwrap();
        assert_eq!(judged(&next, 1034, &[("d", 500)], terms), GOOD);
    }

    #[test]
    fn two_durable_servers_of_five_whose_clocks_were_set_alike_do_not_vouch_for_each_other() {
        const HOUR: i64 = 3_600_000_000;
        let terms = terms(2, true);
        let first = left(None, 1000, &[("b", 0), ("c", 0), ("d", 0)], terms).unwrap();
        for others in [&[("b", 0)][..], &[("b", 0), ("c", -HOUR), ("d", -HOUR)]] {
            assert_ne!(judged(&first, 4600, others, terms), GOOD, "{others:?}");
        }
        let others = [("b", 0), ("e", 0)];
        let next = left(Some(&first), 4600, &others, terms).unwrap();
        assert_ne!(judged(&next, 4601, &others, terms), GOOD, "one that is new is no second");
    }

    #[test]
    fn bounds_that_tell_nothing_are_not_left_for_others() {
        let terms = terms(1, false);
        let wide = vec![("b".to_owned(), Lead { least: 0, most: 4_000_000 })];
        let first = Voucher::renewed(None, &view(1000, &wide), false, terms).unwrap().voucher;
        assert_eq!(first.to_string(), "a 0");
        assert_eq!(Voucher::judge(Some(&first), &view(2000, &leads(&[("b", 0)])), terms), Word::Unknown);
        assert_eq!(Voucher::parse("a 0 b=1,2,3"), None);
        assert_eq!(Voucher::parse("a 0 b=1,2,3,x"), None);
    }
}
