//! The `clinch` command: jobs and shell scripts under a distributed lock.
//!
//! This file only starts and ends the process. `args` says what can be asked, `verbs` has one file per verb, `job` is the
//! machinery that runs a child under a lock, `writer` writes what is said meanwhile.

mod args;
mod around;
mod connect;
mod documents;
mod duration;
mod exit;
mod feed;
mod grid;
mod job;
mod output;
mod paint;
mod request;
mod screen;
mod secret;
mod status;
mod table;
mod top;
mod turn;
mod verbs;
mod waiting;
mod writer;

use std::process::ExitCode;

fn main() -> ExitCode {
    let parsed = args::Cli::of_process();
    if parsed.as_ref().map_or_else(|_| args::asks_for_json(), args::Cli::wants_json) {
        output::speak_json();
    }
    let cli = match parsed {
        Ok(cli) => cli,
        // It would be repeated.
        Err(error) if secret::is_repeated_by(&error) => return end(fail(secret::misplaced())),
        Err(error) => {
            if !error.use_stderr() {
                return end(output::show_help(&error).map_or_else(exit::Failure::report, |()| 0));
            }
            match args::asks_for_json() {
                true => drop(args::failure_of(&error).report()),
                false => drop(error.print()),
            }
            if args::asks_to_acquire() {
                verbs::acquire::fail_eval(exit::USAGE);
            }
            return end(exit::USAGE);
        }
    };
    let outcome = match secret::is_misplaced(&cli) {
        // It would be stored, and shown to everybody.
        true => Err(secret::misplaced()),
        false => verbs::dispatch(cli),
    };
    end(outcome.unwrap_or_else(fail))
}

fn fail(failure: exit::Failure) -> u8 {
    // By `-E` a lock that is taken may have that code as well.
    let is_unwritten = failure.code == exit::UNWRITTEN && !failure.is_taken;
    if args::asks_to_acquire() && !is_unwritten {
        verbs::acquire::fail_eval(failure.code);
    }
    failure.report()
}

fn end(code: u8) -> ExitCode {
    writer::WRITER.finish();
    ExitCode::from(code)
}
