//! `clinch break`: an operator takes a lock away from whoever holds it.

use std::io::{self, BufRead, Write};

use clinch::backend::{ClaimState, Freed};
use clinch::{ClaimId, Locks};

use crate::args::{Break, Store};
use crate::connect::connect;
use crate::exit::{Failure, NOBODY, Outcome};
use crate::output::{ResultJson, answer, describe, json, printable, say};

pub(crate) async fn run(store: &Store, args: &Break) -> Outcome {
    let only = args.claim.as_deref().map(str::parse::<ClaimId>).transpose()?;
    let locks = connect(store).await?;
    let claims = locks.state(&args.name).await?.map(|state| state.claims).unwrap_or_default();
    let victims = victims(&claims, only);
    if victims.is_empty() {
        let what = if only.is_some() { "has no such claim" } else { "is held by nobody" };
        return Err(Failure::new(NOBODY, format!("lock \"{}\" {what}", args.name)));
    }
    if !args.yes && !confirmed(&args.name, &victims)? {
        say("nothing was done");
        return Ok(NOBODY);
    }
    let (mut text, mut results, mut failure) = (String::new(), Vec::new(), None);
    for (victim, freed) in evict(&locks, &args.name, victims).await {
        let result = outcome(&freed);
        text += &format!("{result}: {}\n", describe(&victim));
        results.push(ResultJson::new(&args.name, victim.id, result));
        failure = failure.or(freed.err());
    }
    let written = answer(&if args.json { json(&results)? } else { text.clone() });
    if let Err(unwritten) = written {
        say(format_args!("lock \"{}\": {}", args.name, text.trim_end().replace('\n', "; ")));
        // That somebody still has the lock is the worse news.
        let Some(failure) = failure else { return Err(unwritten) };
        say(unwritten.message);
        return Err(failure);
    }
    failure.map_or(Ok(0), Err)
}

/// The claims that a lock is to be taken from: those that hold it, or the one that was named.
pub(crate) fn victims(claims: &[ClaimState], only: Option<ClaimId>) -> Vec<ClaimState> {
    let meant = |claim: &&ClaimState| only.map_or(claim.granted, |only| claim.id == only);
    claims.iter().filter(meant).cloned().collect()
}

/// Takes a lock from them, all at once, since to be told takes each holder its time; tells of all when all of it is done.
pub(crate) async fn evict(
    locks: &Locks,
    name: &str,
    victims: Vec<ClaimState>,
) -> Vec<(ClaimState, Result<Freed, Failure>)> {
    let begin = |victim: ClaimState| {
        let (locks, name, id) = (locks.clone(), name.to_owned(), victim.id);
        (victim, tokio::spawn(async move { locks.evict(&name, id).await }))
    };
    let begun: Vec<_> = victims.into_iter().map(begin).collect();
    let mut ended = Vec::with_capacity(begun.len());
    for (victim, eviction) in begun {
        let freed = eviction.await.map_err(|error| Failure::system("cannot wait for an eviction", error));
        ended.push((victim, freed.and_then(|freed| Ok(freed?))));
    }
    ended
}

/// What became of an eviction, in a word.
pub(crate) fn outcome(freed: &Result<Freed, Failure>) -> &'static str {
    match freed {
        Ok(Freed::Removed) => "evicted",
        Ok(Freed::Absent) => "gone",
        Err(_) => "failed",
    }
}

/// What became of evictions of the holders of a lock, in one line.
pub(crate) fn in_words(name: &str, ended: &[(ClaimState, Result<Freed, Failure>)]) -> String {
    let words = ended.iter().map(|(victim, freed)| match freed {
        Err(failure) => format!("failed: {}: {}", describe(victim), failure.message),
        Ok(_) => format!("{}: {}", outcome(freed), describe(victim)),
    });
    format!("lock \"{}\": {}", printable(name), words.collect::<Vec<_>>().join("; "))
}

/// What is asked before it is done.
pub(crate) const QUESTION: &str = "Take it away? Its job may still be running.";

/// Shows the victims and asks, where there is somebody to ask.
fn confirmed(name: &str, victims: &[ClaimState]) -> Result<bool, Failure> {
    if !rustix::termios::isatty(rustix::stdio::stdin()) {
        return Err(Failure::usage("nobody is there to be asked; say --yes to break the lock"));
    }
    let mut text = format!("lock \"{}\":\n", printable(name));
    for victim in victims {
        text += &format!("  {}\n", describe(victim));
    }
    let failed = |error| Failure::system("cannot ask", error);
    write!(io::stderr(), "{text}{QUESTION} [y/N] ").map_err(failed)?;
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line).map_err(failed)?;
    Ok(matches!(line.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}
