//! Development tasks: `cargo xtask test`, `cargo xtask lint`.

mod deb;
mod lint;
mod mutants;
mod needs;
mod readme;
mod shell;
mod suite;
mod test;
mod torture;

use std::process::ExitCode;

const USAGE: &str = "\
Usage: cargo xtask <TASK>

  test      all tests: installs what they need, then unit, conformance, process and documentation tests,
            the commands of the README, and a tenth of the planted mutants, another each day, each of which must be caught
  lint      formatting, clippy, documentation, each feature compiled alone, and whether the mutants apply
  mutants   only the planted mutants; names after it choose some. With --check first it only says whether they
            still apply to the source; --today plants those that the suite plants today
  torture   random work and random faults on real servers, judged by the checker; `torture --help` says more.
            With --plant MUTANT first it plants that in a copy, and has to find something
  readme    only the commands of the README
  deb       the Debian package, with manual pages and completions";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let task = args.next().unwrap_or_default();
    let rest: Vec<String> = args.collect();
    let result = match task.as_str() {
        "test" => test::run(),
        "lint" => lint::run(),
        "mutants" => mutants::task(&rest),
        "deb" => deb::run(),
        "torture" => torture::task(&rest),
        "readme" => readme::run(),
        "-h" | "--help" | "help" => {
            println!("{USAGE}");
            Ok(())
        }
        other => Err(format!("no task \"{other}\"\n\n{USAGE}")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}
