//! What drives a connection: commands of many callers go out together, and answers come back in their order.
//!
//! A caller that finds few commands unanswered writes by itself, which saves the way over another task; in a crowd,
//! commands are left to the driver, which lets others run first and writes all that have come together at once, unless
//! there is enough for the server to do already. Reading is the driver's alone. Nothing here waits for longer than it takes
//! to see that the server does not answer.

mod silence;

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, ReadHalf, WriteHalf};
use tokio::sync::{Notify, oneshot};

use self::silence::{Looks, Turns, watch};
use super::failure::Failure;
use super::resp::{Command, Nonsense, Reader, Value};
use crate::clock::{Clock, Instant};
use crate::env::Env;
use crate::net::Stream;
use crate::process::Process;
use crate::sync::{lock, try_lock};

/// For how long a command may lie here until it is written. The runtime that drives a connection may stand still for minutes,
/// as one does that is only used to block on: what it wrote then would find the graves of its claims gone. So the connection
/// is ended instead.
pub(super) const HELD_BACK: Duration = Duration::from_secs(5);

/// From how many unanswered commands on they are gathered: a write for each costs more than the wait for the others.
pub(super) const CROWD: usize = 4;

/// From how many gathered commands on they are written, although more may come: the server then works while others here
/// still run. With all of a crowd in one write, the two would take turns.
const ENOUGH: usize = 6;

/// What is read at a time, at first, in bytes.
const BUFFER: usize = 8 << 10;

/// What a connection does with messages that are no answers. False ends the connection.
pub(super) type Pushes = Box<dyn Fn(&[Value]) -> bool + Send + Sync>;

/// What callers and the driver share.
pub(super) struct Wire {
    state: Mutex<State>,
    /// Locked for as long as somebody writes. Never locked by who holds `state`.
    writer: Mutex<Writer>,
    closed: AtomicBool,
    /// Whether anything came since the connection was looked at.
    heard: AtomicBool,
    looks: Looks,
    gone: Notify,
    clock: Clock,
    ended: Arc<OnceLock<Instant>>,
    process: Process,
}

#[derive(Default)]
struct State {
    /// Commands that nobody has begun to write.
    out: Vec<u8>,
    /// How many those are.
    gathered: usize,
    /// Since when the first of them lies there.
    since: Option<Instant>,
    /// Who waits for the answers to come, in their order.
    waiting: VecDeque<oneshot::Sender<Value>>,
    driver: Option<Waker>,
    /// Why the connection ended.
    why: Option<String>,
}

impl State {
    fn put(&mut self, command: &Command) -> oneshot::Receiver<Value> {
        command.write_to(&mut self.out);
        let (tell, answer) = oneshot::channel();
        self.waiting.push_back(tell);
        answer
    }
}

struct Writer {
    /// `None` when the connection has ended, so that nothing of it stays open for as long as somebody has the link.
    half: Option<WriteHalf<Box<dyn Stream>>>,
    /// Commands that are being written, and how much of them is.
    bytes: Vec<u8>,
    written: usize,
    /// Since when what is not wholly on its way lies here.
    since: Option<Instant>,
    clock: Clock,
}

impl Wire {
    /// Has the current runtime drive a connection. Messages that are no answers go to `pushes`.
    pub(super) fn open(stream: Box<dyn Stream>, pushes: Option<Pushes>, env: Env) -> Arc<Wire> {
        let (read, write) = tokio::io::split(stream);
        let wire = Arc::new(Wire {
            state: Mutex::default(),
            writer: Mutex::new(Writer {
                half: Some(write),
                bytes: Vec::new(),
                written: 0,
                since: None,
                clock: env.clock(),
            }),
            closed: AtomicBool::new(false),
            heard: AtomicBool::new(false),
            looks: Looks::default(),
            gone: Notify::new(),
            clock: env.clock(),
            ended: Arc::default(),
            process: env.process(),
        });
        // Not on the runtime that drives it, which may stand still.
        let watched = Arc::downgrade(&wire);
        if let Err(error) = env.lane().clone().run(move || watch(watched.clone(), env.clone())) {
            wire.end(&error.to_string());
        }
        wire.process.spawn(Driver {
            wire: wire.clone(),
            read,
            buffer: vec![0; BUFFER],
            from: 0,
            to: 0,
            reader: Reader::default(),
            turns: Turns::default(),
            gathering: false,
            answers: Vec::new(),
            told: Vec::new(),
            pushes,
        });
        wire
    }

    pub(super) fn is_open(&self) -> bool {
        !self.closed.load(Ordering::Acquire)
    }

    /// Puts commands in line, and sees to it that they are written.
    pub(super) fn send<const N: usize>(
        &self,
        commands: [&Command; N],
    ) -> Result<[oneshot::Receiver<Value>; N], Failure> {
        self.put(N, |state| commands.map(|command| state.put(command)))
    }

    /// As [`Wire::send`], of however many.
    pub(super) fn send_all(&self, commands: &[Command]) -> Result<Vec<oneshot::Receiver<Value>>, Failure> {
        if commands.is_empty() {
            return Ok(Vec::new());
        }
        self.put(commands.len(), |state| commands.iter().map(|command| state.put(command)).collect())
    }

    fn put<T>(&self, count: usize, put: impl FnOnce(&mut State) -> T) -> Result<T, Failure> {
        let mut state = lock(&self.state);
        if state.why.is_some() {
            drop(state);
            return Err(Failure::Cut { sent: false, why: self.why() });
        }
        let (quiet, first) = (state.waiting.len() < CROWD, state.out.is_empty());
        let answers = put(&mut state);
        if first {
            state.since = Some(self.clock.now());
        }
        state.gathered += count;
        let enough = state.gathered >= ENOUGH;
        // Whoever was first sees to what came after. A driver that never ran yet will.
        let driver = state.driver.clone().filter(|_| first || enough);
        drop(state);
        if let Some(driver) = driver {
            let writer = (quiet || enough).then(|| try_lock(&self.writer)).flatten();
            let written =
                writer.map(|mut writer| writer.write(&self.state, &mut Context::from_waker(&driver)));
            match written {
                Some(Poll::Ready(Err(error))) => self.end(&error.to_string()),
                Some(_) => {}
                None => driver.wake(),
            }
        }
        Ok(answers)
    }

    /// Ends the connection, for the first reason that is given.
    pub(super) fn end(&self, why: &str) {
        if self.process.is_left() {
            // A forked child has no more of it than this word: the rest is its parent's, or may be locked for ever.
            self.closed.store(true, Ordering::Release);
            return;
        }
        let (waiting, driver) = {
            let mut state = lock(&self.state);
            state.why.get_or_insert_with(|| why.to_owned());
            self.closed.store(true, Ordering::Release);
            let _ = self.ended.set(self.clock.now());
            (std::mem::take(&mut state.waiting), state.driver.take())
        };
        drop(waiting);
        self.gone.notify_waiters();
        let mut writer = lock(&self.writer);
        let held_back = writer.held_back_too_long();
        // Under TLS the farewell takes along what lies there.
        if let Some(mut half) = writer.half.take().filter(|_| !held_back) {
            // The server is told at once, not when the driver is polled next: it must not go on talking to nobody.
            let _ = Pin::new(&mut half).poll_shutdown(&mut Context::from_waker(Waker::noop()));
        }
        drop(writer);
        if let Some(driver) = driver {
            driver.wake();
        }
    }

    /// Where it will stand when the connection ended.
    pub(super) fn ended(&self) -> Arc<OnceLock<Instant>> {
        self.ended.clone()
    }

    /// Waits until the connection is gone.
    pub(super) async fn gone(&self) {
        loop {
            let mut gone = std::pin::pin!(self.gone.notified());
            gone.as_mut().enable();
            if !self.is_open() {
                return;
            }
            gone.await;
        }
    }

    /// Why the connection ended.
    pub(super) fn why(&self) -> String {
        lock(&self.state).why.clone().unwrap_or_default()
    }
}

impl Writer {
    /// Writes what there is to write, as far as the server takes it.
    fn write(&mut self, state: &Mutex<State>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            if self.held_back_too_long() {
                return Poll::Ready(Err(io::Error::other("what was to be sent lay there for too long")));
            }
            let Some(half) = &mut self.half else {
                return Poll::Ready(Err(io::ErrorKind::NotConnected.into()));
            };
            while let Some(bytes @ [_, ..]) = self.bytes.get(self.written..) {
                match ready!(Pin::new(&mut *half).poll_write(cx, bytes))? {
                    0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                    count => self.written += count,
                }
            }
            if !self.bytes.is_empty() {
                // Under TLS it may lie there still.
                ready!(Pin::new(&mut *half).poll_flush(cx))?;
                self.bytes.clear();
                self.written = 0;
            }
            {
                let mut state = lock(state);
                std::mem::swap(&mut self.bytes, &mut state.out);
                state.gathered = 0;
                self.since = state.since.take();
            }
            if self.bytes.is_empty() {
                return Poll::Ready(Ok(()));
            }
        }
    }

    fn held_back_too_long(&self) -> bool {
        self.since.is_some_and(|since| self.clock.now().since(since) > HELD_BACK)
    }
}

/// Reads answers, and writes what callers leave to it, until the connection ends.
struct Driver {
    wire: Arc<Wire>,
    read: ReadHalf<Box<dyn Stream>>,
    buffer: Vec<u8>,
    /// What of the buffer was read and not yet taken for an answer.
    from: usize,
    to: usize,
    reader: Reader,
    turns: Turns,
    /// Whether it let others run before it writes.
    gathering: bool,
    /// Answers on their way to who waits for them; empty between two polls.
    answers: Vec<Value>,
    told: Vec<(oneshot::Sender<Value>, Value)>,
    pushes: Option<Pushes>,
}

impl Future for Driver {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let driver = self.get_mut();
        let crowded = {
            let mut state = lock(&driver.wire.state);
            match &mut state.driver {
                Some(waker) => waker.clone_from(cx.waker()),
                none => *none = Some(cx.waker().clone()),
            }
            !state.out.is_empty() && state.waiting.len() >= CROWD
        };
        if !driver.wire.is_open() {
            return Poll::Ready(());
        }
        let read = driver.read(cx);
        if read.is_pending() {
            driver.turns.read_in_vain(&driver.wire.looks, cx);
        }
        let written = if crowded && !driver.gathering && read.is_pending() {
            // Whoever else is ready runs first, so that what they ask for goes out in the same write.
            driver.gathering = true;
            cx.waker().wake_by_ref();
            Poll::Pending
        } else {
            driver.gathering = false;
            lock(&driver.wire.writer).write(&driver.wire.state, cx)
        };
        match (read, written) {
            (Poll::Ready(Err(error)), _) | (_, Poll::Ready(Err(error))) => {
                driver.wire.end(&error.to_string());
                Poll::Ready(())
            }
            _ => Poll::Pending,
        }
    }
}

impl Drop for Driver {
    /// Also when its runtime ends.
    fn drop(&mut self) {
        self.wire.end("its runtime ended");
    }
}

impl Driver {
    /// Reads for as long as there is something to read; ready only when the connection has ended.
    fn read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let Some(room) = self.buffer.get_mut(self.to..) else { return Poll::Pending };
            let mut room = ReadBuf::new(room);
            match Pin::new(&mut self.read).poll_read(cx, &mut room)? {
                Poll::Ready(()) if room.filled().is_empty() => {
                    return Poll::Ready(Err(io::Error::other("the server closed it")));
                }
                Poll::Ready(()) => self.to += room.filled().len(),
                Poll::Pending => return Poll::Pending,
            }
            self.wire.heard.store(true, Ordering::Relaxed);
            self.take_answers()?;
            self.make_room();
        }
    }

    fn make_room(&mut self) {
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        } else if self.to == self.buffer.len() {
            self.buffer.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
            if self.to > self.buffer.len() / 2 {
                self.buffer.resize(self.buffer.len() * 2, 0);
            }
        }
    }

    /// Hands on all answers and messages that are in the buffer.
    fn take_answers(&mut self) -> io::Result<()> {
        let mut bytes = self.buffer.get(self.from..self.to).unwrap_or_default();
        loop {
            match self.reader.read(&mut bytes) {
                Ok(Some(value)) => match (message(&value), &self.pushes) {
                    (Some(message), Some(pushes)) if pushes(message) => {}
                    (Some(_), Some(_)) => return Err(io::Error::other("it has nothing more to say")),
                    (Some(_), None) if matches!(value, Value::Push(_)) => {}
                    _ => self.answers.push(value),
                },
                Ok(None) => break,
                Err(Nonsense) => {
                    return Err(io::Error::other(
                        "what it sent is no answer of a Redis; is TLS wanted, or not?",
                    ));
                }
            }
        }
        self.from = self.to - bytes.len();
        if self.answers.is_empty() {
            return Ok(());
        }
        {
            let mut state = lock(&self.wire.state);
            for answer in self.answers.drain(..) {
                let teller = state.waiting.pop_front();
                let teller = teller.ok_or_else(|| io::Error::other("it answered what nobody asked"))?;
                self.told.push((teller, answer));
            }
        }
        for (teller, answer) in self.told.drain(..) {
            // Whoever asked may have left.
            let _ = teller.send(answer);
        }
        Ok(())
    }
}

/// What the server says by itself, which is not the answer to a command. In protocol 2 it comes as a list; that a
/// subscription has begun is an answer in both.
fn message(value: &Value) -> Option<&[Value]> {
    let (Value::Push(parts) | Value::List(parts)) = value else { return None };
    let kind = parts.first()?.text()?;
    match value {
        Value::Push(_) => (!matches!(kind, "subscribe" | "ssubscribe")).then_some(parts),
        _ => matches!(kind, "message" | "smessage" | "unsubscribe" | "sunsubscribe").then_some(parts),
    }
}
