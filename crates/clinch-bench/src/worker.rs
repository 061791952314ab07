//! The bench as its own worker: processes that compete, hold until they are killed, or keep many leases.
//!
//! A worker says on stdout when it is ready and what it found, and is told on stdin when to begin. It ends when stdin
//! does, so none outlives the bench.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use clinch::{Env, Lane, Locks};
use rustix::fs::FlockOperation;

use crate::contend::{self, Kind, NAME, Plan};
use crate::history::Hold;
use crate::machine::{self, now};
use crate::scenarios::held;
use crate::{Error, Result};

/// What a worker writes when it can begin.
const READY: &str = "ready";

/// Before the last line of a competitor: the CPU time that it used.
const CPU: &str = "cpu ";

/// A worker process, as seen by the bench. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Worker {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts a worker and waits until it is ready.
    pub(crate) fn start(args: &[&str]) -> Result<Worker> {
        let mut worker = Worker::spawn(args)?;
        worker.ready()?;
        Ok(worker)
    }

    /// Starts a worker and does not wait.
    pub(crate) fn spawn(args: &[&str]) -> Result<Worker> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("worker").args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().ok_or("a worker without stdout")?);
        Ok(Worker { child, stdin, stdout })
    }

    pub(crate) fn ready(&mut self) -> Result<()> {
        let mut line = String::new();
        self.stdout.read_line(&mut line)?;
        match line.trim_end() {
            READY => Ok(()),
            other => Err(format!("a worker failed to start: {other}").into()),
        }
    }

    /// Tells a worker to begin.
    pub(crate) fn tell(&mut self, line: &str) -> Result<()> {
        let stdin = self.stdin.as_mut().ok_or("a worker without stdin")?;
        Ok(writeln!(stdin, "{line}")?)
    }

    /// What it wrote until it ended by itself.
    pub(crate) fn output(mut self) -> Result<String> {
        let mut text = String::new();
        self.stdout.read_to_string(&mut text)?;
        let status = self.child.wait()?;
        if status.success() { Ok(text) } else { Err(format!("a worker failed: {status}").into()) }
    }

    /// Kills it with SIGKILL, and says when that was asked for.
    pub(crate) fn kill(&mut self) -> Result<u64> {
        let at = now();
        self.child.kill()?;
        Ok(at)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Both fail only for a worker that ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The main function of a worker.
pub(crate) fn run(args: &[String]) -> Result<()> {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match *args.as_slice() {
        ["contend", kind, dir] => contend(Kind::from_word(kind)?, Path::new(dir)),
        ["hold", kind, dir] => hold(Kind::from_word(kind)?, Path::new(dir)),
        ["held", store, dir, count, seconds] => {
            println!("{}", held::keep(store, Path::new(dir), count.parse()?, seconds.parse()?)?);
            Ok(())
        }
        _ => Err(format!("no such worker: {args:?}").into()),
    }
}

/// The plan as a line for competitors.
pub(crate) fn plan_line(plan: Plan) -> String {
    format!("{} {} {}", plan.start, plan.end, plan.hold.as_nanos())
}

/// What a competitor wrote: its holds, and the CPU time that it used from start to end.
pub(crate) fn parse_contender(text: &str) -> Result<(Vec<Hold>, u64)> {
    let mut holds = Vec::new();
    for line in text.lines() {
        match line.strip_prefix(CPU) {
            Some(cpu) => return Ok((holds, cpu.parse()?)),
            None => holds.push(line.parse()?),
        }
    }
    Err("a worker's output ended early".into())
}

fn contend(kind: Kind, dir: &Path) -> Result<()> {
    match kind {
        Kind::Clinch | Kind::Resting => runtime()?.block_on(async {
            // As `clinch run` does it: one thread for everything.
            let locks = Locks::connect(&url(dir), Env::host(Lane::here()?)).await?;
            let mutex = locks.mutex(NAME)?;
            let plan = start_of_plan()?;
            let used = machine::cpu_time();
            let holds = contend::by_mutex(mutex, plan, kind.rest(plan.hold)).await?;
            say(&holds, machine::cpu_time() - used)
        }),
        Kind::Flock | Kind::Greedy => {
            let plan = start_of_plan()?;
            let used = machine::cpu_time();
            let holds = contend::by_flock(&dir.join(NAME), plan, kind.rest(plan.hold))?;
            say(&holds, machine::cpu_time() - used)
        }
    }
}

/// Says that all is ready, hears the plan, and sleeps until its start.
fn start_of_plan() -> Result<Plan> {
    println!("{READY}");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let numbers: Vec<u64> = line.split_whitespace().map(str::parse).collect::<std::result::Result<_, _>>()?;
    let [start, end, hold] = *numbers.as_slice() else { return Err(format!("no plan: {line}").into()) };
    machine::sleep_until(start);
    Ok(Plan { start, end, hold: Duration::from_nanos(hold) })
}

fn say(holds: &[Hold], cpu: u64) -> Result<()> {
    let mut text: String = holds.iter().map(|hold| hold.line() + "\n").collect();
    text.push_str(&format!("{CPU}{cpu}\n"));
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

/// Holds the lock until somebody kills this process, or stdin ends.
fn hold(kind: Kind, dir: &Path) -> Result<()> {
    match kind {
        Kind::Clinch | Kind::Resting => runtime()?.block_on(async {
            let locks = Locks::connect(&url(dir), Env::host(Lane::here()?)).await?;
            let guard = locks.mutex(NAME)?.lock().await?;
            wait_for_end();
            guard.release().await?;
            Ok::<_, Error>(())
        }),
        Kind::Flock | Kind::Greedy => {
            let file = contend::open(&dir.join(NAME))?;
            rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
            wait_for_end();
            Ok(())
        }
    }
}

fn wait_for_end() {
    println!("{READY}");
    // An error is as good an end as any.
    let _ = std::io::stdin().read(&mut [0]);
}

pub(crate) fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

/// The URL of a directory of lock files.
pub(crate) fn url(dir: &Path) -> String {
    format!("file://{}", dir.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_contenders_output_must_be_whole() {
        let hold = Hold { want: 1, got: 2, release: 3 };
        assert_eq!(parse_contender("1 2 3\ncpu 7\n").unwrap(), (vec![hold], 7));
        assert!(parse_contender("1 2 3\n").is_err(), "the last line is missing");
        assert!(parse_contender("1 2\ncpu 7\n").is_err());
    }
}
