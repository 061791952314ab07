//! Planted mutants: known ways to get a lock wrong, each of which a named test must catch.
//!
//! A mutant is a file in `mutants/`. It says what goes wrong, which test must fail on it and with which words, and then what
//! to change: in each file the lines that go (`-`) and come (`+`), with as many beside them (` `) as make the place the
//! only one in its file.
//!
//! ```text
//! The holder trusts the store to tell it of a loss: no deadline of its own fires when renewals get no answer.
//!
//! caught-by: --test memory conformance::loss::keeper_stalled
//! with: two guards hold at a time
//!
//! in: crates/clinch/src/tenure.rs
//! -        let Some(deadline) = self.deadline_of(state).filter(|deadline| *deadline <= now) else { return };
//! +        let Some(deadline) = self.policy.hold_until.filter(|deadline| *deadline <= now) else { return };
//! ```
//!
//! There are no line numbers, so lines that move break no mutant. The source itself has no branch for mutants. One that no
//! longer applies, does not compile, or is not caught fails the run; so does a test that fails without the mutant.

mod bench;
mod edit;
mod mutant;

use std::process::Output;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use self::bench::Bench;
use self::mutant::{ENDING, Mutant};
use crate::shell::{Result, root};

/// How many mutants are planted at a time, each in a copy of its own.
const BENCHES: usize = 3;

/// In how many days the suite plants each mutant once: all of them take longer than all else in it.
const DAYS: u64 = 20;

/// `mutants [--today | [--check] [NAMES]]`.
pub(crate) fn task(args: &[String]) -> Result {
    match args {
        [flag, names @ ..] if flag == "--check" => check(names),
        [flag] if flag == "--today" => run_todays(),
        names => plant(&chosen(names)?, false),
    }
}

/// Whether all mutants, or only these, still apply to the source. Builds nothing, and changes nothing.
pub(crate) fn check(only: &[String]) -> Result {
    let mutants = chosen(only)?;
    applies(&mutants)?;
    println!("mutants: {} apply", mutants.len());
    Ok(())
}

/// Plants those whose day it is, after the whole suite has passed.
pub(crate) fn run_todays() -> Result {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_err(|error| error.to_string())?;
    let today = time.as_secs() / (24 * 3600) % DAYS;
    let days = (0..DAYS).cycle();
    let todays = chosen(&[])?.into_iter().zip(days).filter(|(_, day)| *day == today);
    plant(&todays.map(|(mutant, _)| mutant).collect::<Vec<_>>(), true)
}

/// Plants mutants. Where the whole suite has just passed, nobody needs to see their tests pass again.
fn plant(chosen: &[Mutant], suite_passed: bool) -> Result {
    applies(chosen)?;
    // Most of a mutant's time goes into building one crate, which keeps no second processor busy, and into waiting.
    let benches: Vec<Bench> = (0..BENCHES.min(chosen.len())).map(Bench::at).collect::<Result<_>>()?;
    if let (false, Some(bench)) = (suite_passed, benches.first()) {
        // All of these first: nothing is built again between them.
        for mutant in chosen {
            passes_without(mutant, bench)?;
        }
    }
    let left = Mutex::new(chosen.iter());
    let next = || left.lock().map(|mut left| left.next()).unwrap_or_default();
    let failures = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for bench in &benches {
            scope.spawn(|| {
                while let Some(mutant) = next() {
                    match catch(mutant, bench) {
                        Ok(words) => println!("mutant {}: caught: {words}", mutant.name),
                        Err(failure) => {
                            println!("{failure}");
                            failures
                                .lock()
                                .unwrap_or_else(PoisonError::into_inner)
                                .push(mutant.name.as_str());
                        }
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!("mutants: {} planted, {} caught", chosen.len(), chosen.len() - failures.len());
    if failures.is_empty() { Ok(()) } else { Err(format!("not caught: {}", failures.join(", "))) }
}

/// The mutants with these names, or all.
fn chosen(only: &[String]) -> Result<Vec<Mutant>> {
    let mut mutants = read()?;
    if let Some(unknown) = only.iter().find(|name| !mutants.iter().any(|mutant| mutant.name == **name)) {
        return Err(format!("no mutant \"{unknown}\""));
    }
    mutants.retain(|mutant| only.is_empty() || only.contains(&mutant.name));
    Ok(mutants)
}

fn read() -> Result<Vec<Mutant>> {
    let dir = root().join("mutants");
    let entries = std::fs::read_dir(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    let mut mutants = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|error| error.to_string())?;
        let file = entry.file_name().to_string_lossy().into_owned();
        // Whatever is there is meant to be planted.
        let name =
            file.strip_suffix(ENDING).ok_or_else(|| format!("mutants/{file}: no mutant: *{ENDING}"))?;
        let text =
            std::fs::read_to_string(entry.path()).map_err(|error| format!("mutants/{file}: {error}"))?;
        mutants.push(Mutant::parse(name, &text)?);
    }
    mutants.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(mutants)
}

/// Refuses mutants that no longer apply, all of them at once.
fn applies(mutants: &[Mutant]) -> Result {
    let failures: Vec<String> = mutants.iter().filter_map(|mutant| mutant.changes(&root()).err()).collect();
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\n")) }
}

/// A test that fails anyway would catch anything.
fn passes_without(mutant: &Mutant, bench: &Bench) -> Result {
    let sound = bench.test(mutant)?;
    if sound.status.success() && has_run(&sound) {
        return Ok(());
    }
    Err(format!(
        "mutant {}: its test must be one test that passes without it:\n{}",
        mutant.name,
        said(&sound)
    ))
}

/// Whether one test has run and passed.
fn has_run(output: &Output) -> bool {
    String::from_utf8_lossy(&output.stdout).contains("1 passed")
}

/// All that a test printed.
fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Plants one mutant, checks that its test fails, and takes it out again. Returns the test's own words. That the test
/// passes without the mutant has been seen before: to look again here would build everything twice more.
fn catch(mutant: &Mutant, bench: &Bench) -> Result<String> {
    let result = planted(mutant, bench, || bench.test(mutant))?;
    caught(mutant, &result?)
}

/// Does something in a copy of the tree with one mutant planted.
pub(crate) fn with_planted(name: &str, then: impl FnOnce(&Bench) -> Result) -> Result {
    let (mutants, bench) = (chosen(&[name.to_owned()])?, Bench::at(0)?);
    let mutant = mutants.first().ok_or("no mutant")?;
    planted(mutant, &bench, || then(&bench))?
}

/// Does something while a mutant is planted.
fn planted<T>(mutant: &Mutant, bench: &Bench, then: impl FnOnce() -> T) -> Result<T> {
    let changes = mutant.changes(&bench.tree)?;
    for change in &changes {
        bench.write(&change.file, change.mutated.as_bytes())?;
    }
    let result = then();
    for change in &changes {
        bench.write(&change.file, change.sound.as_bytes())?;
    }
    Ok(result)
}

/// What the test said with the mutant planted, if that is what it was to say.
fn caught(mutant: &Mutant, result: &Output) -> Result<String> {
    let Mutant { name, reason, test, with, .. } = mutant;
    let output = said(result);
    if result.status.success() && !has_run(result) {
        return Err(format!("mutant {name}: there is no test {} {test}", mutant.target.join(" ")));
    }
    if result.status.success() {
        return Err(format!("mutant {name} lives: {test} passes with it. {reason}"));
    }
    if !output.contains(with) {
        let how = result.status;
        return Err(format!("mutant {name} was caught ({how}), but not with \"{with}\":\n{output}"));
    }
    // The words follow the line that says where the panic was.
    let words = output.lines().skip_while(|line| !line.contains("panicked at")).nth(1);
    Ok(words.unwrap_or_default().trim().to_owned())
}
