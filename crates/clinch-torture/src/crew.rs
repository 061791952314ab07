//! The workers as their parent sees them: started, told what to do, heard, buried.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::cells::{Cells, Fault, Step};
use crate::harm::Harm;
use crate::log::Log;
use crate::say::now;
use crate::worker::Job;

/// How long a worker may take to end once it was told to, whoever is ahead of it.
const END: Duration = Duration::from_secs(150);

/// Between two looks at what the workers say.
const TICK: Duration = Duration::from_millis(10);

/// A worker process. Dropping it kills it.
#[derive(Debug)]
struct Worker {
    name: String,
    child: Child,
    /// What it said that it would do to itself, and when.
    dying: Option<u64>,
    told_to_end: bool,
    closed: bool,
}

impl Worker {
    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn tell(&mut self, line: &str) {
        // One that is dead is noticed elsewhere.
        let _ = self.child.stdin.as_mut().map(|stdin| writeln!(stdin, "{line}"));
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A line of the worker with this number, or its end.
type Said = (u64, Option<String>);

/// How a worker has left.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Left {
    Killed(u32),
    Closed(u32),
}

/// All workers of a round.
#[derive(Debug)]
pub(crate) struct Crew {
    job: Job,
    log: Log,
    workers: Vec<(u64, Worker)>,
    started: u64,
    said: Receiver<Said>,
    say: Sender<Said>,
    pub(crate) cells: Cells,
    pub(crate) odd: Vec<String>,
    /// What steps there are, once a worker has said so.
    pub(crate) steps: Vec<Step>,
    pub(crate) left: Vec<Left>,
}

impl Crew {
    /// Starts so many workers. `job` is what they have in common.
    pub(crate) fn start(job: Job, log: Log, workers: usize) -> Crew {
        let (say, said) = channel();
        let mut crew = Crew {
            job,
            log,
            workers: Vec::new(),
            started: 0,
            said,
            say,
            cells: Cells::default(),
            odd: Vec::new(),
            steps: Vec::new(),
            left: Vec::new(),
        };
        (0..workers).for_each(|_| crew.start_one());
        crew
    }

    fn start_one(&mut self) {
        self.started += 1;
        let number = self.started;
        let name = format!("w{number}");
        let (process, seed) = (name.clone(), self.job.seed ^ number << 32);
        let job = Job { process, seed, steady: self.job.steady && number == 1, ..self.job.clone() };
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(job.words())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process can be started");
        let stdout = BufReader::new(child.stdout.take().expect("it is piped"));
        let (say, pid) = (self.say.clone(), child.id());
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some(time) = stop_in(&line) {
                    // Nobody else could have it go on.
                    std::thread::spawn(move || {
                        std::thread::sleep(time);
                        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
                        let _ = pid.map(|pid| kill_process(pid, Signal::CONT));
                    });
                }
                let _ = say.send((number, Some(line)));
            }
            let _ = say.send((number, None));
        });
        let worker = Worker { name, child, dying: None, told_to_end: false, closed: false };
        self.workers.push((number, worker));
    }

    /// Tells a worker of harm that it is to do to itself.
    pub(crate) fn harm(&mut self, harm: Harm, which: u64) {
        if let Some(worker) = self.choose(which) {
            worker.tell(&harm.order());
        }
    }

    /// Tells a worker to end; another takes its place.
    pub(crate) fn retire(&mut self, which: u64) {
        if let Some(worker) = self.choose(which) {
            worker.told_to_end = true;
            worker.tell("end");
        }
    }

    /// One of those who are not to last, unless there is no other.
    fn choose(&mut self, which: u64) -> Option<&mut Worker> {
        let alone = self.workers.len() == 1;
        let mut some: Vec<_> = self.workers.iter_mut().filter(|(number, _)| alone || *number > 1).collect();
        if some.is_empty() {
            return None;
        }
        let (_, worker) = some.swap_remove(usize::try_from(which % some.len() as u64).ok()?);
        Some(worker)
    }

    /// Hears what was said for a moment, and replaces whoever is gone.
    pub(crate) fn tend(&mut self, replace: bool) {
        let until = Instant::now() + TICK;
        while let Ok((number, line)) = self.said.recv_timeout(until.saturating_duration_since(Instant::now()))
        {
            match line {
                Some(line) => self.hear(number, &line),
                None => {
                    self.bury(number);
                    if replace {
                        self.start_one();
                    }
                }
            }
        }
    }

    fn hear(&mut self, number: u64, line: &str) {
        let Some((_, worker)) = self.workers.iter_mut().find(|(other, _)| *other == number) else { return };
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "ready" => self.steps = rest.split(' ').filter_map(Step::from_word).collect(),
            "closed" => worker.closed = true,
            "odd" => self.odd.push(format!("{}: {rest}", worker.name)),
            _ => {
                let Some(fault) = Fault::from_word(word) else {
                    return self.odd.push(format!("{} said \"{line}\"", worker.name));
                };
                let mut words = rest.split(' ');
                let (step, at) = (words.next().and_then(Step::from_word), words.nth(1));
                if let Some(step) = step {
                    self.cells.add(fault, step, 1);
                }
                let text = format!("{} {line}", worker.name);
                self.log.note(&text, now());
                if fault == Fault::Kill {
                    worker.dying = at.and_then(|at| at.parse().ok());
                }
            }
        }
    }

    /// Notes how a process that has ended came to that.
    fn bury(&mut self, number: u64) {
        let Some(index) = self.workers.iter().position(|(other, _)| *other == number) else { return };
        let (_, mut worker) = self.workers.remove(index);
        let status = worker.child.wait();
        match (worker.closed, worker.dying) {
            (true, _) => self.left.push(Left::Closed(worker.pid())),
            (false, Some(before)) => {
                self.log.crash(&worker.name, before, now());
                self.left.push(Left::Killed(worker.pid()));
            }
            (false, None) => {
                self.log.crash(&worker.name, 0, now());
                self.left.push(Left::Killed(worker.pid()));
                self.odd.push(format!("{} ended by itself: {status:?}", worker.name));
            }
        }
    }

    /// Lets all end, and waits until they have.
    pub(crate) fn end(&mut self, mut meanwhile: impl FnMut(&mut Crew)) {
        for (_, worker) in self.workers.iter_mut().filter(|(_, worker)| !worker.told_to_end) {
            worker.told_to_end = true;
            worker.tell("end");
        }
        let until = Instant::now() + END;
        while !self.workers.is_empty() && Instant::now() < until {
            self.tend(false);
            meanwhile(self);
        }
        for (_, mut worker) in std::mem::take(&mut self.workers) {
            self.odd.push(format!("{} does not end within {END:?} after the last fault", worker.name));
            let before = now();
            let _ = worker.child.kill();
            let _ = worker.child.wait();
            self.log.crash(&worker.name, before, now());
            self.left.push(Left::Killed(worker.pid()));
        }
    }
}

/// For how long a worker that says so is stopped.
fn stop_in(line: &str) -> Option<Duration> {
    let ms = line.strip_prefix("stop ")?.split(' ').nth(1)?;
    ms.parse().ok().map(Duration::from_millis)
}
