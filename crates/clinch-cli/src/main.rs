//! The `clinch` command: jobs and shell scripts under a distributed lock.
//!
//! This file only starts and ends the process. `args` says what can be asked, `verbs` has one file per verb, `job` is the
//! machinery that runs a child under a lock, `writer` writes what is said meanwhile.

mod args;
mod connect;
mod duration;
mod exit;
mod feed;
mod grid;
mod job;
mod output;
mod paint;
mod request;
mod screen;
mod table;
mod top;
mod verbs;
mod writer;

use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = match args::Cli::of_process() {
        Ok(cli) => cli,
        // It would be repeated.
        Err(error) if args::repeats_a_secret(&error) => return ExitCode::from(misplaced().report()),
        Err(error) => {
            // Help and version are answers, on stdout; the rest is a usage error. A closed stdout changes neither.
            let _ = error.print();
            if error.use_stderr() && args::asks_to_acquire() {
                verbs::acquire::fail_eval(exit::USAGE);
            }
            return ExitCode::from(if error.use_stderr() { exit::USAGE } else { 0 });
        }
    };
    let outcome = match cli.misplaces_a_secret() {
        // It would be stored, and shown to everybody.
        true => Err(misplaced()),
        false => verbs::dispatch(cli),
    };
    let code = outcome.unwrap_or_else(exit::Failure::report);
    writer::WRITER.finish();
    ExitCode::from(code)
}

fn misplaced() -> exit::Failure {
    if args::asks_to_acquire() {
        verbs::acquire::fail_eval(exit::USAGE);
    }
    exit::Failure::usage(
        "a store URL with a password stands where another word is expected; say it by CLINCH_URL",
    )
}
