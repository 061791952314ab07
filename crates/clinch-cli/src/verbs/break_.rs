//! `clinch break`: an operator takes a lock away from whoever holds it.

use std::io::{self, BufRead, Write};

use clinch::ClaimId;
use clinch::backend::{ClaimState, Freed};

use crate::args::{Break, Store};
use crate::connect::connect;
use crate::exit::{Failure, NOBODY, Outcome};
use crate::output::{ResultJson, answer, describe, json, printable, say};

pub(crate) async fn run(store: &Store, args: &Break) -> Outcome {
    let only = args.claim.as_deref().map(str::parse::<ClaimId>).transpose()?;
    let locks = connect(store).await?;
    let claims = locks.state(&args.name).await?.map(|state| state.claims).unwrap_or_default();
    let meant = |claim: &ClaimState| only.map_or(claim.granted, |only| claim.id == only);
    let victims: Vec<ClaimState> = claims.into_iter().filter(meant).collect();
    if victims.is_empty() {
        let what = if only.is_some() { "has no such claim" } else { "is held by nobody" };
        return Err(Failure::new(NOBODY, format!("lock \"{}\" {what}", args.name)));
    }
    if !args.yes && !confirmed(&args.name, &victims)? {
        say("nothing was done");
        return Ok(NOBODY);
    }
    // All at once, since to be told takes each holder its time; and all of them before anything is told here.
    let evict = |victim: &ClaimState| {
        let (locks, name, id) = (locks.clone(), args.name.clone(), victim.id);
        tokio::spawn(async move { locks.evict(&name, id).await })
    };
    let evictions: Vec<_> = victims.iter().map(evict).collect();
    let (mut text, mut results, mut failure) = (String::new(), Vec::new(), None);
    for (victim, eviction) in victims.iter().zip(evictions) {
        let freed = eviction.await.map_err(|error| Failure::system("cannot wait for an eviction", error));
        let result = match freed.and_then(|freed| Ok(freed?)) {
            Ok(Freed::Removed) => "evicted",
            Ok(Freed::Absent) => "gone",
            Err(error) => {
                failure.get_or_insert(error);
                "failed"
            }
        };
        text += &format!("{result}: {}\n", describe(victim));
        results.push(ResultJson::new(&args.name, victim.id, result));
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
    write!(io::stderr(), "{text}Take it away? Its job may still be running. [y/N] ").map_err(failed)?;
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line).map_err(failed)?;
    Ok(matches!(line.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}
