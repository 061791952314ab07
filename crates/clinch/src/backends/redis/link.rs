//! One live connection, and the watch that ends it when the server does not answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, Value};
use tokio::sync::Notify;

use super::failure::Failure;
use super::pool::Connection;
use super::settings::Address;
use crate::env::Env;

/// How often a connection is looked at. One that answered nothing between two looks, though it was asked, is ended: so a
/// server that hangs fails its commands after one to two of these. No timer per command.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A connection to one server, shared by everybody on one runtime.
pub(super) struct Link {
    connection: MultiplexedConnection,
    traffic: Arc<Traffic>,
    life: Arc<Life>,
    server: String,
}

#[derive(Default)]
struct Traffic {
    /// Commands whose answer somebody waits for.
    waiting: AtomicU64,
    /// Commands that were answered.
    answered: AtomicU64,
}

/// Whether a connection still lives, and how to end it.
#[derive(Default)]
pub(super) struct Life {
    closed: AtomicBool,
    close: Notify,
    gone: Notify,
}

impl Life {
    pub(super) fn is_open(&self) -> bool {
        !self.closed.load(Ordering::Acquire)
    }

    /// Ends the connection; whoever waits for an answer is told that it broke.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.close.notify_one();
        self.gone.notify_waiters();
    }

    /// Waits until somebody closes the connection. For its driver alone.
    pub(super) async fn closing(&self) {
        self.close.notified().await;
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
}

/// Says that a connection is gone when its driver is, also when that is because its runtime ended.
pub(super) struct Gone(pub(super) Arc<Life>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Link {
    /// Has the current runtime drive a connection.
    pub(super) fn new(
        connection: MultiplexedConnection,
        driver: impl Future<Output = ()> + Send + 'static,
        address: &Address,
        env: Env,
    ) -> Link {
        let (traffic, life) = (Arc::new(Traffic::default()), Arc::new(Life::default()));
        tokio::spawn(drive(driver, env, traffic.clone(), Gone(life.clone())));
        Link { connection, traffic, life, server: address.to_string() }
    }

    /// The server's address, for people.
    pub(super) fn server(&self) -> &str {
        &self.server
    }

    pub(super) fn life(&self) -> &Arc<Life> {
        &self.life
    }

    /// Sends one command.
    ///
    /// # Cancel safety
    ///
    /// The command may be applied or not; the connection stays in step.
    pub(super) async fn call(&self, command: &Cmd) -> Result<Value, Failure> {
        let waiting = Waiting::new(&self.traffic);
        let answer = self.connection.clone().send_packed_command(command).await;
        waiting.answered();
        Failure::check(answer)
    }

    /// Sends commands that nothing may come between, and gives the last `count` answers.
    pub(super) async fn call_together(
        &self,
        commands: &Pipeline,
        count: usize,
    ) -> Result<Vec<Value>, Failure> {
        let waiting = Waiting::new(&self.traffic);
        let skipped = commands.len().saturating_sub(count);
        let answers = self.connection.clone().send_packed_commands(commands, skipped, count).await;
        waiting.answered();
        match answers {
            Ok(answers) => Ok(answers),
            Err(error) => Err(Failure::check(Err(error))
                .err()
                .unwrap_or_else(|| Failure::Server { code: "ERR".into(), detail: "no answer".into() })),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.life.close();
    }
}

impl Connection for Link {
    fn is_open(&self) -> bool {
        self.life.is_open()
    }
}

/// Somebody waits for an answer.
struct Waiting<'a>(&'a Traffic);

impl<'a> Waiting<'a> {
    fn new(traffic: &'a Traffic) -> Waiting<'a> {
        traffic.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(traffic)
    }

    fn answered(self) {
        self.0.answered.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Drives a connection until it breaks, is closed, or stops answering.
async fn drive(driver: impl Future<Output = ()>, env: Env, traffic: Arc<Traffic>, gone: Gone) {
    let mut driver = std::pin::pin!(driver);
    let mut unanswered = None;
    loop {
        tokio::select! {
            biased;
            () = &mut driver => return,
            () = gone.0.closing() => return,
            () = env.sleep_until(env.now() + LOOK_EVERY) => {}
        }
        let answered = traffic.answered.load(Ordering::Relaxed);
        let waiting = traffic.waiting.load(Ordering::Relaxed) > 0;
        if waiting && unanswered == Some(answered) {
            return;
        }
        unanswered = waiting.then_some(answered);
    }
}
