//! The environments of other processes, read by another thread: the kernel has who reads one wait for the memory of that process, without a
//! bound if a part of it is stuck on storage that hangs.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::Pid;

use super::stat::Stat;
use super::sys;

/// How long an answer may take that takes microseconds, on a host where threads have to wait for their turn.
const PATIENTLY: Duration = Duration::from_millis(100);

/// As above, while some are stuck: there may be many.
const BRIEFLY: Duration = Duration::from_millis(10);

/// Threads that may be stuck at once. Of whom else it cannot be told, either.
const STUCK: usize = 64;

/// The environment of a process. `None`: it is just becoming another, and has none yet, or is stuck.
pub(crate) fn environment(pid: Pid) -> Option<Vec<u8>> {
    static READER: LazyLock<Mutex<Reader>> = LazyLock::new(|| Mutex::new(Reader::new(read)));
    READER.lock().unwrap_or_else(PoisonError::into_inner).read(pid)
}

fn read(pid: Pid) -> Option<Vec<u8>> {
    let read = |of: &Path| fs::read(of.join("environ")).ok().filter(|environment| !environment.is_empty());
    let own = format!("/proc/{pid}");
    // Its first thread may have ended, and the others have it.
    let threads = || fs::read_dir(format!("{own}/task")).into_iter().flatten().flatten();
    let environment = read(Path::new(&own)).or_else(|| threads().find_map(|thread| read(&thread.path())));
    let environment = environment.unwrap_or_default();
    // Nor has one that has ended, which has no open files either; or who was started with none, which has a place for it.
    let is_whole = !environment.is_empty()
        || fs::read_link(format!("/proc/{pid}/exe")).is_err()
        || Stat::of(pid).is_none_or(|stat| stat.has_empty_environment);
    is_whole.then_some(environment)
}

type Read = fn(Pid) -> Option<Vec<u8>>;

/// Who reads, and who is stuck.
struct Reader {
    read: Read,
    ready: Option<Worker>,
    stuck: HashMap<Pid, Worker>,
}

/// A thread that reads one after another, until this is dropped.
struct Worker {
    ask: Sender<Pid>,
    hear: Receiver<Option<Vec<u8>>>,
}

impl Reader {
    fn new(read: Read) -> Reader {
        Reader { read, ready: None, stuck: HashMap::new() }
    }

    fn read(&mut self, pid: Pid) -> Option<Vec<u8>> {
        // What came too late may be old.
        self.stuck.retain(|_, worker| matches!(worker.hear.try_recv(), Err(TryRecvError::Empty)));
        if self.stuck.contains_key(&pid) || self.stuck.len() >= STUCK {
            return None;
        }
        let Some(worker) = self.ready.take().or_else(|| Worker::start(self.read)) else {
            // No thread can be had. To be stuck is rare.
            return (self.read)(pid);
        };
        let patience = if self.stuck.is_empty() { PATIENTLY } else { BRIEFLY };
        // Its thread ends with it only.
        let _ = worker.ask.send(pid);
        let answer = worker.hear.recv_timeout(patience);
        match answer {
            Ok(answer) => {
                self.ready = Some(worker);
                answer
            }
            Err(_) => {
                self.stuck.insert(pid, worker);
                None
            }
        }
    }
}

impl Worker {
    fn start(read: Read) -> Option<Worker> {
        let (ask, asked) = channel();
        let (tell, hear) = channel();
        let work = move || {
            for pid in asked {
                if tell.send(read(pid)).is_err() {
                    break;
                }
            }
        };
        sys::start_deaf(work).ok().map(|()| Worker { ask, hear })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};

    use super::*;

    /// One process that is stuck keeps its job's lock for ever, and makes its wrapper deaf.
    #[test]
    fn who_is_stuck_keeps_nobody() {
        static STUCK: (Mutex<bool>, Condvar) = (Mutex::new(true), Condvar::new());
        let read = |pid: Pid| {
            if pid.is_init() {
                drop(STUCK.1.wait_while(STUCK.0.lock().unwrap(), |stuck| *stuck).unwrap());
            }
            Some(pid.to_string().into_bytes())
        };
        let mut reader = Reader::new(read);
        let [stuck, other] = [Pid::INIT, Pid::from_raw(2).unwrap()];
        assert_eq!((reader.read(stuck), reader.read(stuck)), (None, None));
        // On a busy host, it may take longer than we wait once.
        while reader.read(other).is_none() {}
        assert!(reader.stuck.contains_key(&stuck));
        *STUCK.0.lock().unwrap() = false;
        STUCK.1.notify_all();
        while reader.read(stuck).is_none() {}
        assert!(!reader.stuck.contains_key(&stuck));
    }
}
