//! A server process that cannot outlive the test process.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::wait::until;

/// Starts the server, tells its pid, and waits on its own standard input: a line means "kill the server", the end
/// of the pipe means that the test process is gone and that nobody else will remove the directory.
///
/// The shell does not reap the server before it has killed it, so the pid cannot have become another process's.
const SUPERVISOR: &str = r#"
dir=$1; log=$2; shift 2
"$@" </dev/null >>"$log" 2>&1 &
pid=$!
trap '' HUP INT TERM
echo "$pid"
if read -r _; then end=; else end=orphaned; fi
kill -9 "$pid"
wait "$pid"
[ -z "$end" ] || rm -rf -- "$dir"
"#;

/// A new directory for a server, with a short path: that of a Unix socket in it is limited to 107 bytes.
pub fn temp_dir() -> TempDir {
    tempfile::Builder::new().prefix("clinch-kit-").tempdir_in("/tmp").expect("/tmp can be written")
}

/// Lines of a log that a panic shows.
const TAIL: usize = 30;

/// A server process with a directory of its own; dropping it kills the server and removes the directory.
///
/// When the test process ends in any other way, a supervisor does the same.
#[derive(Debug)]
pub struct Process {
    command: Vec<OsString>,
    log: PathBuf,
    running: Mutex<Option<Running>>,
    dir: TempDir,
}

#[derive(Debug)]
struct Running {
    supervisor: Child,
    pid: Pid,
}

impl Process {
    /// Starts `command` in `dir`; what it prints goes to a file there.
    pub fn start<S: AsRef<OsStr>>(dir: TempDir, command: impl IntoIterator<Item = S>) -> Process {
        let command = command.into_iter().map(|word| word.as_ref().to_owned()).collect();
        let process = Process { command, log: dir.path().join("log"), running: Mutex::new(None), dir };
        process.restart();
        process
    }

    /// The directory, in which the process runs.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The id of the process; panics when it was killed.
    pub fn pid(&self) -> u32 {
        self.running().as_ref().expect("it was killed").pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Whether the process runs; a paused one does, one that ended by itself does not.
    pub fn is_running(&self) -> bool {
        self.running().as_ref().is_some_and(|running| !matches!(running.state(), None | Some('Z' | 'X')))
    }

    /// Whether the process stands still since [`pause`](Process::pause).
    pub fn is_paused(&self) -> bool {
        self.running().as_ref().is_some_and(|running| running.state() == Some('T'))
    }

    /// Kills the process with SIGKILL and waits until it is gone. Does nothing when it was killed before.
    pub fn kill(&self) {
        if let Some(running) = self.running().take() {
            running.kill();
        }
    }

    /// Stops the process with SIGSTOP and waits until it stands still.
    pub fn pause(&self) {
        let running = self.running();
        let running = running.as_ref().expect("it was killed");
        kill_process(running.pid, Signal::STOP).expect("it can be paused");
        until("the process stands still", || running.state() == Some('T'));
    }

    /// Lets a paused process go on.
    pub fn resume(&self) {
        let running = self.running();
        kill_process(running.as_ref().expect("it was killed").pid, Signal::CONT).expect("it can be resumed");
    }

    /// Kills the process if it runs, and starts it again with the same command, in the same directory.
    pub fn restart(&self) {
        let mut running = self.running();
        if let Some(running) = running.take() {
            running.kill();
        }
        *running = Some(Running::start(self.dir.path(), &self.log, &self.command));
    }

    /// The last lines of what the process printed.
    pub fn log_tail(&self) -> String {
        let log = std::fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(TAIL)..].join("\n")
    }

    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Running {
    fn start(dir: &Path, log: &Path, command: &[OsString]) -> Running {
        // In a process group of its own, Ctrl-C and `timeout` of the tests do not reach it.
        let mut supervisor = Command::new("sh")
            .args(["-c", SUPERVISOR, "sh"])
            .args([dir, log])
            .args(command)
            .current_dir(dir)
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("a shell can be started");
        let mut line = String::new();
        BufReader::new(supervisor.stdout.as_mut().expect("it is piped")).read_line(&mut line).expect("a pid");
        let pid = line.trim().parse().ok().and_then(Pid::from_raw).expect("a pid");
        Running { supervisor, pid }
    }

    /// The state as the kernel tells it, such as 'S' or 'Z'; none when there is no such process.
    fn state(&self) -> Option<char> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid.as_raw_nonzero())).ok()?;
        stat.rsplit_once(") ")?.1.chars().next()
    }

    fn kill(mut self) {
        let mut orders = self.supervisor.stdin.take().expect("it is piped");
        let _ = orders.write_all(b"kill\n");
        // Ends when the supervisor has reaped the server and ended itself.
        let _ = self.supervisor.stdout.take().expect("it is piped").read_to_end(&mut Vec::new());
        let _ = self.supervisor.wait();
    }
}
