//! `clinch complete`: what may stand in place of the word under the cursor. Only completion scripts call it (`completions.rs`).
//!
//! Its first line says what that word is: `words`, one of those in the lines that follow, each with a tab and its meaning; `files`; or
//! `command N`, a part of the command that begins with the N-th word, which the shell knows how to complete.
//!
//! A shell waits for it at each key, so it gives up soon, tells of no failure, and makes nothing, neither on a server nor on this host.

mod typed;

use std::ffi::{OsStr, OsString};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use clap::{ArgMatches, Args as _, Command, CommandFactory as _};
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate, complete};
use clinch::Locks;
use clinch::backends::file;

use self::typed::Typed;
use crate::args::{Cli, Complete, DEFAULT_URL, Store};
use crate::connect::{ask, block_on};
use crate::documents::named;
use crate::exit::{Failure, Outcome};
use crate::output::{describe, printable, show};

/// How long the store may take.
const PATIENCE: Duration = Duration::from_secs(1);

/// How many names are offered. Who has more of them has to type another letter.
const NAMES: usize = 200;

/// Stands for the word under the cursor, which nobody has written elsewhere.
const CURRENT: &str = "\u{1}";

pub(crate) fn run(args: &Complete) -> Outcome {
    let typed: Option<Vec<Typed>> = args
        .bash
        .as_ref()
        .map(|breaks| args.words.iter().map(|word| Typed::of(&word.to_string_lossy(), breaks)).collect());
    let words: Vec<OsString> = match &typed {
        Some(typed) => typed.iter().map(|word| word.says.clone().into()).collect(),
        None => args.words.clone(),
    };
    let Some((current, before)) = words.split_last() else { return Ok(0) };
    let typed = typed.as_ref().and_then(|typed| typed.last());
    let found = Found::of(before, current);
    let answer = match &found.place {
        Place::Command(at) => format!("command {at}\n"),
        Place::Files => "files\n".to_owned(),
        Place::Word => {
            let mut lines = vec!["words".to_owned()];
            lines.extend(found.candidates(words)?.iter().filter_map(|one| line(one, typed)));
            lines.join("\n") + "\n"
        }
    };
    show(&answer)?;
    Ok(0)
}

/// The verbs that people use, and their options.
pub(crate) fn visible() -> Command {
    let all = Cli::command();
    let verbs = all.get_subcommands().filter(|verb| !verb.is_hide_set()).cloned();
    Store::augment_args(Command::new("clinch")).version(env!("CARGO_PKG_VERSION")).subcommands(verbs)
}

/// What is known of the word under the cursor.
struct Found {
    place: Place,
    store: Store,
    /// The lock that is named before it.
    name: String,
}

enum Place {
    /// In the command that begins at this word.
    Command(usize),
    Files,
    Word,
}

impl Found {
    fn of(before: &[OsString], current: &OsStr) -> Found {
        // Before the command, what begins as an option is one.
        let is_option = current.as_encoded_bytes().starts_with(b"-");
        let words: Vec<_> =
            before.iter().cloned().chain((!is_option).then(|| OsString::from(CURRENT))).collect();
        let end = words.len();
        let matches = Cli::command().ignore_errors(true).try_get_matches_from(words).ok();
        let verb = matches.as_ref().and_then(ArgMatches::subcommand).map(|(_, verb)| verb);
        let raw = |id| verb.and_then(|verb| verb.try_get_raw(id).ok().flatten());
        let text =
            |id| raw(id).and_then(Iterator::last).and_then(OsStr::to_str).unwrap_or_default().to_owned();
        let place = match raw("command").map_or(0, Iterator::count) {
            0 if text("events") == CURRENT => Place::Files,
            0 => Place::Word,
            count => Place::Command(end.saturating_sub(count)),
        };
        let url = Some(text("url")).filter(|url| !url.is_empty()).unwrap_or_else(|| DEFAULT_URL.to_owned());
        Found { place, store: Store { url }, name: text("name") }
    }

    /// The words that may stand there, and what they mean.
    fn candidates(self, words: Vec<OsString>) -> Result<Vec<CompletionCandidate>, Failure> {
        let (is_empty, at) = (words.last().is_none_or(|word| word.is_empty()), words.len().saturating_sub(1));
        let (store, name) = (self.store.clone(), self.name);
        let names = ArgValueCompleter::new(move |current: &OsStr| names(&self.store, current));
        let claims = ArgValueCompleter::new(move |current: &OsStr| claims(&store, &name, current));
        let mut command = visible().mut_subcommands(|verb| {
            verb.mut_args(|arg| match arg.get_id().as_str() {
                "name" | "names" => arg.add(names.clone()),
                "claim" => arg.add(claims.clone()),
                _ => arg,
            })
        });
        let mut found = complete(&mut command, words, at, None)
            .map_err(|error| Failure::system("cannot complete this", error))?;
        // Where a word is expected, options are offered to who begins one.
        let is_option = |one: &CompletionCandidate| one.get_value().as_encoded_bytes().starts_with(b"-");
        if is_empty && !found.iter().all(is_option) {
            found.retain(|one| !is_option(one));
        }
        Ok(found)
    }
}

/// A word, as it is to be put in, and its meaning. What a line or a terminal cannot show is not offered.
fn line(candidate: &CompletionCandidate, typed: Option<&Typed>) -> Option<String> {
    let word = candidate.get_value().to_str().filter(|word| printable(word) == *word)?;
    let word = typed.map_or_else(|| Some(word.to_owned()), |typed| typed.completed(word))?;
    let help = candidate.get_help().map(ToString::to_string).unwrap_or_default();
    Some(format!("{word}\t{}", help.lines().next().unwrap_or_default()))
}

/// Names of locks that begin like this.
fn names(store: &Store, current: &OsStr) -> Vec<CompletionCandidate> {
    let Some(beginning) = current.to_str().map(str::to_owned) else { return Vec::new() };
    let locks = asked(store, async move |locks| locks.survey(&beginning).await).unwrap_or_default().locks;
    let found = locks.into_iter().take(NAMES).map(|lock| {
        let holder = lock.claims.first().map_or_else(|| "kept closed".to_owned(), describe);
        CompletionCandidate::new(lock.name.as_str()).help(Some(holder.into()))
    });
    found.collect()
}

/// Claims on a lock that begin like this.
fn claims(store: &Store, name: &str, current: &OsStr) -> Vec<CompletionCandidate> {
    let name = name.to_owned();
    let lock = asked(store, async move |locks| locks.state(&name).await).flatten();
    let claims = lock.into_iter().flat_map(|lock| lock.claims).take(NAMES);
    let found = claims.filter_map(|claim| {
        let id = named(claim.id).filter(|id| id.as_bytes().starts_with(current.as_encoded_bytes()))?;
        Some(CompletionCandidate::new(id).help(Some(describe(&claim).into())))
    });
    found.collect()
}

/// What a store answers in time. On another thread, since a file system may keep who asks it.
fn asked<T: Send + 'static>(
    store: &Store,
    question: impl AsyncFnOnce(Locks) -> clinch::Result<T> + Send + 'static,
) -> Option<T> {
    // To connect would make it.
    if file::dir_of(&store.url).is_some_and(|dir| !dir.is_dir()) {
        return None;
    }
    let (tell, hear) = channel();
    let store = store.clone();
    thread::spawn(move || {
        block_on(async {
            // Nobody may be waiting for it any more.
            let _ = tell.send(ask(&store, question).await.ok());
            Ok(0)
        })
    });
    hear.recv_timeout(PATIENCE).ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(line: &[&str]) -> String {
        let words: Vec<OsString> = line.iter().map(OsString::from).collect();
        let (current, before) = words.split_last().unwrap();
        match Found::of(before, current).place {
            Place::Command(at) => line[at..].join(" "),
            Place::Files => "files".to_owned(),
            Place::Word => String::new(),
        }
    }

    /// Options of the command are completed as those of clinch, or its files as names of locks.
    #[test]
    fn the_command_is_told_from_what_stands_before_it() {
        for (line, command) in [
            (&["clinch", "run", "x", "--", "ssh", "-"][..], "ssh -"),
            (&["clinch", "run", "-w", "5s", "-E3", "x", "ssh", "ho"], "ssh ho"),
            (&["clinch", "run", "-u", "file:///tmp", "x", "--", ""], ""),
            (&["clinch", "run", "x", "--", "l"], "l"),
            (&["clinch", "run", "x", "l"], "l"),
            (&["clinch", "-u", "file:///", "run", "x", "--", "clinch", "run", "y", "-"], "clinch run y -"),
            (&["clinch", "run", "x"], ""),
            (&["clinch", "run", "x", "-"], ""),
            (&["clinch", "run", "x", "-w", ""], ""),
            (&["clinch", "run", "-n", "-w", "5s", "x", "ls", "a"], "ls a"),
            (&["clinch", "run", "--events", "f"], "files"),
            (&["clinch", "run", "--events", "x", "y"], ""),
            (&["clinch", "show", "x"], ""),
            (&["clinch"], ""),
        ] {
            assert_eq!(place(line), command, "{line:?}");
        }
        assert!(matches!(
            Found::of(&["clinch", "run", "x", "--"].map(OsString::from), OsStr::new("")).place,
            Place::Command(4)
        ));
    }
}
