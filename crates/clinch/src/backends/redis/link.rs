//! One live connection to a server, as its callers see it.

use std::sync::{Arc, OnceLock};

use tokio::sync::oneshot;

use super::check::Server;
use super::failure::Failure;
use super::resp::{Command, Value};
use super::settings::Address;
use super::wire::{Pushes, Wire};
use crate::backends::pool::Connection;
use crate::clock::Instant;
use crate::env::Env;
use crate::net::Stream;

/// A connection to one server, shared by everybody on one runtime. Dropping it ends the connection.
pub(super) struct Link {
    wire: Arc<Wire>,
    server: String,
    /// What the server said of itself, where it was asked.
    pub(super) about: Server,
}

impl Link {
    /// Has the current runtime drive a connection. Messages that are no answers go to `pushes`.
    pub(super) fn new(stream: Box<dyn Stream>, pushes: Option<Pushes>, address: &Address, env: Env) -> Link {
        let wire = Wire::open(stream, pushes, env);
        Link { wire, server: address.to_string(), about: Server::default() }
    }

    /// The server's address, for people.
    pub(super) fn server(&self) -> &str {
        &self.server
    }

    /// Ends the connection; whoever waits for an answer is told that it broke.
    pub(super) fn close(&self) {
        self.wire.end("it was closed");
    }

    /// Where it will stand when the connection ended.
    pub(super) fn ended(&self) -> Arc<OnceLock<Instant>> {
        self.wire.ended()
    }

    /// Waits until the connection is gone, and does not keep it.
    pub(super) fn gone(&self) -> impl Future<Output = ()> + use<> {
        let wire = self.wire.clone();
        async move { wire.gone().await }
    }

    /// Sends one command.
    ///
    /// # Cancel safety
    ///
    /// The command may be applied or not; the connection stays in step.
    pub(super) async fn call(&self, command: &Command) -> Result<Value, Failure> {
        let [answer] = self.wire.send([command])?;
        Failure::check(self.answer(answer).await?)
    }

    /// Sends one command whose answer nobody waits for. What goes out later on this connection comes after it.
    pub(super) fn post(&self, command: &Command) {
        // On a connection that has ended there is nothing to send, and nobody to tell.
        let _ = self.wire.send([command]);
    }

    /// Sends commands that nothing may come between, and gives their answers, of which each may be an error.
    pub(super) async fn call_together<const N: usize>(
        &self,
        commands: [&Command; N],
    ) -> Result<Vec<Value>, Failure> {
        let mut answers = Vec::with_capacity(N);
        for answer in self.wire.send(commands)? {
            answers.push(self.answer(answer).await?);
        }
        Ok(answers)
    }

    /// As [`Link::call_together`], of however many.
    pub(super) async fn call_all(&self, commands: &[Command]) -> Result<Vec<Value>, Failure> {
        let mut answers = Vec::with_capacity(commands.len());
        for answer in self.wire.send_all(commands)? {
            answers.push(self.answer(answer).await?);
        }
        Ok(answers)
    }

    async fn answer(&self, answer: oneshot::Receiver<Value>) -> Result<Value, Failure> {
        answer.await.map_err(|_| Failure::Cut { sent: true, why: self.wire.why() })
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
    }
}

impl Connection for Link {
    fn is_open(&self) -> bool {
        self.wire.is_open()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::io;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};
    use std::time::{Duration, SystemTime};

    use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf};
    use tokio::runtime::Builder;

    use super::super::wire::{CROWD, HELD_BACK};
    use super::*;
    use crate::backends::times::LOOK_EVERY;
    use crate::clock::Clock;
    use crate::lane::Lane;
    use crate::net::Tcp;
    use crate::random::Random;

    /// A connection in simulated time, and its other end.
    fn connected() -> (Link, DuplexStream) {
        connected_with_room_for(1 << 16)
    }

    fn connected_with_room_for(bytes: usize) -> (Link, DuplexStream) {
        let (ours, theirs) = tokio::io::duplex(bytes);
        (link(ours), theirs)
    }

    pub(in super::super) fn link(stream: impl Stream) -> Link {
        Link::new(Box::new(stream), None, &Address::Unix("test".into()), env())
    }

    pub(in super::super) fn env() -> Env {
        let clock = Clock::simulated(SystemTime::UNIX_EPOCH);
        let tcp = Tcp::new(clock, Lane::here().unwrap());
        Env::new(clock, Random::seeded(1), Lane::here().unwrap(), Arc::new(tcp))
    }

    #[tokio::test(start_paused = true)]
    async fn an_ended_connection_is_closed_though_somebody_has_it_still() {
        let (link, mut server) = connected();
        link.close();
        let mut bytes = [0; 8];
        let read = tokio::time::timeout(Duration::from_secs(60), server.read(&mut bytes));
        assert_eq!(read.await.expect("it is open").unwrap(), 0);
        assert!(!link.is_open());
    }

    /// A runtime that stands still drives no connection. What lay there unwritten would find the graves of its claims gone.
    #[tokio::test(start_paused = true)]
    async fn what_was_not_written_in_time_never_is() {
        const PING: &str = "*1\r\n$4\r\nPING\r\n";
        for (room, calls, sent) in [(8, 1, 8), (1 << 16, CROWD + 1, CROWD * PING.len())] {
            let (link, mut server) = connected_with_room_for(room);
            // The driver begins.
            tokio::task::yield_now().await;
            let ping = Command::new("PING");
            let mut calls: Vec<_> = (0..calls).map(|_| Box::pin(link.call(&ping))).collect();
            for call in &mut calls {
                let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                assert!(polled.is_pending());
            }
            // To the connection, all at once.
            tokio::time::advance(HELD_BACK + Duration::from_millis(1)).await;
            let mut bytes = Vec::new();
            server.read_to_end(&mut bytes).await.unwrap();
            assert_eq!(bytes.len(), sent, "old bytes were sent");
            for call in calls {
                assert!(matches!(call.await, Err(Failure::Cut { sent: true, .. })));
            }
        }
    }

    /// A server that is slower than its callers for a while has commands lie here all the time, each of them not for long.
    #[tokio::test(start_paused = true)]
    async fn a_backlog_that_moves_ends_no_connection() {
        const CALLERS: u32 = 20;
        let (link, mut server) = connected_with_room_for(64);
        let (link, end) = (Arc::new(link), tokio::time::Instant::now() + 4 * HELD_BACK);
        tokio::spawn(async move {
            let mut command = [0; "*1\r\n$4\r\nPING\r\n".len()];
            while server.read_exact(&mut command).await.is_ok() {
                tokio::time::sleep(HELD_BACK / 2 / CALLERS).await;
                let _ = server.write_all(b"+PONG\r\n").await;
            }
        });
        let mut callers = tokio::task::JoinSet::new();
        for _ in 0..CALLERS {
            let link = link.clone();
            callers.spawn(async move {
                while tokio::time::Instant::now() < end {
                    link.call(&Command::new("PING")).await.unwrap();
                }
            });
        }
        callers.join_all().await;
    }

    /// Takes whatever is written and lets nothing of it go, as TLS may.
    struct Hoard(DuplexStream);

    impl AsyncRead for Hoard {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            room: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_read(cx, room)
        }
    }

    impl AsyncWrite for Hoard {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            panic!("the farewell takes along what lies there")
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_lies_in_the_stream_is_not_sent() {
        let (ours, mut server) = tokio::io::duplex(1 << 16);
        let link = link(Hoard(ours));
        server.write_all(b"$100\r\n").await.unwrap();
        let asked = tokio::time::Instant::now();
        while link.is_open() {
            assert!(asked.elapsed() < HELD_BACK + 2 * LOOK_EVERY, "old bytes may yet be sent");
            link.post(&Command::new("PING"));
            // It is heard, and the driver looks.
            let _ = server.write_all(b".").await;
            tokio::time::sleep(LOOK_EVERY / 2).await;
        }
        assert!(asked.elapsed() > HELD_BACK, "{}", link.wire.why());
    }

    /// The runtime that drives a connection stands still, and then goes on with others before it looks what has come.
    #[test]
    fn an_answer_that_nobody_could_read_yet_is_no_silence() {
        for late in (0..20).map(|step| LOOK_EVERY / 20 * step) {
            let runtime =
                |paused| Builder::new_current_thread().enable_all().start_paused(paused).build().unwrap();
            let (lane, driver) = (runtime(true), runtime(false));
            let pass = |time| lane.block_on(async { tokio::time::sleep(time).await });
            let env = lane.block_on(async { env() });
            let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let address = server.local_addr().unwrap();
            let link = driver.block_on(async {
                let stream = tokio::net::TcpStream::connect(address).await.unwrap();
                Link::new(Box::new(stream), None, &Address::Unix("test".into()), env)
            });
            let (mut server, ping) = (server.accept().unwrap().0, Command::new("PING"));
            let mut call = Box::pin(link.call(&ping));
            let look =
                async { assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending()) };
            driver.block_on(look);
            // What comes first runs first, and only then is it looked what has come.
            let turn = || driver.block_on(tokio::task::yield_now());
            turn();
            pass(LOOK_EVERY + late);
            turn();
            std::io::Write::write_all(&mut server, b"+PONG\r\n").unwrap();
            pass(2 * LOOK_EVERY);
            assert!(link.is_open(), "{late:?}: {}", link.wire.why());
            turn();
            pass(LOOK_EVERY / 5);
            assert!(link.is_open(), "{late:?}: {}, though it was about to be read", link.wire.why());
            assert_eq!(driver.block_on(call).unwrap().text(), Some("PONG"));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_answer_may_take_its_time_and_silence_may_not() {
        let (link, mut server) = connected();
        let slow = async {
            server.write_all(b"$30\r\n").await.unwrap();
            for byte in *b"012345678901234567890123456789\r\n" {
                tokio::time::sleep(LOOK_EVERY - Duration::from_millis(100)).await;
                // A connection that was given up is told below.
                let _ = server.write_all(&[byte]).await;
            }
        };
        let (ping, info) = (Command::new("PING"), Command::new("INFO"));
        let (info, ()) = tokio::join!(link.call(&info), slow);
        assert_eq!(info.unwrap().text().map(str::len), Some(30));
        let asked = tokio::time::Instant::now();
        assert!(matches!(link.call(&ping).await, Err(Failure::Cut { sent: true, .. })));
        assert!(asked.elapsed() <= 2 * LOOK_EVERY);
    }
}
