//! What the tests of the command line share: a store in a temporary directory, processes that do not outlive a test, and
//! polling under a generous deadline.

#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

pub mod pty;
pub mod terminal;

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use clinch_testkit::{Etcd, Redis};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// How long anything may take that is expected to happen.
const DEADLINE: Duration = Duration::from_secs(30);

/// For bash: closes all that was inherited, as ssh does at its start.
pub const CLOSE: &str =
    "for fd in /proc/$$/fd/*; do fd=${fd##*/}; [ $fd -lt 3 ] || eval \"exec $fd>&-\"; done;";

/// A store of its own. Processes whose ids stand in `*.pid` files of the directory are killed at the end.
pub struct World {
    dir: tempfile::TempDir,
    /// The store's, where it is not in the directory.
    url: Option<String>,
}

impl World {
    pub fn new() -> World {
        World { dir: tempfile::tempdir().unwrap(), url: None }
    }

    /// Where a reboot leaves what is there, unlike `/tmp` on many hosts.
    pub fn on_disk() -> World {
        World { dir: tempfile::tempdir_in("/var/tmp").unwrap(), url: None }
    }

    /// On a server's store.
    pub fn on(url: String) -> World {
        World { dir: tempfile::tempdir().unwrap(), url: Some(url) }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn url(&self) -> String {
        self.url.clone().unwrap_or_else(|| format!("file://{}", self.path("store").display()))
    }

    /// `clinch` with these arguments, in the directory, on the store; as a login shell would start it.
    pub fn clinch<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Command {
        // Test runners may run with signals ignored, which is inherited.
        let mut command = Command::new("env");
        command.arg("--default-signal").arg(env!("CARGO_BIN_EXE_clinch")).args(args);
        command.current_dir(self.dir.path()).stdin(Stdio::null());
        command.env("CLINCH_URL", self.url()).env("CLINCH", env!("CARGO_BIN_EXE_clinch"));
        for held in ["CLINCH_HELD", "CLINCH_NAME", "CLINCH_TOKEN", "CLINCH_CLAIM", "SHELL"] {
            command.env_remove(held);
        }
        command
    }

    /// Runs it to its end.
    pub fn output<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Output {
        self.clinch(args).output().unwrap()
    }

    /// Runs it to its end for its exit code.
    pub fn code<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> i32 {
        self.output(args).status.code().expect("ended by a signal")
    }

    /// Starts it.
    pub fn start<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Running {
        Running(self.clinch(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// `clinch ls --json`.
    pub fn list(&self) -> Vec<Value> {
        locks(&self.output(["ls", "--json"]).stdout)
    }

    /// The claims on a lock in this state.
    pub fn claims(&self, name: &str, state: &str) -> Vec<Value> {
        let locks = self.list().into_iter().filter(|lock| lock["name"] == name);
        let claims = locks.flat_map(|lock| lock["claims"].as_array().unwrap().clone());
        claims.filter(|claim| claim["state"] == state).collect()
    }

    pub fn held(&self, name: &str) -> bool {
        !self.claims(name, "held").is_empty()
    }

    /// The text of a file; empty while there is none.
    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    pub fn lines(&self, name: &str) -> usize {
        self.read(name).lines().count()
    }

    pub fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    /// Makes a program of a file, which may be the one of that name. Another process writes it: a child that a test beside this one has just
    /// forked may have what we write open a little longer, and what is open for writing cannot be executed.
    pub fn install(&self, from: impl AsRef<Path>, name: &str) {
        let new = self.path(&format!("{name}.new"));
        let copied = Command::new("install").args(["-m", "755"]).arg(from.as_ref()).arg(&new).status();
        assert!(copied.expect("this test needs install of coreutils").success());
        std::fs::rename(new, self.path(name)).unwrap();
    }

    /// The events in a file.
    pub fn events(&self, name: &str) -> Vec<Value> {
        self.read(name).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Waits for a process id in a file.
    pub fn pid(&self, name: &str) -> i32 {
        eventually(&format!("{name} is written"), || self.read(name).ends_with('\n'));
        self.read(name).trim().parse().unwrap()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for entry in std::fs::read_dir(self.dir.path()).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "pid") {
                let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
                if let Ok(pid) = text.trim().parse() {
                    kill(pid, Signal::KILL);
                }
            }
        }
    }
}

/// A program that finds `$CLINCH` and the store, in the directory.
pub fn program(world: &World, words: &[&str]) -> Command {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).current_dir(world.path(".")).stdin(Stdio::null());
    command.env("CLINCH", env!("CARGO_BIN_EXE_clinch")).env("CLINCH_URL", world.url());
    command.env_remove("CLINCH_HELD");
    command
}

/// A program under a filter of system calls, of which these steps decide about one.
pub fn filtered(world: &World, call: u32, steps: &str, words: &[&str]) -> Command {
    let prctl = if cfg!(target_arch = "x86_64") { 157 } else { 167 };
    let filter = format!(
        r#"@steps = (0x20,0,0,0, 0x15,1,0,{call}, 0x06,0,0,0x7fff0000, {steps});
        $f = pack("SCCL" x (@steps / 4), @steps); $p = pack("S x6 P", @steps / 4, $f);
        syscall({prctl},38,1,0,0,0) == 0 && syscall({prctl},22,2,$p) == 0 or die; exec @ARGV"#
    );
    let mut filter = vec!["perl", "-e", &filter];
    filter.extend(words);
    program(world, &filter)
}

/// Those that are installed here; `sh` is everywhere.
pub fn shells() -> Vec<&'static str> {
    let is_there = |shell: &str| Command::new(shell).args(["-c", ":"]).status().is_ok_and(|s| s.success());
    let mut shells = vec!["sh"];
    shells.extend(["dash", "bash", "zsh", "ksh", "mksh"].into_iter().filter(|shell| is_there(shell)));
    shells
}

/// This process, to which a lock of `file://` may be bound.
pub fn us() -> String {
    std::process::id().to_string()
}

/// A process that does not outlive its test.
pub struct Running(pub Child);

impl Running {
    pub fn pid(&self) -> i32 {
        self.0.id() as i32
    }

    pub fn signal(&self, signal: Signal) {
        assert!(kill(self.pid(), signal), "the process is there");
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        eventually("the process ends", || {
            status = self.0.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    pub fn code(&mut self) -> i32 {
        self.wait().code().expect("ended by a signal")
    }

    /// Kills it alone, and lets what it has started be.
    pub fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Where the lock goes on with the job, that outlives a wrapper that is killed.
        let children = format!("/proc/{pid}/task/{pid}/children", pid = self.pid());
        let children = std::fs::read_to_string(children).unwrap_or_default();
        let _ = self.0.kill();
        let _ = self.0.wait();
        for child in children.split_whitespace().filter_map(|child| child.parse().ok()) {
            kill(child, Signal::KILL);
        }
    }
}

/// A process that keeps bytes of the file of a lock busy, as one that is stopped while it changes them.
pub fn keep_busy(world: &World, name: &str, from: u64, length: u64) -> Running {
    let keep = "import fcntl,sys
file=open(sys.argv[1],'r+b')
fcntl.lockf(file,fcntl.LOCK_EX,int(sys.argv[3]),int(sys.argv[2]))
print(flush=True)
sys.stdin.read()";
    let mut keep = Command::new("python3")
        .args(["-c", keep])
        .arg(world.path(&format!("store/{name}.lock")))
        .args([from.to_string(), length.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map(Running)
        .unwrap();
    assert_eq!(keep.0.stdout.as_mut().unwrap().read(&mut [0]).unwrap(), 1);
    keep
}

/// Runs it to its end: its exit code, and what it wrote.
pub fn said(world: &World, args: &[&str]) -> (Option<i32>, String, String) {
    let output = world.output(args.iter().copied());
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// `clinch show --json`.
pub fn shown(world: &World, name: &str) -> Value {
    serde_json::from_str(&said(world, &["show", "--json", name]).1).unwrap()
}

/// On files, Redis and etcd.
pub fn on_all(test: impl Fn(&World)) {
    test(&World::new());
    let redis = Redis::start();
    test(&World::on(redis.url()));
    drop(redis);
    let etcd = Etcd::start();
    test(&World::on(etcd.url()));
}

/// What `clinch ls --json` has listed.
pub fn locks(listed: &[u8]) -> Vec<Value> {
    let listed: Value = serde_json::from_slice(listed).unwrap();
    assert_eq!(listed["v"], 1);
    listed["locks"].as_array().unwrap().clone()
}

/// Sends a signal; says whether there was such a process.
pub fn kill(pid: i32, signal: Signal) -> bool {
    Pid::from_raw(pid).is_some_and(|pid| kill_process(pid, signal).is_ok())
}

/// The state letter of a process; `None` when there is none.
pub fn state(pid: i32) -> Option<char> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    String::from_utf8_lossy(&stat).rsplit_once(')')?.1.trim_start().chars().next()
}

/// Whether a process runs: there, and no zombie.
pub fn runs(pid: i32) -> bool {
    state(pid).is_some_and(|state| state != 'Z')
}

/// Waits until something is so.
pub fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < DEADLINE, "within {DEADLINE:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// How many parts a large job has: more than are met in one turn.
pub const MANY: usize = 300;

/// A job that starts so many, of which each says when it is told to end, and ends by that; and does this itself then.
pub fn large_job(itself: &str) -> String {
    format!(
        "import os,signal
def say(to): os.write(os.open(to,os.O_WRONLY|os.O_APPEND|os.O_CREAT,0o666),b'%d\\n'%os.getpid())
def told(*_): say('told'); os._exit(0)
signal.signal(signal.SIGTERM,told)
for i in range({MANY}):
    if os.fork()==0:
        say('begun')
        while True: signal.pause()
{itself}
open('job.pid','w').write(str(os.getpid())+'\\n')
while True: signal.pause()"
    )
}

/// Ends what is left of one.
pub fn end_large_job(world: &World) {
    for part in world.read("begun").lines().filter_map(|part| part.parse().ok()).filter(|part| runs(*part)) {
        kill(part, Signal::KILL);
    }
}
