//! The command line.

use std::path::PathBuf;

use crate::Result;
use crate::scenarios::SCENARIOS;

/// Rounds when nobody says how many: enough for a median that one bad round does not move.
const ROUNDS: usize = 5;

/// What was asked for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Command {
    Help,
    Bench(Args),
}

/// What to measure and how to show it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Args {
    scenarios: Vec<String>,
    pub(crate) json: bool,
    pub(crate) gate: bool,
    pub(crate) settings: Settings,
}

/// How to measure.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Settings {
    pub(crate) rounds: usize,
    /// As little as shows that everything works; the figures mean nothing.
    pub(crate) quick: bool,
    pub(crate) pin: bool,
    /// The `clinch` binary to run; by default the one next to this program.
    pub(crate) clinch: Option<PathBuf>,
    /// Where directories of lock files are made, and removed at the end.
    pub(crate) dir: PathBuf,
}

impl Args {
    /// Whether a scenario is to be run: all are when none is named.
    pub(crate) fn wants(&self, scenario: &str) -> bool {
        self.scenarios.is_empty() || self.scenarios.iter().any(|name| name == scenario)
    }
}

impl Settings {
    /// The full amount of something, or the quick one.
    pub(crate) fn amount<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }

    /// A fresh directory.
    pub(crate) fn fresh_dir(&self) -> Result<tempfile::TempDir> {
        let made = tempfile::Builder::new().prefix("clinch-bench-").tempdir_in(&self.dir);
        made.map_err(|error| format!("{}: {error}", self.dir.display()).into())
    }
}

pub(crate) fn parse(args: Vec<String>) -> Result<Command> {
    let mut parsed = Args {
        scenarios: Vec::new(),
        json: false,
        gate: false,
        settings: Settings {
            rounds: 0,
            quick: false,
            pin: true,
            clinch: None,
            dir: std::path::absolute(std::env::temp_dir())?,
        },
    };
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value; see --help"));
        match arg.as_str() {
            "-h" | "--help" => return Ok(Command::Help),
            "--json" => parsed.json = true,
            "--gate" => parsed.gate = true,
            "--quick" => parsed.settings.quick = true,
            "--no-pin" => parsed.settings.pin = false,
            "--rounds" => parsed.settings.rounds = rounds(&value()?)?,
            "--clinch" => parsed.settings.clinch = Some(value()?.into()),
            "--dir" => parsed.settings.dir = std::path::absolute(value()?)?,
            name if SCENARIOS.iter().any(|scenario| scenario.name == name) => {
                parsed.scenarios.push(arg);
            }
            other => return Err(format!("no scenario or option \"{other}\"; see --help").into()),
        }
    }
    if parsed.settings.rounds == 0 {
        parsed.settings.rounds = parsed.settings.amount(ROUNDS, 1);
    }
    Ok(Command::Bench(parsed))
}

fn rounds(text: &str) -> Result<usize> {
    match text.parse() {
        Ok(rounds @ 1..=1000) => Ok(rounds),
        _ => Err(format!("--rounds takes a number from 1 to 1000; \"{text}\" is none").into()),
    }
}

pub(crate) fn help() -> String {
    let mut text = "\
Measures Clinch beside floors that no library on the same store can beat, in interleaved rounds.

The scenarios on Redis and etcd start a server of their own. etcd-contention and etcd-kill also need Go and its library
for etcd (Debian: golang-go, golang-etcd-server-dev).

Usage: clinch-bench [SCENARIO...] [OPTIONS]

Scenarios (all when none is named):
"
    .to_owned();
    for scenario in SCENARIOS {
        text.push_str(&format!("  {:<20}{}\n", scenario.name, scenario.about));
    }
    text.push_str(&format!(
        "
Options:
  --rounds N     rounds of each comparison [default: {ROUNDS}]
  --json         JSON with the values of all rounds, instead of Markdown
  --quick        as little as shows that it works; the figures mean nothing
  --gate         exit with 2 when a target was missed; without it, a missed target is only shown
  --no-pin       do not pin file-pair, redis-pair and a part of etcd-pair and redlock-pair to one CPU
  --clinch PATH  the clinch binary for \"run\" [default: next to this program]
  --dir DIR      where to make directories of lock files [default: that of temporary files]
  -h, --help     this

Exits with 1 when a scenario could not be measured.
"
    ));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bench(args: &[&str]) -> Result<Args> {
        match parse(args.iter().map(|arg| (*arg).to_owned()).collect())? {
            Command::Bench(args) => Ok(args),
            Command::Help => Err("help".into()),
        }
    }

    #[test]
    fn scenarios_and_options_come_in_any_order() {
        let args = bench(&["--json", "kill", "--rounds", "7", "run", "--dir", "/d"]).unwrap();
        assert!(args.json && !args.gate && args.settings.pin);
        assert!(args.wants("kill") && args.wants("run") && !args.wants("held"));
        assert_eq!((args.settings.rounds, args.settings.dir), (7, "/d".into()));
        assert!(bench(&[]).unwrap().wants("held"), "all by default");
        assert_eq!(bench(&["--quick"]).unwrap().settings.rounds, 1);
        assert_eq!(bench(&["--quick", "--rounds", "2"]).unwrap().settings.rounds, 2);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (args, word) in
            [(&["fast"][..], "\"fast\""), (&["--rounds"], "needs a value"), (&["--rounds", "0"], "1 to 1000")]
        {
            assert!(bench(args).unwrap_err().to_string().contains(word), "{args:?}");
        }
    }

    #[test]
    fn help_lists_every_scenario() {
        assert!(SCENARIOS.iter().all(|scenario| help().contains(scenario.name)));
    }
}
