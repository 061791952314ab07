//! A Redis server, or one that speaks its protocol.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::clock;
use crate::port::Port;
use crate::process::Process;
use crate::resp::{Reply, Resp, info_fields};
use crate::tls::Certificates;
use crate::wait::{PATIENCE, POLL};

mod builder;

pub use builder::RedisBuilder;

/// A Redis server on a port of its own; dropping it kills the server.
///
/// Besides its port it listens on a Unix socket in its directory. There [`client`](Redis::client) connects, so that
/// assertions work whatever stands before the port, with TLS, too.
#[derive(Debug)]
pub struct Redis {
    process: Process,
    port: Option<Port>,
    tls: Option<Certificates>,
    password: Option<String>,
}

impl Redis {
    /// Starts Debian's Redis, without persistence and without a password.
    pub fn start() -> Redis {
        Redis::builder().start()
    }

    /// What the server shall be like; [`start`](RedisBuilder::start) starts it.
    pub fn builder() -> RedisBuilder {
        RedisBuilder::default()
    }

    /// The port; panics when the server has only a Unix socket.
    pub fn port(&self) -> u16 {
        self.addr().port()
    }

    /// The port with its address; panics when the server has only a Unix socket.
    pub fn addr(&self) -> SocketAddr {
        self.port.as_ref().expect("it has only a Unix socket").addr()
    }

    /// The URL of the server, with the password and the authority's certificate if it has them.
    pub fn url(&self) -> String {
        self.url_with(&self.password.as_ref().map_or_else(String::new, |password| format!(":{password}@")))
    }

    /// The URL of the server for a user; name and password must not need escaping.
    pub fn url_as(&self, user: &str, password: &str) -> String {
        self.url_with(&format!("{user}:{password}@"))
    }

    fn url_with(&self, login: &str) -> String {
        match (&self.port, &self.tls) {
            (None, _) => format!("redis+unix://{login}{}", self.socket().display()),
            (Some(port), None) => format!("redis://{login}{}", port.addr()),
            (Some(port), Some(tls)) => format!("rediss://{login}{}?ca={}", port.addr(), tls.ca().display()),
        }
    }

    /// The Unix socket.
    pub fn socket(&self) -> PathBuf {
        self.dir().join("redis.sock")
    }

    /// The server's directory.
    pub fn dir(&self) -> &Path {
        self.process.dir()
    }

    /// The certificates; panics when the server has no TLS.
    pub fn certificates(&self) -> &Certificates {
        self.tls.as_ref().expect("it was started without TLS")
    }

    /// A connection through the Unix socket, logged in.
    #[track_caller]
    pub fn client(&self) -> Resp {
        self.try_client().unwrap_or_else(|error| panic!("{error}\n{}", self.log_tail()))
    }

    /// Sends one command on a connection of its own; panics when it fails.
    #[track_caller]
    pub fn call<A: AsRef<[u8]>>(&self, command: &[A]) -> Reply {
        self.client().call(command)
    }

    /// Like [`client`](Redis::client), for a server that may be down.
    ///
    /// # Errors
    ///
    /// Those of the connection.
    pub fn try_client(&self) -> io::Result<Resp> {
        let mut client = Resp::connect_unix(&self.socket())?;
        if let Some(password) = &self.password {
            client.try_call(&["AUTH", password])?;
        }
        Ok(client)
    }

    /// The reply to a command, unless the server is down or it is an error.
    pub(crate) fn ask<A: AsRef<[u8]>>(&self, command: &[A]) -> Option<Reply> {
        let reply = self.try_client().and_then(|mut client| client.try_call(command)).ok()?;
        (!matches!(reply, Reply::Error(_))).then_some(reply)
    }

    /// A field of a section of `INFO`, if the server is up and has it.
    pub fn field(&self, section: &str, name: &str) -> Option<String> {
        info_fields(&self.ask(&["INFO", section])?.text()).remove(name)
    }

    /// The id of the process; panics when it was killed.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Whether the server runs and is not paused.
    pub fn is_up(&self) -> bool {
        self.process.is_running() && !self.process.is_paused()
    }

    /// Kills the server with SIGKILL and waits until it is gone.
    pub fn kill(&self) {
        self.process.kill();
    }

    /// Stops the server with SIGSTOP.
    pub fn pause(&self) {
        self.process.pause();
    }

    /// Lets a paused server go on.
    pub fn resume(&self) {
        self.process.resume();
    }

    /// Sets by how many seconds the server's wall clock is off; for one with a
    /// [stepped clock](RedisBuilder::stepped_clock).
    pub fn step_clock(&self, seconds: i64) {
        // As far as nanoseconds go: 292 years.
        self.shift_clock(seconds.saturating_mul(1_000_000_000));
    }

    /// Like [`step_clock`](Redis::step_clock), by nanoseconds: small steps one after the other make a clock that runs at another
    /// rate.
    pub fn shift_clock(&self, nanos: i64) {
        clock::step(self.dir(), nanos);
    }

    /// Kills the server if it runs, starts it again on the same port and in the same directory, and waits until it
    /// answers.
    pub fn restart(&self) {
        self.process.restart();
        if !self.becomes_ready() {
            panic!("the server does not start again:\n{}", self.log_tail());
        }
    }

    /// The last lines of the server's log.
    pub fn log_tail(&self) -> String {
        self.process.log_tail()
    }

    /// Waits until the server answers; false when it ended instead.
    fn becomes_ready(&self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        while self.process.is_running() {
            // Any answer counts but that it still loads: where only some users may log in, it is an error.
            match self.try_client().and_then(|mut client| client.try_call(&["PING"])) {
                Ok(Reply::Error(error)) if error.starts_with("LOADING") => {}
                Ok(_) => return true,
                Err(_) => {}
            }
            assert!(Instant::now() < deadline, "the server does not answer:\n{}", self.log_tail());
            std::thread::sleep(POLL);
        }
        false
    }
}
