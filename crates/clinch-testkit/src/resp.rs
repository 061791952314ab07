//! A small blocking RESP2 client, for assertions about a Redis server.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Error, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::wait::PATIENCE;

/// A reply of a Redis server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// A status, such as `OK`, or a string.
    Text(String),
    /// A number.
    Int(i64),
    /// Nothing.
    Nil,
    /// Several replies.
    Array(Vec<Reply>),
    /// An error, which begins with its kind.
    Error(String),
}

impl Reply {
    /// The text; panics when it is anything else.
    #[track_caller]
    pub fn text(self) -> String {
        match self {
            Reply::Text(text) => text,
            other => panic!("no text: {other:?}"),
        }
    }

    /// The number, also one written as text; panics when it is anything else.
    #[track_caller]
    pub fn int(self) -> i64 {
        match self {
            Reply::Int(number) => number,
            Reply::Text(text) => text.parse().expect("a number"),
            other => panic!("no number: {other:?}"),
        }
    }

    /// The replies; panics when it is anything else.
    #[track_caller]
    pub fn array(self) -> Vec<Reply> {
        match self {
            Reply::Array(replies) => replies,
            other => panic!("no array: {other:?}"),
        }
    }

    /// An array of names and values, as most of Redis's tables come; panics when it is anything else.
    #[track_caller]
    pub fn table(self) -> BTreeMap<String, Reply> {
        let mut fields = self.array().into_iter();
        let mut table = BTreeMap::new();
        while let (Some(name), Some(value)) = (fields.next(), fields.next()) {
            table.insert(name.text(), value);
        }
        table
    }
}

/// A connection to a Redis server, over TCP or a Unix socket.
pub struct Resp(BufReader<Box<dyn Stream>>);

trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

impl Resp {
    /// Connects over TCP.
    ///
    /// # Errors
    ///
    /// Those of the connection.
    pub fn connect(addr: SocketAddr) -> io::Result<Resp> {
        let stream = TcpStream::connect_timeout(&addr, PATIENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Resp(BufReader::new(Box::new(stream))))
    }

    /// Connects over a Unix socket.
    ///
    /// # Errors
    ///
    /// Those of the connection.
    pub fn connect_unix(path: &Path) -> io::Result<Resp> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Resp(BufReader::new(Box::new(stream))))
    }

    /// Sends a command and returns its reply; panics when the connection fails or the reply is an error.
    #[track_caller]
    pub fn call<A: AsRef<[u8]>>(&mut self, command: &[A]) -> Reply {
        match self.try_call(command).expect("the server answers") {
            Reply::Error(error) => {
                let command: Vec<_> =
                    command.iter().map(|arg| String::from_utf8_lossy(arg.as_ref())).collect();
                panic!("{}: {error}", command.join(" "))
            }
            reply => reply,
        }
    }

    /// Sends a command and returns its reply, which may be an error.
    ///
    /// # Errors
    ///
    /// Those of the connection.
    pub fn try_call<A: AsRef<[u8]>>(&mut self, command: &[A]) -> io::Result<Reply> {
        let mut request = format!("*{}\r\n", command.len()).into_bytes();
        for arg in command {
            let arg = arg.as_ref();
            request.extend_from_slice(format!("${}\r\n", arg.len()).as_bytes());
            request.extend_from_slice(arg);
            request.extend_from_slice(b"\r\n");
        }
        self.0.get_mut().write_all(&request)?;
        self.receive()
    }

    /// Reads one more reply, such as a message of a subscription.
    ///
    /// # Errors
    ///
    /// Those of the connection.
    pub fn receive(&mut self) -> io::Result<Reply> {
        let line = self.line()?;
        let bad = || Error::new(ErrorKind::InvalidData, line.clone());
        let (kind, rest) = line.split_at_checked(1).ok_or_else(bad)?;
        let number = || rest.parse::<i64>().map_err(|_| bad());
        Ok(match kind {
            "+" => Reply::Text(rest.to_owned()),
            "-" => Reply::Error(rest.to_owned()),
            ":" => Reply::Int(number()?),
            "$" => match usize::try_from(number()?) {
                Ok(length) => {
                    let mut text = vec![0; length + 2];
                    self.0.read_exact(&mut text)?;
                    Reply::Text(String::from_utf8_lossy(&text[..length]).into_owned())
                }
                Err(_) => Reply::Nil,
            },
            "*" => match usize::try_from(number()?) {
                Ok(length) => Reply::Array((0..length).map(|_| self.receive()).collect::<io::Result<_>>()?),
                Err(_) => Reply::Nil,
            },
            _ => return Err(bad()),
        })
    }

    /// The fields of a section of `INFO`.
    #[track_caller]
    pub fn info(&mut self, section: &str) -> BTreeMap<String, String> {
        info_fields(&self.call(&["INFO", section]).text())
    }

    /// How often each command was called since the server started or `CONFIG RESETSTAT`.
    #[track_caller]
    pub fn commandstats(&mut self) -> BTreeMap<String, u64> {
        let calls = |(name, value): (String, String)| {
            let calls = value.strip_prefix("calls=")?.split(',').next()?.parse().ok()?;
            Some((name.strip_prefix("cmdstat_")?.to_owned(), calls))
        };
        self.info("commandstats").into_iter().filter_map(calls).collect()
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.0.read_line(&mut line)? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        Ok(line.trim_end_matches(['\r', '\n']).to_owned())
    }
}

/// The fields of what `INFO` answers.
pub(crate) fn info_fields(text: &str) -> BTreeMap<String, String> {
    let fields = text.lines().filter_map(|line| line.split_once(':'));
    fields.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

impl std::fmt::Debug for Resp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Resp")
    }
}
