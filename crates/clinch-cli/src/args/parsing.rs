//! From words to what they ask for, and what can be told of words that say nothing clear.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{CommandFactory as _, Parser};

use super::{Acquire, Break, Cli, DEFAULT_URL, Doctor, Ls, Release, Renew, RunCli, RunVerb, Show, Verb};
use crate::exit::Failure;

impl Cli {
    /// Parses the arguments of this process.
    pub(crate) fn of_process() -> Result<Cli, clap::Error> {
        let variable = std::env::var_os("CLINCH_URL");
        let (cli, names_store) = Cli::parse_quickly().map_err(|error| {
            let is_odd = |variable: &OsString| variable.to_str().is_none();
            match error.kind() == ErrorKind::InvalidUtf8 && variable.as_ref().is_some_and(is_odd) {
                true => {
                    Cli::command().error(ErrorKind::InvalidUtf8, "the URL in CLINCH_URL is no UTF-8 text")
                }
                false => explained(error),
            }
        })?;
        if cli.store.url.is_empty() && names_store {
            // A script's variable that is not set. The locks of this host would not be those that it meant.
            let message = "the URL after -u is empty: name the store, or leave -u out for that of CLINCH_URL, or else file://";
            return Err(Cli::command().error(ErrorKind::InvalidValue, message));
        }
        Ok(cli.settled())
    }

    /// As it is meant: an empty variable is none, and `--skip` is also `-E 0`, and `-n` where no time is given.
    fn settled(mut self) -> Cli {
        if self.store.url.is_empty() {
            DEFAULT_URL.clone_into(&mut self.store.url);
        }
        if let Verb::Run(run) = &mut self.verb
            && run.skip
        {
            (run.patience.no_wait, run.conflict_exit_code) = (run.patience.wait.is_none(), 0);
        }
        self
    }

    /// Tells as well whether the words name a store, not the environment.
    fn parse_quickly() -> Result<(Cli, bool), clap::Error> {
        if std::env::args_os().nth(1).is_some_and(|verb| verb == "run") {
            let (RunCli { store, verb: RunVerb::Run(run) }, names_store) = parse::<RunCli>()?;
            return Ok((Cli { store, verb: Verb::Run(run) }, names_store));
        }
        parse()
    }

    /// Whether who reads what we say is promised JSON.
    pub(crate) fn wants_json(&self) -> bool {
        match &self.verb {
            Verb::Ls(Ls { json, .. })
            | Verb::Show(Show { json, .. })
            | Verb::Acquire(Acquire { json, .. })
            | Verb::Renew(Renew { json, .. })
            | Verb::Release(Release { json, .. })
            | Verb::Break(Break { json, .. })
            | Verb::Doctor(Doctor { json, .. }) => *json,
            _ => false,
        }
    }
}

/// As `try_parse`, and tells whether the words name a store.
fn parse<T: Parser>() -> Result<(T, bool), clap::Error> {
    let mut matches = T::command().try_get_matches()?;
    let names_store = matches.value_source("url") == Some(ValueSource::CommandLine);
    let parsed = T::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut T::command()))?;
    Ok((parsed, names_store))
}

/// An error with what helps whoever reads it, and nothing else.
fn explained(mut error: clap::Error) -> clap::Error {
    let mut command = Cli::command();
    command.build();
    if error.kind() == ErrorKind::MissingSubcommand {
        let people = command.get_subcommands().filter(|verb| !verb.is_hide_set());
        let verbs = people.map(|verb| verb.get_name().to_owned()).collect();
        error.insert(ContextKind::ValidSubcommand, ContextValue::Strings(verbs));
    }
    // Without what comes from the environment, which would look as if it had to be said.
    let words: Vec<_> = std::env::args_os().collect();
    if let Some(verb) = verb_of(&words).and_then(|verb| command.find_subcommand_mut(verb))
        && error.get(ContextKind::Usage).is_some()
    {
        error.insert(ContextKind::Usage, ContextValue::StyledStr(verb.render_usage()));
    }
    let concerns_it = error.context().any(|(_, value)| value.to_string().contains("--no-fork"));
    if error.kind() == ErrorKind::ArgumentConflict && concerns_it {
        let why = "--no-fork leaves no clinch beside the command, which could do that".into();
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![why]));
    }
    error
}

/// Whether the words of this process, which may not be understood, are for `acquire`, and for a shell.
pub(crate) fn asks_to_acquire() -> bool {
    let words: Vec<_> = std::env::args_os().collect();
    verb_of(&words).as_deref() == Some("acquire") && !wants_json(&words)
}

/// Whether the words of this process, which may not be understood, ask for JSON.
pub(crate) fn asks_for_json() -> bool {
    wants_json(&std::env::args_os().collect::<Vec<_>>())
}

fn wants_json(words: &[OsString]) -> bool {
    // What follows a lock there is another command's.
    let is_run = verb_of(words).as_deref() == Some("run");
    !is_run && words.iter().take_while(|word| *word != "--").any(|word| word == "--json")
}

/// The verb among words that may not be understood: locks and values may be called like one.
fn verb_of(words: &[OsString]) -> Option<String> {
    let command = Cli::command();
    let understood = command.clone().ignore_errors(true).try_get_matches_from(words).ok();
    understood.and_then(|matches| matches.subcommand_name().map(str::to_owned)).or_else(|| {
        // Not even what stands before the verb was understood.
        let named = words.iter().skip(1).find_map(|word| command.find_subcommand(word));
        named.map(|verb| verb.get_name().to_owned())
    })
}

/// Why words cannot be understood, on one line.
pub(crate) fn failure_of(error: &clap::Error) -> Failure {
    let text = error.to_string();
    let first = text.split("\n\n").next().unwrap_or_default();
    let text = first.split_whitespace().collect::<Vec<_>>().join(" ");
    Failure::usage(text.strip_prefix("error: ").unwrap_or(&text).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verb_is_no_lock_and_no_value_that_is_called_like_one() {
        for (line, verb) in [
            (&["show", "run", "--json", "--bogus"][..], Some("show")),
            (&["-u", "run", "acquire", "--bogus"], Some("acquire")),
            (&["run", "acquire", "-Z", "ls"], Some("run")),
            (&["acquire", "-w", "ls", "run"], Some("acquire")),
            (&["--bogus", "acquire", "run"], Some("acquire")),
            (&["aquire", "x"], None),
            (&["--help"], None),
        ] {
            let words: Vec<OsString> = ["clinch"].iter().chain(line).map(OsString::from).collect();
            assert_eq!(verb_of(&words).as_deref(), verb, "{line:?}");
        }
    }

    #[test]
    fn an_empty_url_is_none() {
        let cli = Cli::try_parse_from(["clinch", "-u", "", "ls"]).unwrap().settled();
        assert_eq!(cli.store.url, DEFAULT_URL);
    }

    #[test]
    fn to_skip_is_not_to_wait_and_to_succeed() {
        let run = |line: &[&str]| {
            let Verb::Run(run) = Cli::try_parse_from(line).unwrap().settled().verb else { panic!("no run") };
            (run.patience.no_wait, run.quiet, run.conflict_exit_code)
        };
        let skip = run(&["clinch", "run", "--skip", "x", "true"]);
        assert_eq!(skip, run(&["clinch", "run", "-n", "-E", "0", "x", "true"]));
        let with = |option| Cli::try_parse_from(["clinch", "run", "--skip", option, "x", "true"]);
        let patient = run(&["clinch", "run", "--skip", "-w", "1s", "x", "true"]);
        assert_eq!(patient, run(&["clinch", "run", "-w", "1s", "-E", "0", "x", "true"]));
        for other in ["-v", "-E3"] {
            assert!(with(other).is_err(), "{other} would be lost");
        }
    }

    #[test]
    fn the_quick_way_to_run_understands_the_same() {
        Cli::command().debug_assert();
        RunCli::command().debug_assert();
        let line = ["clinch", "run", "-n", "-u", "memory://", "-E", "3", "x", "--", "ls", "-n"];
        let RunVerb::Run(quick) = RunCli::try_parse_from(line).unwrap().verb;
        let Verb::Run(full) = Cli::try_parse_from(line).unwrap().verb else { panic!("another verb") };
        assert_eq!(format!("{quick:?}"), format!("{full:?}"));
        assert_eq!(quick.command, ["ls", "-n"]);
        let help = |mut command: clap::Command| {
            command.build();
            command.find_subcommand_mut("run").unwrap().render_long_help().to_string()
        };
        assert_eq!(help(RunCli::command()), help(Cli::command()));
    }
}
