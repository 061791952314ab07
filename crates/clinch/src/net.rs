//! How backends reach a server: any byte stream will do, so that a simulator can swap the network and nothing else.

use std::fmt::Debug;
use std::io;

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite};

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

/// The host's own TCP, without Nagle's delay: a lock's messages are small and wait for each other.
#[derive(Debug)]
pub(crate) struct Tcp;

#[async_trait]
impl Connector for Tcp {
    async fn connect(&self, host: &str, port: u16) -> io::Result<Box<dyn Stream>> {
        let stream = tokio::net::TcpStream::connect((host, port)).await?;
        stream.set_nodelay(true)?;
        Ok(Box::new(stream))
    }

    #[cfg(unix)]
    async fn connect_unix(&self, path: &str) -> io::Result<Box<dyn Stream>> {
        Ok(Box::new(tokio::net::UnixStream::connect(path).await?))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn tcp_carries_bytes_both_ways() {
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = server.local_addr().unwrap().port();
        let mut client = Tcp.connect("127.0.0.1", port).await.unwrap();
        let (mut peer, _) = server.accept().await.unwrap();
        client.write_all(b"ping").await.unwrap();
        let mut bytes = [0; 4];
        peer.read_exact(&mut bytes).await.unwrap();
        peer.write_all(&bytes).await.unwrap();
        client.read_exact(&mut bytes).await.unwrap();
        assert_eq!(&bytes, b"ping");
    }
}
