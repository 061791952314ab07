//! `clinch break`: an operator takes a lock away from whoever holds it, and opens what keeps it closed.

use std::io::{self, BufRead, Write};
use std::time::SystemTime;

use clinch::backend::{ClaimState, Freed, LockState};
use clinch::{ClaimId, Locks};

use crate::args::{Break, Store};
use crate::connect::{insist, is_there};
use crate::documents::{ResultJson, ResultWord, ResultsJson, document};
use crate::exit::{CONFLICT, Failure, NOBODY, Outcome};
use crate::output::{answer, closed_until, describe, is_same_moment, printable, say, short};
use crate::turn;

/// What is to be done.
struct Victims {
    claims: Vec<ClaimState>,
    /// Locks that are kept closed, and until when.
    closed: Vec<(String, SystemTime)>,
}

impl Victims {
    async fn find(locks: &Locks, args: &Break) -> Result<Victims, Failure> {
        Victims::of(look(locks, args).await?, args)
    }

    /// Of what was seen.
    fn of((state, turn): Seen, args: &Break) -> Result<Victims, Failure> {
        let (name, only) = (&args.name, only(args)?);
        let is_closed_until = state.as_ref().and_then(|state| state.closed_until);
        let own = is_closed_until.map(|until| (name.clone(), until));
        let turn = turn::name_of(name).zip(turn);
        let closed = own.into_iter().chain(turn).filter(|_| only.is_none()).collect();
        let claims = victims(&state.map(|state| state.claims).unwrap_or_default(), only);
        if claims.is_empty() && only.is_some() {
            return Err(Failure::new(NOBODY, format!("lock \"{name}\" has no such claim")));
        }
        if let Some(until) = is_closed_until.filter(|_| only.is_some()) {
            return Err(Failure::usage(format!(
                "lock \"{name}\" is {}, and to take a claim away would open it: wait until then, or open it by `clinch break` without --claim",
                closed_until(until)
            )));
        }
        Ok(Victims { claims, closed })
    }

    /// A line for each.
    fn lines(&self) -> impl Iterator<Item = String> {
        let line =
            |(name, until): &(String, SystemTime)| format!("{}, {}", printable(name), closed_until(*until));
        self.claims.iter().map(describe).chain(self.closed.iter().map(line))
    }

    /// Whether the same is kept closed, until the same time: nobody may be asked about one closing and open another.
    fn are_closed_as(&self, other: &Victims) -> bool {
        let same = |(one, other): (&(String, SystemTime), &(String, SystemTime))| {
            one.0 == other.0 && is_same_moment(one.1, other.1)
        };
        self.closed.len() == other.closed.len() && self.closed.iter().zip(&other.closed).all(same)
    }

    /// Takes all away; tells what became of each, in the order of their lines.
    async fn end(&self, locks: &Locks, name: &str) -> Vec<Result<ResultJson, (ResultJson, Failure)>> {
        let ended = evict(locks, name, self.claims.clone()).await.into_iter();
        let mut results: Vec<_> = ended
            .map(|(victim, freed)| {
                let result = ResultJson::new(name, victim.id, outcome(&freed));
                freed.map_or_else(|failure| Err((result.clone(), failure)), |_| Ok(result.clone()))
            })
            .collect();
        for (closed, until) in &self.closed {
            let result = |word| ResultJson::of_lock(closed, word);
            // An eviction closes the lock itself.
            let may_differ = closed == name && !self.claims.is_empty();
            let opened = open(locks, closed, *until, may_differ).await;
            results.push(opened.map(result).map_err(|failure| (result(ResultWord::Failed), failure)));
        }
        results
    }
}

/// A lock, and until when its turn is closed.
type Seen = (Option<LockState>, Option<SystemTime>);

async fn look(locks: &Locks, args: &Break) -> clinch::Result<Seen> {
    let name = &args.name;
    let turn = async { if args.claim.is_some() { Ok(None) } else { turn::closed_until(locks, name).await } };
    tokio::try_join!(locks.state(name), turn)
}

/// The only claim that is meant, if it is one.
fn only(args: &Break) -> clinch::Result<Option<ClaimId>> {
    args.claim.as_deref().map(str::parse).transpose()
}

/// Opens a lock that is closed until then.
async fn open(locks: &Locks, name: &str, until: SystemTime, may_differ: bool) -> Result<ResultWord, Failure> {
    if let Some(now) = closing(locks, name).await?
        && !(may_differ || is_same_moment(now, until))
    {
        let message = format!("lock \"{name}\" was closed anew meanwhile, and not opened: it is ");
        return Err(Failure::new(CONFLICT, message + &closed_until(now)));
    }
    locks.open(name).await?;
    // What an eviction has closed stays so until its holder has stopped.
    let is_closed = closing(locks, name).await?.is_some();
    Ok(if is_closed { ResultWord::StaysClosed } else { ResultWord::Opened })
}

/// Until when a lock is kept closed.
async fn closing(locks: &Locks, name: &str) -> clinch::Result<Option<SystemTime>> {
    Ok(locks.state(name).await?.and_then(|state| state.closed_until))
}

pub(crate) async fn run(store: &Store, args: &Break) -> Outcome {
    let nobody = || Failure::new(NOBODY, format!("lock \"{}\" is held by nobody", args.name));
    if !is_there(store)? {
        return Err(nobody());
    }
    only(args)?;
    // What was once told to end is not told again: nobody could say then what has become of it.
    let (locks, seen) = insist(store, async |locks| Ok((locks.clone(), look(locks, args).await?))).await?;
    let mut victims = Victims::of(seen, args)?;
    loop {
        if victims.claims.is_empty() && victims.closed.is_empty() {
            return Err(nobody());
        }
        if args.yes {
            break;
        }
        if !confirmed(&args.name, &victims)? {
            say("nothing was done");
            return Ok(NOBODY);
        }
        // An answer takes its time. Who holds it by now is left alone, but what closes it would be opened.
        let now = Victims::find(&locks, args).await?;
        if now.are_closed_as(&victims) {
            break;
        }
        say("until when it is closed has changed meanwhile");
        victims = now;
    }
    let (mut text, mut results, mut failure) = (String::new(), Vec::new(), None);
    for (line, result) in victims.lines().zip(victims.end(&locks, &args.name).await) {
        let result = result.unwrap_or_else(|(result, error)| {
            failure.get_or_insert(error);
            result
        });
        text += &format!("{}: {line}\n", result.result.text());
        results.push(result);
    }
    let written = answer(&if args.json { document(ResultsJson { results })? } else { text.clone() });
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
        let (locks, name, claim) = (locks.clone(), name.to_owned(), victim.clone());
        (victim, tokio::spawn(async move { evict_one(&locks, &name, &claim).await }))
    };
    let begun: Vec<_> = victims.into_iter().map(begin).collect();
    let mut ended = Vec::with_capacity(begun.len());
    for (victim, eviction) in begun {
        let freed = eviction.await.map_err(|error| Failure::system("cannot wait for an eviction", error));
        ended.push((victim, freed.flatten()));
    }
    ended
}

async fn claims(locks: &Locks, name: &str) -> clinch::Result<Vec<ClaimState>> {
    Ok(locks.state(name).await?.map(|state| state.claims).unwrap_or_default())
}

/// What the store does not find as a claim of ours is not gone for that.
async fn evict_one(locks: &Locks, name: &str, victim: &ClaimState) -> Result<Freed, Failure> {
    // What has left may have closed the lock, which nobody was asked about and an eviction would open.
    if !claims(locks, name).await?.iter().any(|claim| claim.id == victim.id) {
        return Ok(Freed::Absent);
    }
    let freed = locks.evict(name, victim.id).await?;
    let claims = match freed {
        Freed::Removed => Vec::new(),
        Freed::Absent => claims(locks, name).await?,
    };
    if let Some(claim) = claims.iter().find(|claim| claim.id == victim.id) {
        // Where a lock lasts as long as its process has it, only what was told of an eviction has an end and is not evicted again.
        if let Some(left) = claim.expires_in.filter(|_| locks.capabilities().crash_release) {
            return Err(Failure::new(
                CONFLICT,
                format!(
                    "lock \"{name}\" is still {}, who was told already that it is taken away; it opens in {} at the latest",
                    describe(claim),
                    short(left)
                ),
            ));
        }
        let text = format!(
            "lock \"{name}\" is still {}, from which clinch cannot take it here: end that, or, in the store of a server, delete the lock's key",
            describe(victim)
        );
        return Err(Failure::new(CONFLICT, text));
    }
    Ok(freed)
}

/// What became of an eviction.
fn outcome(freed: &Result<Freed, Failure>) -> ResultWord {
    match freed {
        Ok(Freed::Removed) => ResultWord::Evicted,
        Ok(Freed::Absent) => ResultWord::Gone,
        Err(_) => ResultWord::Failed,
    }
}

/// What became of evictions of the holders of a lock, in one line.
pub(crate) fn in_words(name: &str, ended: &[(ClaimState, Result<Freed, Failure>)]) -> String {
    let words = ended.iter().map(|(victim, freed)| match freed {
        Err(failure) => format!("failed: {}: {}", describe(victim), failure.message),
        Ok(_) => format!("{}: {}", outcome(freed).text(), describe(victim)),
    });
    format!("lock \"{}\": {}", printable(name), words.collect::<Vec<_>>().join("; "))
}

/// What is asked before it is done.
pub(crate) const QUESTION: &str = "Take it away? Its job may still be running.";

/// Shows the victims and asks, where there is somebody to ask.
fn confirmed(name: &str, victims: &Victims) -> Result<bool, Failure> {
    if !rustix::termios::isatty(rustix::stdio::stdin()) {
        return Err(Failure::usage("nobody is there to be asked; say --yes to break the lock"));
    }
    let mut text = format!("lock \"{}\":\n", printable(name));
    for line in victims.lines() {
        text += &format!("  {line}\n");
    }
    let question = if victims.claims.is_empty() { "Open it?" } else { QUESTION };
    let failed = |error| Failure::system("cannot ask", error);
    write!(io::stderr(), "{text}{question} [y/N] ").map_err(failed)?;
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line).map_err(failed)?;
    Ok(matches!(line.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}
