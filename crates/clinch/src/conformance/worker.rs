//! Further processes of the test executable, which do what they are told and can be killed.
//!
//! The [`conformance!`](crate::conformance!) macro puts a test that does nothing by itself into every test executable that runs the suite;
//! a worker is that executable, started to run that one test. So there is no other program to build or to find, and the
//! worker is always as new as the test.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use tokio::sync::mpsc;

use super::client::{answered, lock, runtime, within};
use super::history::{Ask, Record, Workload, take, take_turns};
use crate::claim::Mode;
use crate::clock::Clock;
use crate::guard::Guard;
use crate::locks::{Locks, connect};

/// What the test that is a worker finds in its environment.
const URL: &str = "CLINCH_CONFORMANCE_URL";
const TTL_MS: &str = "CLINCH_CONFORMANCE_TTL_MS";

/// Begins the lines that are for the parent; the test harness prints others.
const MARK: &str = "@clinch ";

/// The module in which the macro stands, without the crate's name.
static MODULE: OnceLock<&'static str> = OnceLock::new();

/// Notes where the macro stands, from the path of one of its properties.
pub(super) fn remember(property_module: &'static str) {
    let _ = MODULE.set(property_module.rsplit_once("::conformance::").map_or("", |(module, _)| module));
}

/// The name of that test.
fn worker_test() -> String {
    let module = MODULE.get().copied().unwrap_or_default();
    match module.split_once("::") {
        Some((_, inner)) => format!("{inner}::clinch_worker"),
        None => "clinch_worker".to_owned(),
    }
}

/// A process that is told what to do line by line, and killed when dropped.
pub(super) struct Worker {
    child: Child,
    lines: mpsc::UnboundedReceiver<String>,
}

impl Worker {
    pub(super) fn start(url: &str, ttl: Duration) -> Worker {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &worker_test(), "--nocapture", "--test-threads=1"])
            .env(URL, url)
            .env(TTL_MS, ttl.as_millis().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = mpsc::unbounded_channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        // Ends with the pipe, that is with the process.
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some(line) = line.strip_prefix(MARK) {
                    let _ = sender.send(line.to_owned());
                }
            }
        });
        Worker { child, lines }
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn tell(&mut self, command: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{command}").unwrap();
    }

    /// Waits for a line that starts with this, and returns the rest of it.
    pub(super) async fn says(&mut self, start: &str) -> String {
        loop {
            let line = within(&format!("a worker says \"{start}\""), self.lines.recv()).await;
            let line = line.unwrap_or_else(|| panic!("a worker ended before it said \"{start}\""));
            if let Some(rest) = line.strip_prefix(start) {
                return rest.trim().to_owned();
            }
        }
    }

    /// SIGKILL; returns when the process is gone.
    pub(super) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What a worker does: the body of the test that the [`conformance!`](crate::conformance!) macro emits.
///
/// | line | effect |
/// | --- | --- |
/// | `hold`, name, mode, process, history; with tabs between | takes it in this mode, records that, says `holding` and holds it |
/// | `lock NAME` | says `waiting` if the lock is not free and waits for it, says `granted TOKEN` and holds it |
/// | `release` | releases it, says `released` |
/// | `work`, name, turns, process, history, store; with tabs between | contends, says `turn N` and at last `done` |
/// | `quit`, or the end of the input | ends, dropping what is held |
pub fn worker() {
    let Ok(url) = std::env::var(URL) else {
        eprintln!("this test is started by other tests, with {URL} set");
        return;
    };
    let ttl = Duration::from_millis(std::env::var(TTL_MS).unwrap().parse().unwrap());
    runtime().block_on(async {
        let locks = connect(&url).await.unwrap().ttl(ttl).unwrap();
        obey(&locks, ttl).await;
        locks.close(Duration::from_secs(10)).await.unwrap();
    });
}

async fn obey(locks: &Locks, ttl: Duration) {
    let mut held = None;
    // Reading blocks the runtime, on purpose: what is held is renewed nevertheless.
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        match line.split_once([' ', '\t']).unwrap_or((&line, "")) {
            ("lock", name) => {
                let mutex = locks.mutex(name).unwrap();
                let guard = match answered(async || mutex.try_lock().await).await.unwrap() {
                    Some(guard) => guard,
                    None => {
                        say("waiting");
                        lock(locks, name).await
                    }
                };
                say(&format!("granted {}", guard.token()));
                held = Some(guard);
            }
            ("release", _) => {
                if let Some(guard) = held.take() {
                    guard.release().await.unwrap();
                }
                say("released");
            }
            ("hold", job) => held = Some(hold(locks, job).await),
            ("work", job) => work(locks, ttl, job).await,
            _ => break,
        }
    }
}

async fn work(locks: &Locks, ttl: Duration, job: &str) {
    let job: Vec<_> = job.split('\t').collect();
    let [name, turns, process, history, store] = job[..] else { panic!("work needs five words") };
    let record = Record::files(Clock::host(), PathBuf::from(history), PathBuf::from(store));
    let asks = [Ask::Exclusive];
    let load = Workload { name, turns: turns.parse().unwrap(), ttl, asks: &asks, overstay: false };
    take_turns(&record, locks, process, load, |turn| say(&format!("turn {turn}"))).await;
    record.recorder.written().unwrap();
    say("done");
}

async fn hold(locks: &Locks, job: &str) -> Guard {
    let job: Vec<_> = job.split('\t').collect();
    let [name, ask, process, history] = job[..] else { panic!("hold needs four words") };
    let record = Record::files(Clock::host(), PathBuf::from(history), PathBuf::new());
    let (guard, _) = take(&record, locks, process, name, ask.parse::<Mode>().unwrap().into()).await;
    record.recorder.written().unwrap();
    say("holding");
    guard
}

fn say(line: &str) {
    // The harness prints on lines of its own; this starts a new one to be safe.
    println!("\n{MARK}{line}");
}
