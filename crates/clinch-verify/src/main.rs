//! `clinch-verify`: judges recorded histories and says so by exit status.
//!
//! All judging is the library's; this reads arguments and files and prints.

use std::fs::File;
use std::io::{self, Write};
use std::process::ExitCode;

use clinch_verify::{History, Property, Report, Rules, Verdict, check};

const HELP: &str = "\
Judges histories of distributed locks.

Usage: clinch-verify [OPTION...] FILE...

FILE holds one event per line, in JSON; - is standard input. Several files are judged as one history.

Options:
  --json          Print the report as JSON
  --slack MS      How long a lock may stay ungranted, after its release or its TTL, while somebody waits [5000]
  --late MS       How long after its deadline a holder may be told of the loss, while no rival holds [0]
  --fifo          First come, first served is promised: judge overtaking too; no waiter was stopped for its TTL and --slack
  --only PROP,..  Judge these only: exclusion, fence, tokens, leak, overtaking, phantom, loss
  -h, --help      Print this help
  -V, --version   Print the version

Exit status: 0 valid; 1 violated; 2 nothing to judge, questions stay open, or the history or the arguments are
unusable.
";

fn main() -> ExitCode {
    let outcome = match parse(std::env::args().skip(1)) {
        Ok(Command::Print(text)) => io::stdout().write_all(text.as_bytes()).map(|()| Verdict::Valid),
        Ok(Command::Judge(job)) => judge(&job),
        Err(message) => Err(io::Error::other(format!("{message}; try --help"))),
    };
    match outcome {
        Ok(Verdict::Valid) => ExitCode::SUCCESS,
        Ok(Verdict::Violated) => ExitCode::from(1),
        Ok(Verdict::Unknown) => ExitCode::from(2),
        Err(error) => {
            // With standard error gone there is nobody left to tell; the status still says it.
            let _ = writeln!(io::stderr(), "clinch-verify: {error}");
            ExitCode::from(2)
        }
    }
}

enum Command {
    Print(String),
    Judge(Job),
}

#[derive(Default)]
struct Job {
    json: bool,
    rules: Rules,
    files: Vec<String>,
}

fn parse(args: impl Iterator<Item = String>) -> Result<Command, String> {
    let mut job = Job::default();
    let mut only = None;
    let mut args = args;
    while let Some(arg) = args.next() {
        let (name, attached) = match arg.split_once('=') {
            Some((name, value)) if name.starts_with("--") => (name, Some(value.to_owned())),
            _ => (arg.as_str(), None),
        };
        let takes_value = matches!(name, "--slack" | "--late" | "--only");
        if attached.is_some() && !takes_value {
            return Err(format!("{name} takes no value"));
        }
        let mut value = || attached.clone().or_else(|| args.next()).ok_or(format!("{name} needs a value"));
        match name {
            "-h" | "--help" => return Ok(Command::Print(HELP.to_owned())),
            "-V" | "--version" => {
                return Ok(Command::Print(format!("clinch-verify {}\n", env!("CARGO_PKG_VERSION"))));
            }
            "--json" => job.json = true,
            "--fifo" => job.rules.fifo = true,
            "--slack" => job.rules.slack = milliseconds(name, &value()?)?,
            "--late" => job.rules.lateness = milliseconds(name, &value()?)?,
            "--only" => only = Some(properties(&value()?)?),
            "--" => {
                job.files.extend(args);
                break;
            }
            _ if name.starts_with('-') && name != "-" => return Err(format!("unknown option {name}")),
            _ => job.files.push(arg),
        }
    }
    if job.files.is_empty() {
        return Err("no FILE given".to_owned());
    }
    if let Some(only) = only {
        if only.contains(&Property::Overtaking) && !job.rules.fifo {
            return Err("overtaking is judged only with --fifo".to_owned());
        }
        job.rules = job.rules.only(&only);
    }
    Ok(Command::Judge(job))
}

fn milliseconds(name: &str, value: &str) -> Result<u64, String> {
    let ms: Option<u64> = value.parse().ok();
    ms.and_then(|ms| ms.checked_mul(1_000_000))
        .ok_or(format!("{name} needs a whole number of milliseconds, not \"{value}\""))
}

fn properties(value: &str) -> Result<Vec<Property>, String> {
    value.split(',').map(str::parse).collect()
}

fn judge(job: &Job) -> io::Result<Verdict> {
    let mut history = History::new();
    for file in &job.files {
        let read = match file.as_str() {
            "-" => History::read(io::stdin().lock()),
            path => History::read(File::open(path).map_err(|error| named(path, &error))?),
        };
        history.append(read.map_err(|error| named(file, &error))?);
    }
    let report = check(&history, &job.rules);
    let mut out = io::stdout().lock();
    if job.json {
        serde_json::to_writer_pretty(&mut out, &report)?;
        writeln!(out)?;
    } else {
        print(&report, &mut out)?;
    }
    if report.verdict == Verdict::Unknown {
        let counts = report.counts;
        let why = if counts.grants == 0 {
            "nothing was granted"
        } else if report.doubts.is_empty() {
            "events could not be judged"
        } else {
            "questions stay open"
        };
        writeln!(io::stderr(), "clinch-verify: no verdict: {why} in {} events", counts.events)?;
    }
    Ok(report.verdict)
}

fn named(file: &str, error: &dyn std::error::Error) -> io::Error {
    let file = if file == "-" { "standard input" } else { file };
    io::Error::other(format!("{file}: {error}"))
}

fn print(report: &Report, out: &mut impl Write) -> io::Result<()> {
    for violation in &report.violations {
        writeln!(out, "{}: {}", violation.property, violation.explanation)?;
        for evidence in &violation.witness {
            let event = serde_json::to_string(&evidence.event)?;
            writeln!(out, "  {:>8}  {event}", format!("#{}", evidence.index))?;
        }
    }
    for doubt in &report.doubts {
        writeln!(out, "{}: unknown: {}", doubt.property, doubt.reason)?;
    }
    for note in &report.notes {
        writeln!(out, "note: {note}")?;
    }
    let counts = report.counts;
    writeln!(
        out,
        "{}: {} violations in {} events, {} grants, {} locks",
        report.verdict, counts.violations, counts.events, counts.grants, counts.locks
    )
}
