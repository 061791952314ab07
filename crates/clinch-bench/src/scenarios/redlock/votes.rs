//! How the votes of a contest ended, judged from what the servers saw. Pure.
//!
//! A claim's script reads the clock and tries SET; a release's script deletes. MONITOR shows both, in each server's order
//! and with the time, which is that of one host.

use std::collections::{HashMap, HashSet};

/// What a server saw of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Event {
    /// In microseconds.
    at: u64,
    server: usize,
    claim: String,
    what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// It was asked for its vote and gave it, or not.
    Asked {
        given: bool,
    },
    Freed,
}

/// How a vote ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Won,
    /// Another had a quorum when the last server was asked.
    Held,
    /// Nobody had one, but what was in the way was a holder's that was leaving.
    Early,
    /// Nobody had one, and other claims were in the way.
    Split,
}

/// How many votes ended how.
#[derive(Debug, Default)]
pub(super) struct Count {
    ends: Vec<End>,
    /// Votes that were won after at least one that was split, since the one that was won before.
    pub(super) spoiled: usize,
}

impl Count {
    pub(super) fn votes(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn of(&self, end: End) -> usize {
        self.ends.iter().filter(|known| **known == end).count()
    }
}

/// Reads the lines of one server's MONITOR.
pub(super) fn read(server: usize, lines: &[String]) -> Vec<Event> {
    let mut events: Vec<Event> = Vec::new();
    let mut script: Option<(u64, String)> = None;
    for line in lines {
        let Some((source, command)) = line.split_once("] \"") else { continue };
        let words: Vec<&str> = command.trim_end_matches('"').split("\" \"").collect();
        if !source.ends_with(" lua") {
            script = time(source).zip(claim_of(&words));
            continue;
        }
        let (Some((at, claim)), Some(name)) = (&script, words.first()) else { continue };
        let event = |what| Event { at: *at, server, claim: claim.clone(), what };
        match name.to_ascii_uppercase().as_str() {
            "TIME" => events.push(event(What::Asked { given: true })),
            "DEL" => events.push(event(What::Freed)),
            // Only a claim whose SET did not set looks for how long the other's lives.
            "PTTL" => {
                if let Some(Event { what: What::Asked { given }, .. }) = events.last_mut() {
                    *given = false;
                }
            }
            _ => {}
        }
    }
    events
}

/// The moment in `+1339518083.107412 [0 127.0.0.1:60866`, in microseconds.
fn time(source: &str) -> Option<u64> {
    let (seconds, micros) = source.trim_start_matches('+').split(' ').next()?.split_once('.')?;
    Some(seconds.parse::<u64>().ok()? * 1_000_000 + micros.parse::<u64>().ok()?)
}

/// The first argument of a script: the claim it is about.
fn claim_of(words: &[&str]) -> Option<String> {
    let [name, _, keys, rest @ ..] = words else { return None };
    let keys: usize = keys.parse().ok().filter(|_| name.eq_ignore_ascii_case("evalsha"))?;
    rest.get(keys).map(|claim| (*claim).to_owned())
}

/// One vote, as far as it went.
#[derive(Default)]
struct Vote {
    /// The servers that were asked, one bit for each.
    asked: u64,
    won: bool,
    /// Another had a quorum at the last refusal.
    held: bool,
    /// Some refusal was for a claim that had won.
    early: bool,
}

impl Vote {
    fn end(&self) -> End {
        match self {
            Vote { won: true, .. } => End::Won,
            Vote { held: true, .. } => End::Held,
            Vote { early: true, .. } => End::Early,
            _ => End::Split,
        }
    }
}

/// Judges the events of all servers.
pub(super) fn judge(mut events: Vec<Event>, servers: usize) -> Count {
    // A stable sort: those of one server stay in their order.
    events.sort_by_key(|event| event.at);
    let quorum = servers / 2 + 1;
    let mut holders: Vec<Option<String>> = vec![None; servers];
    let mut winners: HashSet<String> = HashSet::new();
    // The vote of each claim that goes on, and when its last server was asked.
    let mut open: HashMap<String, (u64, Vote)> = HashMap::new();
    let mut ended: Vec<(u64, Vote)> = Vec::new();
    for Event { at, server, claim, what } in events {
        let Some(place) = holders.get_mut(server) else { continue };
        let What::Asked { given } = what else {
            place.take_if(|holder| *holder == claim);
            continue;
        };
        let bit = 1 << server;
        let (last, vote) = open.entry(claim.clone()).or_default();
        if vote.asked & bit != 0 {
            // A server is asked once in each vote, so this is the next one.
            ended.push((*last, std::mem::take(vote)));
        }
        vote.asked |= bit;
        *last = at;
        if given {
            *place = Some(claim.clone());
        }
        let held_by = |who: &String| holders.iter().flatten().filter(|holder| *holder == who).count();
        if held_by(&claim) >= quorum {
            vote.won = true;
            winners.insert(claim);
        } else if let Some(Some(other)) = holders.get(server).filter(|holder| holder.as_ref() != Some(&claim))
        {
            vote.early |= winners.contains(other);
        }
        let others = holders.iter().flatten().filter(|holder| winners.contains(*holder));
        vote.held = others.into_iter().any(|holder| held_by(holder) >= quorum);
    }
    ended.extend(open.into_values());
    ended.sort_by_key(|(last, _)| *last);
    let mut count = Count::default();
    let mut split = false;
    for (_, vote) in ended {
        let end = vote.end();
        count.spoiled += usize::from(end == End::Won && split);
        split = (split || end == End::Split) && end != End::Won;
        count.ends.push(end);
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What three servers saw, in words: `a1` the first server gave its vote to a, `a!1` it did not, `a-1` it freed it.
    fn ends(text: &str) -> (Vec<End>, usize) {
        let event = |(at, word): (usize, &str)| {
            let (claim, rest) = word.split_at(1);
            let (what, server) = match rest.split_at(rest.len() - 1) {
                ("-", server) => (What::Freed, server),
                (refused, server) => (What::Asked { given: refused.is_empty() }, server),
            };
            let server = server.parse::<usize>().unwrap() - 1;
            Event { at: at as u64, server, claim: claim.to_owned(), what }
        };
        let count = judge(text.split(' ').enumerate().map(event).collect(), 3);
        (count.ends, count.spoiled)
    }

    #[test]
    fn a_vote_is_won_or_found_another_that_was() {
        assert_eq!(ends("a1 a2 a3 b!1 b!2 b!3"), (vec![End::Won, End::Held], 0));
        assert_eq!(ends("a1 b!1 b!1").0.len(), 3, "a server is asked once in each vote");
        assert_eq!(ends("a1 b3 a2 b!1 a!3 b!2"), (vec![End::Won, End::Held], 0), "two of three are enough");
    }

    #[test]
    fn a_vote_is_split_by_claims_that_have_not_won() {
        let text = "a1 b2 c3 a!2 a!3 b!1 b!3 c!1 c!2 a-1 b-2 c-3 b1 b2 b3";
        let (ends, spoiled) = ends(text);
        assert_eq!(ends, [End::Split, End::Split, End::Split, End::Won]);
        assert_eq!(spoiled, 1);
    }

    #[test]
    fn a_vote_may_meet_a_release_on_its_way() {
        assert_eq!(ends("a1 a2 a3 a-1 b1 b!2 a-2 a-3 b!3").0, [End::Won, End::Early]);
    }

    #[test]
    fn lines_of_monitor_are_read() {
        let lines = [
            r#"+10.000001 [0 127.0.0.1:6] "evalsha" "f0" "2" "k" "k\x00f" "ab" "2000" "7" "{\"host\":\"h\"}""#,
            r#"+10.000001 [0 lua] "TIME""#,
            r#"+10.000002 [0 lua] "SET" "k" "v" "NX" "PX" "2000""#,
            r#"+10.000002 [0 lua] "GETSET" "k\x00f" "7""#,
            r#"+10.000009 [0 127.0.0.1:7] "EVALSHA" "f0" "1" "k" "cd" "2000" "7" "x""#,
            r#"+10.000009 [0 lua] "TIME""#,
            r#"+10.000009 [0 lua] "PTTL" "k""#,
            r#"+11.000000 [0 127.0.0.1:7] "PTTL" "k""#,
            r#"+11.000000 [0 127.0.0.1:6] "evalsha" "f1" "1" "k" "ab""#,
            r#"+11.000000 [0 lua] "DEL" "k""#,
        ];
        let seen = |at, claim: &str, what| Event { at, server: 4, claim: claim.to_owned(), what };
        assert_eq!(
            read(4, &lines.map(str::to_owned)),
            [
                seen(10_000_001, "ab", What::Asked { given: true }),
                seen(10_000_009, "cd", What::Asked { given: false }),
                seen(11_000_000, "ab", What::Freed),
            ]
        );
    }
}
