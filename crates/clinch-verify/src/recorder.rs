//! Recording a history from many threads and many processes.
//!
//! A recorder keeps events in memory, appends them to a file, or both. Each event is one `write` to a file opened
//! for appending, so that processes can share the file and a killed one takes nothing along that it had recorded. Of the event that it
//! is writing it may leave a part, which the reader leaves out.
//! Times come from the caller: what counts is when a request was about to be sent and when its answer was seen,
//! and only the caller was there.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::event::{Event, Kind, Mode, Op};
use crate::history::{History, to_line};

/// Records events; clones share one history.
#[derive(Debug, Clone)]
pub struct Recorder {
    shared: Arc<Shared>,
    error: u64,
}

#[derive(Debug)]
struct Shared {
    next_id: AtomicU64,
    sinks: Mutex<Sinks>,
}

#[derive(Debug, Default)]
struct Sinks {
    memory: Option<Vec<Event>>,
    file: Option<File>,
    /// The first failure to write; nothing is written to the file after it, so that no gap goes unnoticed.
    failure: Option<io::Error>,
}

impl Recorder {
    /// A recorder that keeps its events in memory.
    pub fn memory() -> Self {
        Self::with(Sinks { memory: Some(Vec::new()), ..Sinks::default() })
    }

    /// A recorder that appends to a file, which may be shared with other processes.
    ///
    /// Processes that share a file must have different names, since a call is known by process and id.
    ///
    /// # Errors
    ///
    /// Those of opening the file.
    pub fn file(path: impl AsRef<Path>) -> io::Result<Self> {
        Ok(Self::with(Sinks { file: Some(open(path.as_ref())?), ..Sinks::default() }))
    }

    /// A recorder that both keeps its events in memory and appends them to a file.
    ///
    /// # Errors
    ///
    /// As [`file`](Self::file).
    pub fn memory_and_file(path: impl AsRef<Path>) -> io::Result<Self> {
        Ok(Self::with(Sinks { memory: Some(Vec::new()), file: Some(open(path.as_ref())?), failure: None }))
    }

    fn with(sinks: Sinks) -> Self {
        let shared = Shared { next_id: AtomicU64::new(1), sinks: Mutex::new(sinks) };
        Recorder { shared: Arc::new(shared), error: 0 }
    }

    /// The same recorder with times that may be off by so many nanoseconds, either way.
    #[must_use]
    pub fn clock_error(mut self, ns: u64) -> Self {
        self.error = ns;
        self
    }

    /// One attempt of `process` to hold `lock`, under a claim id that no other attempt ever uses.
    pub fn claim(&self, process: &str, lock: &str, claim: &str, mode: Mode) -> ClaimRecorder {
        ClaimRecorder {
            recorder: self.clone(),
            process: process.to_owned(),
            lock: lock.to_owned(),
            claim: claim.to_owned(),
            mode,
            ttl_ms: None,
        }
    }

    /// Records that `process` was killed: call it after the kill, with the times before and after it.
    ///
    /// A kernel frees the locks of a killed process before its parent hears of it, so the time after it alone would
    /// accuse whoever is granted in between.
    pub fn crash(&self, process: &str, before: u64, after: u64) {
        self.record(Event {
            process: Some(process.to_owned()),
            from: Some(before),
            ..Event::new(Kind::Crash, after)
        });
    }

    /// Records a fenced store's decision about a write; call it inside the store's own critical section.
    pub fn store_write(&self, lock: &str, claim: Option<&str>, token: u64, accepted: bool, at: u64) {
        self.record(Event {
            lock: Some(lock.to_owned()),
            op: Some(Op::Write),
            claim: claim.map(str::to_owned),
            token: Some(token),
            accepted: Some(accepted),
            ..Event::new(Kind::Store, at)
        });
    }

    /// Records a remark for human readers, such as the fault being injected.
    pub fn note(&self, text: &str, at: u64) {
        self.record(Event { text: Some(text.to_owned()), ..Event::new(Kind::Note, at) });
    }

    /// Records an event of the caller's own making.
    pub fn record(&self, mut event: Event) {
        event.error = event.error.max(self.error);
        let mut sinks = self.sinks();
        if sinks.failure.is_none()
            && let Some(file) = &mut sinks.file
            && let Err(error) = append(file, &event)
        {
            sinks.failure = Some(error);
        }
        if let Some(memory) = &mut sinks.memory {
            memory.push(event);
        }
    }

    /// What was recorded in memory so far; empty for a recorder that only writes to a file.
    pub fn history(&self) -> History {
        self.sinks().memory.clone().unwrap_or_default().into()
    }

    /// Whether everything recorded so far reached the file.
    ///
    /// # Errors
    ///
    /// The first failure to write. It stays: later events are not in the file either.
    pub fn written(&self) -> io::Result<()> {
        match &self.sinks().failure {
            Some(error) => Err(io::Error::new(error.kind(), format!("history is incomplete: {error}"))),
            None => Ok(()),
        }
    }

    fn next_id(&self) -> u64 {
        self.shared.next_id.fetch_add(1, Ordering::Relaxed)
    }

    fn sinks(&self) -> MutexGuard<'_, Sinks> {
        // Each critical section leaves the sinks whole, so a panic elsewhere in a holder's thread spoils nothing.
        self.shared.sinks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

/// Not `write_all`: the rest of a short write could land behind another process's line.
fn append(file: &mut File, event: &Event) -> io::Result<()> {
    let line = to_line(event)?;
    if file.write(&line)? == line.len() {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::WriteZero, "an event was written in part"))
}

/// Records the life of one claim.
#[derive(Debug, Clone)]
pub struct ClaimRecorder {
    recorder: Recorder,
    process: String,
    lock: String,
    claim: String,
    mode: Mode,
    ttl_ms: Option<u64>,
}

impl ClaimRecorder {
    /// Says how long the store keeps the claim without renewal; without it, the claim ends with its process.
    #[must_use]
    pub fn ttl_ms(mut self, ttl_ms: u64) -> Self {
        self.ttl_ms = Some(ttl_ms);
        self
    }

    /// Records that the lock is about to be asked for.
    pub fn acquire(&self, at: u64) -> Call {
        self.invoke(Op::Acquire, at)
    }

    /// Records that a place in the queue is about to be asked for.
    pub fn enqueue(&self, at: u64) -> Call {
        self.invoke(Op::Enqueue, at)
    }

    /// Records that a renewal is about to be sent.
    pub fn renew(&self, at: u64) -> Call {
        self.invoke(Op::Renew, at)
    }

    /// Records that the holder was found to go by another deadline: it was renewed between the time at which it was last
    /// seen to hold and the time at which this was noticed.
    pub fn renewed_since(&self, held: u64, at: u64, deadline: Option<u64>) {
        let call = Call { claim: self.clone(), op: Op::Renew, id: self.recorder.next_id() };
        self.recorder.record(Event { from: Some(held.min(at)), deadline, ..call.event(Kind::Ok, at) });
    }

    /// Records that the holder lets go; from here on it does not claim to hold.
    pub fn release(&self, at: u64) -> Call {
        self.invoke(Op::Release, at)
    }

    /// Records that the holder lets go and asks for the lock to stay closed for a while.
    pub fn release_and_linger(&self, at: u64, linger_ms: u64) -> Call {
        self.call(Op::Release, at, Some(linger_ms))
    }

    /// Records that an exclusive holder is about to go on as a shared one.
    pub fn downgrade(&self, at: u64) -> Call {
        self.invoke(Op::Downgrade, at)
    }

    /// Records that the holder was told that it no longer holds.
    pub fn lost(&self, at: u64) {
        self.recorder.record(self.event(Kind::Lost, at));
    }

    /// Records that the holder was told that it no longer holds, between the time at which it was last seen to hold
    /// and the time at which this was noticed: a thread that is not scheduled notices late.
    pub fn lost_since(&self, held: u64, at: u64) {
        self.recorder.record(Event { from: Some(held.min(at)), ..self.event(Kind::Lost, at) });
    }

    fn invoke(&self, op: Op, at: u64) -> Call {
        self.call(op, at, None)
    }

    fn call(&self, op: Op, at: u64, linger_ms: Option<u64>) -> Call {
        let call = Call { claim: self.clone(), op, id: self.recorder.next_id() };
        self.recorder.record(Event { linger_ms, ..call.event(Kind::Invoke, at) });
        call
    }

    fn event(&self, kind: Kind, at: u64) -> Event {
        Event {
            process: Some(self.process.clone()),
            lock: Some(self.lock.clone()),
            claim: Some(self.claim.clone()),
            ..Event::new(kind, at)
        }
    }
}

/// A call whose outcome is to be recorded; without an outcome it stays open until the end of the history.
#[derive(Debug, Clone)]
pub struct Call {
    claim: ClaimRecorder,
    op: Op,
    id: u64,
}

impl Call {
    /// Records a grant: its fencing token and the deadline the holder goes by, where there are such.
    pub fn granted(&self, at: u64, token: Option<u64>, deadline: Option<u64>) {
        self.claim.recorder.record(Event { token, deadline, ..self.event(Kind::Ok, at) });
    }

    /// Records a successful renewal and the holder's new deadline; `None` when the deadline stays as it was.
    pub fn renewed(&self, at: u64, deadline: Option<u64>) {
        self.claim.recorder.record(Event { deadline, ..self.event(Kind::Ok, at) });
    }

    /// Records success without further news: queued, downgraded, or released.
    pub fn ok(&self, at: u64) {
        self.claim.recorder.record(self.event(Kind::Ok, at));
    }

    /// Records that the call surely had no effect; of a release, that nothing was held any more.
    pub fn fail(&self, at: u64) {
        self.claim.recorder.record(self.event(Kind::Fail, at));
    }

    /// Records that the outcome is unknown: the request may yet have been carried out.
    pub fn unknown(&self, at: u64) {
        self.claim.recorder.record(self.event(Kind::Unknown, at));
    }

    fn event(&self, kind: Kind, at: u64) -> Event {
        let asks = matches!(self.op, Op::Acquire | Op::Enqueue);
        let ttl_ms = self.claim.ttl_ms.filter(|_| asks || self.op == Op::Renew);
        Event {
            id: Some(self.id),
            op: Some(self.op),
            mode: match self.op {
                Op::Downgrade => Some(Mode::Shared),
                _ => asks.then_some(self.claim.mode),
            },
            ttl_ms,
            ..self.claim.event(kind, at)
        }
    }
}
