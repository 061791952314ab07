//! How backends reach a server: any byte stream will do, so that a simulator can swap the network and nothing else.

use std::fmt::Debug;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::clock::Clock;
use crate::lane::Lane;
use crate::process::Process;
use crate::timer::Timers;

/// A connection: bytes in both directions.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> Stream for T {}

/// Opens connections.
#[async_trait]
pub trait Connector: Debug + Send + Sync + 'static {
    /// Connects to `host:port`.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future closes what was opened.
    async fn connect(&self, host: &str, port: u16) -> io::Result<Box<dyn Stream>>;

    /// Connects to a Unix socket. A network that has none refuses.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future closes what was opened.
    async fn connect_unix(&self, path: &str) -> io::Result<Box<dyn Stream>> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!("this network has no Unix sockets, so no {path}"),
        ))
    }
}

/// A network whose connections are those of one process. A forked child shares each of them with its parent, and what its runtime knows of
/// it: so it neither uses nor closes any.
#[derive(Debug)]
pub(crate) struct Owned(pub(crate) Arc<dyn Connector>, pub(crate) Process);

#[async_trait]
impl Connector for Owned {
    async fn connect(&self, host: &str, port: u16) -> io::Result<Box<dyn Stream>> {
        Ok(Box::new(Own(Some(self.0.connect(host, port).await?), self.1)))
    }

    async fn connect_unix(&self, path: &str) -> io::Result<Box<dyn Stream>> {
        Ok(Box::new(Own(Some(self.0.connect_unix(path).await?), self.1)))
    }
}

/// `None` only when it is dropped.
struct Own(Option<Box<dyn Stream>>, Process);

impl Own {
    fn stream(&mut self) -> io::Result<Pin<&mut Box<dyn Stream>>> {
        let stream = self.0.as_mut().filter(|_| !self.1.is_left());
        stream.map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        if self.1.is_left() {
            std::mem::forget(self.0.take());
        }
    }
}

impl AsyncRead for Own {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        room: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.stream()?.poll_read(cx, room)
    }
}

impl AsyncWrite for Own {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.stream()?.poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream()?.poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.as_ref().is_some_and(|stream| stream.is_write_vectored())
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_shutdown(cx)
    }
}

/// For how long an address of a name, or a member of a cluster, is waited for alone, before the next is tried beside it (RFC 8305).
pub(crate) const STAGGER: Duration = Duration::from_millis(250);

/// After how long of silence the kernel asks whether the peer is still there, and how long and how often it asks. What does
/// not answer for 30 s is gone, also while nothing is asked of it.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(15), Duration::from_secs(5), 3);

/// For how long the kernel tries to deliver what was written. Also of a connection that was closed: a request that it still
/// delivered minutes later would find graves gone.
pub(crate) const UNDELIVERED: Duration = Duration::from_secs(20);

/// The host's own TCP, without Nagle's delay: a lock's messages are small and wait for each other.
#[derive(Debug)]
pub(crate) struct Tcp(Timers, Clock);

impl Tcp {
    pub(crate) fn new(clock: Clock, lane: Lane) -> Tcp {
        Tcp(Timers::new(clock, lane), clock)
    }
}

#[async_trait]
impl Connector for Tcp {
    async fn connect(&self, host: &str, port: u16) -> io::Result<Box<dyn Stream>> {
        let addresses = in_turn(tokio::net::lookup_host((host, port)).await?);
        let pause = || self.0.sleep_until(self.1.now() + STAGGER);
        let stream = first_of(addresses, TcpStream::connect, pause).await?;
        tune(&stream)?;
        Ok(Box::new(stream))
    }

    #[cfg(unix)]
    async fn connect_unix(&self, path: &str) -> io::Result<Box<dyn Stream>> {
        Ok(Box::new(tokio::net::UnixStream::connect(path).await?))
    }
}

fn tune(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        use rustix::net::sockopt;
        let (idle, between, count) = KEEPALIVE;
        sockopt::set_socket_keepalive(stream, true)?;
        sockopt::set_tcp_keepidle(stream, idle)?;
        sockopt::set_tcp_keepintvl(stream, between)?;
        sockopt::set_tcp_keepcnt(stream, count)?;
        sockopt::set_tcp_user_timeout(stream, u32::try_from(UNDELIVERED.as_millis()).unwrap_or(u32::MAX))?;
    }
    Ok(())
}

/// The addresses in their order, but of both families in turn: often one of them leads nowhere.
fn in_turn(addresses: impl Iterator<Item = SocketAddr>) -> Vec<SocketAddr> {
    let all: Vec<_> = addresses.collect();
    let first = all.first().is_some_and(SocketAddr::is_ipv4);
    let (one, other): (Vec<_>, Vec<_>) = all.into_iter().partition(|address| address.is_ipv4() == first);
    let mut other = other.into_iter();
    let mut turns: Vec<_> =
        one.into_iter().flat_map(|address| [Some(address), other.next()]).flatten().collect();
    turns.extend(other);
    turns
}

/// The first connection to any of these addresses. The next is tried when one has failed, or none has answered for a while.
async fn first_of<T, C, P>(
    addresses: Vec<SocketAddr>,
    connect: impl Fn(SocketAddr) -> C,
    pause: impl Fn() -> P,
) -> io::Result<T>
where
    C: Future<Output = io::Result<T>>,
    P: Future<Output = ()>,
{
    let mut next = addresses.into_iter();
    let mut tried: Vec<Pin<Box<C>>> = Vec::new();
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    loop {
        match next.next() {
            Some(address) => tried.push(Box::pin(connect(address))),
            None if tried.is_empty() => return Err(failure),
            None => {}
        }
        let more = !next.as_slice().is_empty();
        let ended = poll_fn(|cx| {
            let ended = tried.iter_mut().enumerate().find_map(|(at, one)| match one.as_mut().poll(cx) {
                Poll::Ready(ended) => Some((at, ended)),
                Poll::Pending => None,
            });
            ended.map_or(Poll::Pending, Poll::Ready)
        });
        tokio::select! {
            biased;
            (at, ended) = ended => {
                drop(tried.swap_remove(at));
                match ended {
                    Ok(connection) => return Ok(connection),
                    Err(error) => failure = error,
                }
            }
            () = pause(), if more => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::sync::lock;

    #[tokio::test]
    async fn tcp_carries_bytes_both_ways() {
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = server.local_addr().unwrap().port();
        let tcp = Tcp::new(Clock::host(), Lane::here().unwrap());
        let mut client = tcp.connect("127.0.0.1", port).await.unwrap();
        let (mut peer, _) = server.accept().await.unwrap();
        client.write_all(b"ping").await.unwrap();
        let mut bytes = [0; 4];
        peer.read_exact(&mut bytes).await.unwrap();
        peer.write_all(&bytes).await.unwrap();
        client.read_exact(&mut bytes).await.unwrap();
        assert_eq!(&bytes, b"ping");
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn a_peer_that_is_gone_is_noticed_by_the_kernel() {
        use rustix::net::sockopt;
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(server.local_addr().unwrap()).await.unwrap();
        tune(&stream).unwrap();
        assert!(sockopt::socket_keepalive(&stream).unwrap() && stream.nodelay().unwrap());
        assert_eq!(sockopt::tcp_keepidle(&stream).unwrap(), KEEPALIVE.0);
        assert_eq!(sockopt::tcp_keepintvl(&stream).unwrap(), KEEPALIVE.1);
        assert_eq!(sockopt::tcp_keepcnt(&stream).unwrap(), KEEPALIVE.2);
        assert_eq!(u128::from(sockopt::tcp_user_timeout(&stream).unwrap()), UNDELIVERED.as_millis());
    }

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn families_take_turns() {
        let all = ["[::1]:1", "[::2]:1", "[::3]:1", "1.1.1.1:1", "2.2.2.2:1"].map(address);
        let turns = ["[::1]:1", "1.1.1.1:1", "[::2]:1", "2.2.2.2:1", "[::3]:1"].map(address);
        assert_eq!(in_turn(all.into_iter()), turns);
        assert_eq!(in_turn([all[3], all[0], all[1]].into_iter()), [all[3], all[0], all[1]]);
        assert_eq!(in_turn(std::iter::empty()), []);
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_leads_nowhere_does_not_keep_the_others_waiting() {
        let all = ["1.1.1.1:1", "2.2.2.2:2", "3.3.3.3:3", "4.4.4.4:4"].map(address);
        let start = tokio::time::Instant::now();
        let tried = Mutex::new(Vec::new());
        let connect = async |address: SocketAddr| {
            lock(&tried).push((address.port(), start.elapsed()));
            match address.port() {
                1 => std::future::pending().await,
                2 => Err(io::ErrorKind::ConnectionRefused.into()),
                port => {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    Ok(port)
                }
            }
        };
        let pause = || tokio::time::sleep(STAGGER);
        assert_eq!(first_of(all.to_vec(), connect, pause).await.unwrap(), 3);
        let wanted = [(1, 0), (2, 1), (3, 1), (4, 2)].map(|(port, pauses)| (port, STAGGER * pauses));
        assert_eq!(*lock(&tried), wanted, "the next comes at once after a failure, else after a pause");
        let refused = first_of(vec![all[1]; 3], connect, pause).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        assert_eq!(first_of(Vec::new(), connect, pause).await.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
