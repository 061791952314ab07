//! The floor on Redis: a hand-written client that does what no library can leave out, and nothing else.
//!
//! One blocking connection without Nagle's delay, commands that are encoded before they are timed, and replies compared
//! with the bytes that have to come instead of parsed. [`Raw::call`] parses, for what is not timed.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use crate::{Error, Result};

/// How long a reply may take that does not wait for anybody.
const PATIENCE: Duration = Duration::from_secs(30);

/// What one read from the socket may bring. Replies that are compared are far shorter.
const BUFFER_BYTES: usize = 64 << 10;

/// Frees a lock that is a plain key, if it still holds the caller's value: what every client on Redis does.
const COMPARE_AND_DELETE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

/// What the server answers when it took a lock, and when it freed one.
pub(crate) const TAKEN: &[u8] = b"+OK\r\n";
pub(crate) const FREED: &[u8] = b":1\r\n";

/// What the floors write into their locks: as long as the random values that others write.
pub(crate) const OWNER: &str = "0123456789abcdefghij";

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Int(i64),
    Text(Vec<u8>),
    Nil,
    Array(Vec<Reply>),
}

impl Reply {
    pub(crate) fn text(self) -> Result<String> {
        match self {
            Reply::Text(text) => Ok(String::from_utf8(text)?),
            other => Err(format!("text was expected of the server, not {other:?}").into()),
        }
    }

    pub(crate) fn int(self) -> Result<i64> {
        match self {
            Reply::Int(int) => Ok(int),
            other => Err(format!("a number was expected of the server, not {other:?}").into()),
        }
    }
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Raw {
    stream: TcpStream,
    buffer: Vec<u8>,
    /// What of the buffer was received and not yet consumed.
    from: usize,
    to: usize,
}

impl Raw {
    /// Connects to what a URL names; what follows the port does not matter here.
    pub(crate) fn connect(url: &str) -> Result<Raw> {
        let address = url.strip_prefix("redis://").ok_or_else(|| format!("{url} is no redis:// URL"))?;
        let address = address.split(['/', '?']).next().unwrap_or_default();
        let stream = TcpStream::connect(address).map_err(|error| format!("{address}: {error}"))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Raw { stream, buffer: vec![0; BUFFER_BYTES], from: 0, to: 0 })
    }

    /// Lets replies take as long as they like: for commands that wait for somebody.
    pub(crate) fn wait_forever(&self) -> Result<()> {
        Ok(self.stream.set_read_timeout(None)?)
    }

    /// Loads the script that frees a lock, and returns its name.
    pub(crate) fn load_release(&mut self) -> Result<String> {
        self.load(COMPARE_AND_DELETE)
    }

    pub(crate) fn load(&mut self, script: &str) -> Result<String> {
        self.call(&["SCRIPT", "LOAD", script])?.text()
    }

    pub(crate) fn call(&mut self, words: &[&str]) -> Result<Reply> {
        self.send(&encode(words))?;
        self.reply()
    }

    /// Sends a command and takes exactly this answer.
    pub(crate) fn exchange(&mut self, command: &[u8], answer: &[u8]) -> Result<()> {
        self.send(command)?;
        self.expect(answer)
    }

    pub(crate) fn send(&mut self, commands: &[u8]) -> Result<()> {
        Ok(self.stream.write_all(commands)?)
    }

    /// Takes exactly this answer, from the buffer where it is there already.
    pub(crate) fn expect(&mut self, answer: &[u8]) -> Result<()> {
        while self.to - self.from < answer.len() {
            self.receive()?;
        }
        let got = self.received().get(..answer.len()).unwrap_or_default();
        if got != answer {
            let (got, answer) = (String::from_utf8_lossy(self.received()), String::from_utf8_lossy(answer));
            return Err(format!("the server answered {got:?}, not {answer:?}").into());
        }
        self.from += answer.len();
        Ok(())
    }

    /// Whether an answer was received that nobody took yet.
    pub(crate) fn has_more(&self) -> bool {
        self.from < self.to
    }

    /// Takes one answer. One that is an error is an error here.
    pub(crate) fn reply(&mut self) -> Result<Reply> {
        let line = self.line()?;
        let (kind, rest) = line.split_at_checked(1).ok_or("the server sent an empty line")?;
        match kind {
            "+" => Ok(Reply::Text(rest.as_bytes().to_vec())),
            "-" => Err(format!("the server refused: {rest}").into()),
            ":" => Ok(Reply::Int(rest.parse()?)),
            "$" => match usize::try_from(rest.parse::<i64>()?) {
                Ok(length) => Ok(Reply::Text(self.bytes(length)?)),
                Err(_) => Ok(Reply::Nil),
            },
            "*" => match usize::try_from(rest.parse::<i64>()?) {
                Ok(length) => Ok(Reply::Array((0..length).map(|_| self.reply()).collect::<Result<_>>()?)),
                Err(_) => Ok(Reply::Nil),
            },
            _ => Err(format!("the server sent \"{line}\", which is no reply").into()),
        }
    }

    /// One line without its end.
    pub(crate) fn line(&mut self) -> Result<String> {
        loop {
            if let Some(end) = self.received().windows(2).position(|end| end == b"\r\n") {
                let line = String::from_utf8(self.received().get(..end).unwrap_or_default().to_vec())?;
                self.from += end + 2;
                return Ok(line);
            }
            self.receive()?;
        }
    }

    fn bytes(&mut self, length: usize) -> Result<Vec<u8>> {
        while self.to - self.from < length + 2 {
            self.receive()?;
        }
        let bytes = self.received().get(..length).unwrap_or_default().to_vec();
        self.from += length + 2;
        Ok(bytes)
    }

    fn received(&self) -> &[u8] {
        self.buffer.get(self.from..self.to).unwrap_or_default()
    }

    /// Waits for more bytes.
    fn receive(&mut self) -> Result<()> {
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        } else if self.to == self.buffer.len() {
            self.buffer.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
            if self.to == self.buffer.len() {
                self.buffer.resize(self.to * 2, 0);
            }
        }
        let room = self.buffer.get_mut(self.to..).unwrap_or_default();
        match self.stream.read(room)? {
            0 => Err(Error::from("the server closed the connection")),
            count => {
                self.to += count;
                Ok(())
            }
        }
    }
}

impl AsFd for Raw {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// A command as the server wants it.
pub(crate) fn encode(words: &[&str]) -> Vec<u8> {
    let mut command = format!("*{}\r\n", words.len());
    for word in words {
        command.push_str(&format!("${}\r\n{word}\r\n", word.len()));
    }
    command.into_bytes()
}

/// A lock that is a plain key, whose two commands are encoded once and whose name can be changed in place.
#[derive(Debug)]
pub(crate) struct Plain {
    pub(crate) take: Vec<u8>,
    pub(crate) free: Vec<u8>,
    /// Where the number stands in each.
    at: [usize; 2],
}

/// The digits of a number in the name of a key.
const DIGITS: usize = 12;

impl Plain {
    /// The lock of this name and number; `script` is the loaded script that frees it.
    pub(crate) fn new(name: &str, number: u64, script: &str) -> Result<Plain> {
        let digits = format!("{number:0DIGITS$}");
        let key = format!("{name}{digits}");
        let take = encode(&["SET", &key, OWNER, "NX", "PX", "10000"]);
        let free = encode(&["EVALSHA", script, "1", &key, OWNER]);
        let place = |command: &[u8]| {
            let found = command.windows(DIGITS).position(|digit| digit == digits.as_bytes());
            found.ok_or("a key without its number")
        };
        Ok(Plain { at: [place(&take)?, place(&free)?], take, free })
    }

    /// Changes the number in the name.
    pub(crate) fn renumber(&mut self, number: u64) {
        let digits = format!("{number:0DIGITS$}");
        for (command, at) in [&mut self.take, &mut self.free].into_iter().zip(self.at) {
            if let Some(place) = command.get_mut(at..at + DIGITS) {
                place.copy_from_slice(digits.as_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// A client whose server says this, and no more.
    fn told(text: &'static [u8]) -> Raw {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let raw = Raw::connect(&format!("redis://{}/0?x=1", server.local_addr().unwrap())).unwrap();
        server.accept().unwrap().0.write_all(text).unwrap();
        raw
    }

    #[test]
    fn replies_are_parsed_and_compared() {
        let mut raw = told(b":7\r\n$2\r\na\n\r\n$-1\r\n*2\r\n+x\r\n*-1\r\n+OK\r\n-ERR no\r\n:0\r\n");
        assert_eq!(raw.reply().unwrap().int().unwrap(), 7);
        assert_eq!(raw.reply().unwrap(), Reply::Text(b"a\n".to_vec()));
        assert_eq!(raw.reply().unwrap(), Reply::Nil);
        assert_eq!(raw.reply().unwrap(), Reply::Array(vec![Reply::Text(b"x".to_vec()), Reply::Nil]));
        raw.expect(TAKEN).unwrap();
        assert!(raw.has_more());
        assert!(raw.reply().unwrap_err().to_string().contains("no"));
        assert!(raw.expect(FREED).unwrap_err().to_string().contains(":0"));
        assert!(told(b"").reply().unwrap_err().to_string().contains("closed"));
    }

    #[test]
    fn a_reply_may_be_longer_than_the_buffer() {
        const LENGTH: usize = 3 * BUFFER_BYTES;
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut raw = Raw::connect(&format!("redis://{}", server.local_addr().unwrap())).unwrap();
        let mut side = server.accept().unwrap().0;
        let text = format!(":1\r\n{}\r\n", "7".repeat(LENGTH));
        let writer = std::thread::spawn(move || side.write_all(text.as_bytes()).unwrap());
        raw.expect(FREED).unwrap();
        assert_eq!(raw.line().unwrap().len(), LENGTH);
        writer.join().unwrap();
    }

    #[test]
    fn a_number_is_changed_in_both_commands() {
        let mut plain = Plain::new("k/", 0, "sha").unwrap();
        plain.renumber(42);
        assert_eq!(plain.take, Plain::new("k/", 42, "sha").unwrap().take);
        assert_eq!(plain.free, Plain::new("k/", 42, "sha").unwrap().free);
        assert_eq!(encode(&["GET", "k"]), b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n");
    }
}
