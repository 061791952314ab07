//! Jobs under `clinch run`, whose wrappers are killed and stopped, and which are killed themselves: a job is dead before another is
//! granted its lock.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::cells::{Cells, Fault, Step};
use crate::crew::Left;
use crate::dice::{Deck, Dice};
use crate::job::Task;
use crate::log::Log;
use crate::operator::Order;
use crate::say::now;

/// What is done to wrappers and jobs, and how often nothing.
const FATES: &[Option<Fault>] =
    &[None, None, Some(Fault::KillWrapper), Some(Fault::StopWrapper), Some(Fault::KillJob)];

/// The locks of jobs and whether they share them.
const LOCKS: &[(&str, bool)] =
    &[("mutex-0", false), ("pair-0", false), ("rwlock-0", true), ("rwlock-1", false)];

/// Leases of jobs, in milliseconds.
const TTLS: &[u64] = &[1000, 2000, 2000, 5000, 30_000];

/// For how long a wrapper waits.
const WAIT: &str = "5s";

/// How long a run may take altogether: its wait, its job, and a release that is repeated for as long as the lease lasts.
const BOUND: Duration = Duration::from_secs(90);

/// Between two looks at a process.
const LOOK: Duration = Duration::from_millis(3);

/// The exit codes of a run that did as it should: its job's, not acquired, lost, out of reach, killed.
const CODES: &[i32] = &[0, 75, 79, 69, 128 + 9, 128 + 15];

/// Where runs happen.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) url: String,
    pub(crate) history: String,
    pub(crate) prefix: String,
    pub(crate) longest_ttl: Duration,
    pub(crate) longest_stop: u64,
    /// Whether there are readers.
    pub(crate) shared: bool,
    /// Whether leases end by themselves.
    pub(crate) expiry: bool,
}

/// What came of them.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    pub(crate) cells: Cells,
    pub(crate) odd: Vec<String>,
}

/// The command that wraps jobs, where it was built beside this program.
pub(crate) fn clinch() -> Option<PathBuf> {
    let path = std::env::current_exe().ok()?.with_file_name("clinch");
    path.exists().then_some(path)
}

/// Runs one job after the other until it is to stop.
pub(crate) fn run(
    place: &Place,
    log: &Log,
    mut dice: Dice,
    who: u64,
    orders: &Sender<Order>,
    stop: &AtomicBool,
) -> Runs {
    let mut runs = Runs::default();
    let Some(clinch) = clinch() else { return runs };
    let mut deck = Deck::new(FATES.to_vec());
    let mut number = 0;
    while !stop.load(Ordering::Acquire) {
        number += 1;
        std::thread::sleep(dice.ms(20, 300));
        let process = format!("j{who}.{number}");
        let fate = deck.deal(&mut dice);
        let (lock, shared) = *dice.pick(LOCKS);
        let shared = shared && place.shared;
        let ttl = Duration::from_millis(*dice.pick(TTLS)).min(place.longest_ttl);
        let task = Task {
            history: place.history.clone(),
            process: process.clone(),
            prefix: place.prefix.clone(),
            lock: lock.to_owned(),
            shared,
            ttl: place.expiry.then_some(ttl),
            hold: dice.ms(50, 2500),
            asked: now(),
        };
        let mut command = Command::new(&clinch);
        command
            .args(["-u", &place.url, "run", "--quiet", "-w", WAIT])
            .arg("--ttl")
            .arg(format!("{}ms", ttl.as_millis()));
        command.args(shared.then_some("--shared")).arg(log.lock_name(lock)).arg("--");
        command.arg(std::env::current_exe().expect("this program")).args(task.words());
        let mut run = Run::start(command, &process);
        if let Some(job) = run.has_begun() {
            if let Some(fault) = fate {
                std::thread::sleep(dice.ms(0, 400));
                run.harm(fault, job, dice.ms(300, place.longest_stop), log);
                runs.cells.add(fault, Step::Job, 1);
            }
            run.ends(log, Some(job), &mut runs.odd);
        } else {
            run.ends(log, None, &mut runs.odd);
        }
        let pid = run.wrapper.id();
        let left = if run.killed { Left::Killed(pid) } else { Left::Closed(pid) };
        let _ = orders.send(Order::Left(left));
    }
    runs
}

/// One run. Dropping it kills its wrapper.
struct Run {
    process: String,
    wrapper: Child,
    /// The job says its process id.
    said: Receiver<i32>,
    killed: bool,
    /// When the job was killed by us.
    job_killed: Option<u64>,
    until: Instant,
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.wrapper.kill();
        let _ = self.wrapper.wait();
    }
}

impl Run {
    fn start(mut command: Command, process: &str) -> Run {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut wrapper = command.spawn().expect("a process can be started");
        let stdout = BufReader::new(wrapper.stdout.take().expect("it is piped"));
        let (say, said) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let _ = line.parse::<i32>().map(|pid| say.send(pid));
            }
        });
        let until = Instant::now() + BOUND;
        Run { process: process.to_owned(), wrapper, said, killed: false, job_killed: None, until }
    }

    /// The job's process id, once it runs.
    fn has_begun(&mut self) -> Option<Pid> {
        self.said.recv_timeout(BOUND).ok().and_then(Pid::from_raw)
    }

    fn harm(&mut self, fault: Fault, job: Pid, time: Duration, log: &Log) {
        let wrapper = i32::try_from(self.wrapper.id()).ok().and_then(Pid::from_raw).expect("a process id");
        log.note(&format!("{fault} {}", self.process), now());
        match fault {
            Fault::KillJob => {
                self.job_killed = Some(now());
                let _ = kill_process(job, Signal::KILL);
            }
            Fault::StopWrapper => {
                let _ = kill_process(wrapper, Signal::STOP);
                std::thread::sleep(time);
                let _ = kill_process(wrapper, Signal::CONT);
            }
            _ => {
                self.killed = true;
                let _ = kill_process(wrapper, Signal::KILL);
            }
        }
    }

    /// Waits until wrapper and job have ended, and notes when that was seen.
    fn ends(&mut self, log: &Log, job: Option<Pid>, odd: &mut Vec<String>) {
        let status = loop {
            match self.wrapper.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if Instant::now() < self.until => std::thread::sleep(LOOK),
                other => return odd.push(format!("run {} does not end: {other:?}", self.process)),
            }
        };
        if let Some(job) = job {
            while is_alive(job) && Instant::now() < self.until {
                std::thread::sleep(LOOK);
            }
            match self.job_killed {
                Some(before) => log.crash(&self.process, before, now()),
                None => log.gone(&self.process, now()),
            }
            if is_alive(job) {
                odd.push(format!("the job of run {} outlives its wrapper", self.process));
            }
        }
        if !self.killed && !status.code().is_some_and(|code| CODES.contains(&code)) {
            odd.push(format!("run {} ended with {status}", self.process));
        }
    }
}

/// Whether a process still does anything.
fn is_alive(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    let state = stat.ok().and_then(|stat| stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()));
    !matches!(state, None | Some('Z' | 'X'))
}
