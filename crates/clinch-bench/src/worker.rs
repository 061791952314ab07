//! The bench as its own worker: processes that compete, hold until they are killed, or keep many leases.
//!
//! A worker says on stdout when it is ready and what it found, and is told on stdin when to begin. It ends when stdin
//! does, so none outlives the bench.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use clinch::{Env, Lane, Locks};
use serde_json::{Value, json};

use crate::contend::{Bare, Kind, NAME, Plan, Waiter};
use crate::go_mutex;
use crate::harness::Sample;
use crate::history::Hold;
use crate::machine::{self, now};
use crate::report::Metric;
use crate::scenarios::{etcd, held, redis, redlock};
use crate::{Error, Result};

/// What a worker writes when it can begin.
const READY: &str = "ready";

/// Before the last line of competitors: the CPU time that they used.
const CPU: &str = "cpu ";

/// Between two competitors of one process.
const NEXT: &str = "next";

/// A worker process, as seen by the bench. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Worker {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts somebody who competes, holds or waits, and waits until that one is ready.
    pub(crate) fn start(role: &str, kind: Kind, url: &str) -> Result<Worker> {
        let mut worker = Worker::of(role, kind, url, 1)?;
        worker.ready()?;
        Ok(worker)
    }

    /// Starts so many of them in a process, and does not wait. A foreign library has a program of its own.
    pub(crate) fn of(role: &str, kind: Kind, url: &str, waiters: usize) -> Result<Worker> {
        match (kind, waiters) {
            (Kind::GoMutex, _) => Worker::run(go_mutex::command(role, url, waiters)?),
            (_, 1) => Worker::spawn(&[role, kind.word(), url]),
            _ => Err("a worker of ours has one waiter".into()),
        }
    }

    /// Starts a worker of this program and does not wait.
    pub(crate) fn spawn(args: &[&str]) -> Result<Worker> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("worker").args(args);
        Worker::run(command)
    }

    fn run(mut command: Command) -> Result<Worker> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().ok_or("a worker without stdout")?);
        Ok(Worker { child, stdin, stdout })
    }

    /// Waits until it says that it is ready.
    pub(crate) fn ready(&mut self) -> Result<()> {
        match self.line()?.as_str() {
            READY => Ok(()),
            other => Err(format!("a worker failed to start: {other}").into()),
        }
    }

    /// Between which moments the lock was taken that a worker holds.
    pub(crate) fn taken(&mut self) -> Result<(u64, u64)> {
        let line = self.line()?;
        let (asked, got) = line.split_once(' ').ok_or_else(|| format!("a worker holds nothing: {line}"))?;
        Ok((asked.parse()?, got.parse()?))
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.stdout.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
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

    /// Tells it to end, and does not wait for that.
    pub(crate) fn end(&mut self) -> Result<()> {
        self.stdin.take();
        Ok(())
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
        ["contend", kind, url] => contend(Kind::from_word(kind)?, url),
        ["hold", kind, url] => hold(Kind::from_word(kind)?, url),
        ["queue", kind, url] => queue(Kind::from_word(kind)?, url),
        ["held", store, dir, count, seconds] => {
            println!("{}", held::keep(store, Path::new(dir), count.parse()?, seconds.parse()?)?);
            Ok(())
        }
        ["etcd-held", who, url, count, seconds] => {
            println!("{}", etcd::held::keep(who, url, count.parse()?, seconds.parse()?)?);
            Ok(())
        }
        ["redis-held", who, url, count, seconds] => {
            println!("{}", redis::held::keep(who, url, count.parse()?, seconds.parse()?)?);
            Ok(())
        }
        ["redlock-once", url] => redlock::stopped::once(url),
        ["redis-throughput", who, url, millis] => {
            println!("{}", redis::throughput::work(who, url, Duration::from_millis(millis.parse()?))?);
            Ok(())
        }
        _ => Err(format!("no such worker: {args:?}").into()),
    }
}

/// What a worker found out, as one line.
pub(crate) fn tell(figures: &[(Metric, f64)]) -> Value {
    figures.iter().map(|(metric, value)| (key(*metric), json!(value))).collect()
}

/// Reads what a worker told.
pub(crate) fn told(text: &str, metrics: &[Metric]) -> Result<Sample> {
    let found: Value = serde_json::from_str(text)?;
    let value = |metric: &Metric| {
        let value = found.get(key(*metric)).and_then(Value::as_f64);
        Ok((*metric, value.ok_or_else(|| format!("a worker found no {}: {found}", metric.name))?))
    };
    metrics.iter().map(value).collect()
}

fn key(metric: Metric) -> String {
    format!("{} {}", metric.name, metric.unit)
}

/// The plan as a line for competitors.
pub(crate) fn plan_line(plan: Plan) -> String {
    format!("{} {} {}", plan.start, plan.end, plan.hold.as_nanos())
}

/// What competitors in a process wrote: the holds of each, and the CPU time that they used from start to end.
pub(crate) fn parse_contenders(text: &str) -> Result<(Vec<Vec<Hold>>, u64)> {
    let (mut all, mut holds) = (Vec::new(), Vec::new());
    for line in text.lines() {
        if let Some(cpu) = line.strip_prefix(CPU) {
            all.push(holds);
            return Ok((all, cpu.parse()?));
        }
        match line {
            NEXT => all.push(std::mem::take(&mut holds)),
            _ => holds.push(line.parse()?),
        }
    }
    Err("a worker's output ended early".into())
}

fn contend(kind: Kind, url: &str) -> Result<()> {
    if !kind.is_ours() {
        let waiter = Bare::new(kind, url)?;
        let plan = start_of_plan()?;
        let used = machine::cpu_time();
        let holds = waiter.compete(plan, kind.rest(plan.hold))?;
        return say(&holds, machine::cpu_time() - used);
    }
    runtime()?.block_on(async {
        // As `clinch run` does it: one thread for everything.
        let locks = Locks::connect(url, Env::host(Lane::here()?)).await?;
        let mutex = locks.mutex(NAME)?;
        let plan = start_of_plan()?;
        let used = machine::cpu_time();
        let holds = Waiter::Ours(mutex).compete(plan, kind.rest(plan.hold)).await?;
        say(&holds, machine::cpu_time() - used)
    })
}

/// Says that all is ready, and hears what to do.
pub(crate) fn ready_for_a_line() -> Result<String> {
    println!("{READY}");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    Ok(line)
}

/// Says that all is ready, hears the plan, and sleeps until its start.
fn start_of_plan() -> Result<Plan> {
    let line = ready_for_a_line()?;
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
fn hold(kind: Kind, url: &str) -> Result<()> {
    if !kind.is_ours() {
        let mut holder = Bare::new(kind, url)?;
        let asked = now();
        holder.lock()?;
        wait_for_end(asked);
        return holder.unlock();
    }
    runtime()?.block_on(async {
        let locks = Locks::connect(url, Env::host(Lane::here()?)).await?;
        let mutex = locks.mutex(NAME)?;
        let asked = now();
        let guard = mutex.lock().await?;
        wait_for_end(asked);
        guard.release().await?;
        Ok::<_, Error>(())
    })
}

/// Waits for the lock until somebody kills this process.
fn queue(kind: Kind, url: &str) -> Result<()> {
    let got = wait(kind, url, || {
        println!("{READY}");
        Ok(())
    })?;
    Err(format!("a waiter that should have been killed got the lock at {got}").into())
}

/// Waits for the lock, releases it, and says when it was granted. `asking` is called right before it is asked for.
pub(crate) fn wait(kind: Kind, url: &str, asking: impl FnOnce() -> Result<()>) -> Result<u64> {
    if kind == Kind::GoMutex {
        let waiter = Worker::start("wait", kind, url)?;
        asking()?;
        return Ok(waiter.output()?.trim().parse()?);
    }
    if !kind.is_ours() {
        let mut waiter = Bare::new(kind, url)?;
        asking()?;
        waiter.lock()?;
        let got = now();
        waiter.unlock()?;
        return Ok(got);
    }
    runtime()?.block_on(async {
        let locks = clinch::connect(url).await?;
        let mutex = locks.mutex(NAME)?;
        asking()?;
        let guard = mutex.lock().await?;
        let got = now();
        guard.release().await?;
        Ok(got)
    })
}

/// Says that the lock is held, and between which moments it was taken; returns when stdin ends.
fn wait_for_end(asked: u64) {
    println!("{READY}\n{asked} {}", now());
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
        assert_eq!(parse_contenders("1 2 3\ncpu 7\n").unwrap(), (vec![vec![hold]], 7));
        let two = parse_contenders("next\n1 2 3\ncpu 7\n").unwrap();
        assert_eq!(two, (vec![vec![], vec![hold]], 7), "the first got nothing");
        assert!(parse_contenders("1 2 3\n").is_err(), "the last line is missing");
        assert!(parse_contenders("1 2\ncpu 7\n").is_err());
    }
}
