//! The wire: commands as bytes, and answers out of bytes, in protocol 2 and 3 of Redis.

use crate::claim::ClaimId;

/// The longest answer that is read, in bytes. A longer one is surely not one to a command of ours.
const MAX_ANSWER: usize = 256 << 20;

/// The longest line: of a number, a status or an error. What has none that short is no Redis.
const MAX_LINE: usize = 64 << 10;

/// How deep lists may lie in each other.
const MAX_DEPTH: u32 = 16;

/// An answer, or a part of one. What the two protocols tell apart and no caller does is one thing here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Value {
    Nil,
    Int(i64),
    /// A status or a string, which may be no text.
    Text(Vec<u8>),
    /// A list, a set, or keys and values of a map in turn.
    List(Vec<Value>),
    /// Not an answer, but something that the server says by itself.
    Push(Vec<Value>),
    /// What the server refused, and why.
    Error(String),
}

impl Value {
    /// Its text, if it is one.
    pub(super) fn text(&self) -> Option<&str> {
        match self {
            Value::Text(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }
}

/// A command and its arguments.
#[derive(Clone, Debug)]
pub(super) struct Command {
    words: u64,
    body: Vec<u8>,
}

/// What can be an argument.
pub(super) trait Arg {
    fn write_to(&self, body: &mut Vec<u8>);
}

impl<T: AsRef<str> + ?Sized> Arg for &T {
    fn write_to(&self, body: &mut Vec<u8>) {
        bulk(body, self.as_ref());
    }
}

/// One argument in several parts.
impl<const N: usize> Arg for [&str; N] {
    fn write_to(&self, body: &mut Vec<u8>) {
        body.push(b'$');
        number(body, self.iter().map(|part| part.len() as u64).sum());
        body.extend_from_slice(b"\r\n");
        self.iter().for_each(|part| body.extend_from_slice(part.as_bytes()));
        body.extend_from_slice(b"\r\n");
    }
}

impl Arg for String {
    fn write_to(&self, body: &mut Vec<u8>) {
        bulk(body, self);
    }
}

impl Arg for ClaimId {
    fn write_to(&self, body: &mut Vec<u8>) {
        let mut digits = [0; 32];
        for (two, byte) in digits.as_chunks_mut().0.iter_mut().zip(self.bits().to_be_bytes()) {
            *two = [hex(byte >> 4), hex(byte & 15)];
        }
        body.extend_from_slice(b"$32\r\n");
        body.extend_from_slice(&digits);
        body.extend_from_slice(b"\r\n");
    }
}

impl Arg for u64 {
    fn write_to(&self, body: &mut Vec<u8>) {
        let digits = self.checked_ilog10().unwrap_or(0) + 1;
        body.push(b'$');
        number(body, u64::from(digits));
        body.extend_from_slice(b"\r\n");
        number(body, *self);
        body.extend_from_slice(b"\r\n");
    }
}

impl Command {
    pub(super) fn new(name: &str) -> Command {
        // Most commands are a script's with some keys and an owner.
        let mut command = Command { words: 0, body: Vec::with_capacity(512) };
        command.arg(name);
        command
    }

    pub(super) fn arg(&mut self, arg: impl Arg) -> &mut Command {
        arg.write_to(&mut self.body);
        self.words += 1;
        self
    }

    pub(super) fn write_to(&self, out: &mut Vec<u8>) {
        out.push(b'*');
        number(out, self.words);
        out.extend_from_slice(b"\r\n");
        out.extend_from_slice(&self.body);
    }
}

fn bulk(out: &mut Vec<u8>, text: &str) {
    out.push(b'$');
    number(out, text.len() as u64);
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(text.as_bytes());
    out.extend_from_slice(b"\r\n");
}

fn number(out: &mut Vec<u8>, value: u64) {
    let mut digits = [0; 20];
    let mut rest = value;
    let mut first = digits.len();
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
        first -= 1;
        if rest == 0 {
            break;
        }
    }
    out.extend_from_slice(digits.get(first..).unwrap_or_default());
}

fn hex(nibble: u8) -> u8 {
    nibble + if nibble < 10 { b'0' } else { b'a' - 10 }
}

/// Why no answer could be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// It is not all there yet.
    Unfinished,
    /// These bytes are no answer.
    Nonsense,
}

/// Reads the answer that `bytes` begin with, and says how many of them it took.
pub(super) fn read(bytes: &[u8]) -> Result<(Value, usize), Stop> {
    let mut reader = Reader { rest: bytes };
    match reader.value(0) {
        Err(Stop::Unfinished) if bytes.len() > MAX_ANSWER => Err(Stop::Nonsense),
        Err(stop) => Err(stop),
        Ok(value) => Ok((value, bytes.len() - reader.rest.len())),
    }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn value(&mut self, depth: u32) -> Result<Value, Stop> {
        let (kind, line) = self.line()?.split_first().ok_or(Stop::Nonsense)?;
        Ok(match kind {
            b'+' | b',' | b'(' => Value::Text(line.to_vec()),
            b'-' => Value::Error(String::from_utf8_lossy(line).into_owned()),
            b':' => Value::Int(int(line)?),
            b'#' => Value::Int(i64::from(line == b"t")),
            b'_' => Value::Nil,
            b'$' => self.bytes(line)?.map_or(Value::Nil, |bytes| Value::Text(bytes.to_vec())),
            // A form of three letters and a colon come first.
            b'=' => {
                Value::Text(self.bytes(line)?.and_then(|bytes| bytes.get(4..)).unwrap_or_default().to_vec())
            }
            b'!' => Value::Error(String::from_utf8_lossy(self.bytes(line)?.unwrap_or_default()).into_owned()),
            b'*' | b'~' => self.list(line, 1, depth)?.map_or(Value::Nil, Value::List),
            b'%' => self.list(line, 2, depth)?.map_or(Value::Nil, Value::List),
            b'>' => Value::Push(self.list(line, 1, depth)?.unwrap_or_default()),
            b'|' => {
                // Attributes of the value that follows.
                self.list(line, 2, depth)?;
                self.value(depth + 1)?
            }
            _ => return Err(Stop::Nonsense),
        })
    }

    fn line(&mut self) -> Result<&'a [u8], Stop> {
        match self.rest.iter().position(|byte| *byte == b'\n') {
            Some(end) => {
                let (line, rest) = self.rest.split_at_checked(end + 1).ok_or(Stop::Unfinished)?;
                self.rest = rest;
                line.strip_suffix(b"\r\n").ok_or(Stop::Nonsense)
            }
            None if self.rest.len() > MAX_LINE => Err(Stop::Nonsense),
            None => match self.rest.first() {
                Some(kind) if !b"+-:$*_#,(!=%~>|".contains(kind) => Err(Stop::Nonsense),
                _ => Err(Stop::Unfinished),
            },
        }
    }

    /// As many bytes as the line says; `None` where it says that there is no string.
    fn bytes(&mut self, line: &[u8]) -> Result<Option<&'a [u8]>, Stop> {
        let Some(length) = length(line)? else { return Ok(None) };
        let (bytes, rest) = self.rest.split_at_checked(length).ok_or(Stop::Unfinished)?;
        match rest {
            [b'\r', b'\n', rest @ ..] => {
                self.rest = rest;
                Ok(Some(bytes))
            }
            [] | [b'\r'] => Err(Stop::Unfinished),
            _ => Err(Stop::Nonsense),
        }
    }

    /// `each` values for every one that the line counts; `None` where it says that there is no list.
    fn list(&mut self, line: &[u8], each: usize, depth: u32) -> Result<Option<Vec<Value>>, Stop> {
        let Some(length) = length(line)? else { return Ok(None) };
        if depth >= MAX_DEPTH {
            return Err(Stop::Nonsense);
        }
        (0..length * each).map(|_| self.value(depth + 1)).collect::<Result<_, _>>().map(Some)
    }
}

fn int(line: &[u8]) -> Result<i64, Stop> {
    std::str::from_utf8(line).ok().and_then(|line| line.parse().ok()).ok_or(Stop::Nonsense)
}

fn length(line: &[u8]) -> Result<Option<usize>, Stop> {
    match int(line)? {
        -1 => Ok(None),
        length => {
            let length = usize::try_from(length).ok().filter(|length| *length <= MAX_ANSWER);
            length.map(Some).ok_or(Stop::Nonsense)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text(text: &str) -> Value {
        Value::Text(text.as_bytes().to_vec())
    }

    #[test]
    fn a_command_is_a_list_of_strings() {
        let mut out = Vec::new();
        let id = ClaimId::from_bits(0x1f << 60);
        Command::new("SET")
            .arg("k")
            .arg(String::from("ü"))
            .arg(["a", "", "b"])
            .arg(0)
            .arg(1203)
            .arg(u64::MAX)
            .arg(id)
            .write_to(&mut out);
        let max = u64::MAX.to_string();
        let words = ["SET", "k", "ü", "ab", "0", "1203", &max, &id.to_string()];
        let wanted = Value::List(words.map(text).to_vec());
        assert_eq!(read(&out), Ok((wanted, out.len())));
    }

    #[test]
    fn both_protocols_read_back() {
        for (bytes, wanted) in [
            ("+OK\r\n", text("OK")),
            ("-ERR no\r\n", Value::Error("ERR no".into())),
            (":-7\r\n", Value::Int(-7)),
            ("$-1\r\n", Value::Nil),
            ("*-1\r\n", Value::Nil),
            ("_\r\n", Value::Nil),
            ("$0\r\n\r\n", text("")),
            ("$4\r\na\r\nb\r\n", text("a\r\nb")),
            ("#t\r\n", Value::Int(1)),
            (",1.5\r\n", text("1.5")),
            ("(12345678901234567890\r\n", text("12345678901234567890")),
            ("=7\r\ntxt:abc\r\n", text("abc")),
            ("!5\r\nERR x\r\n", Value::Error("ERR x".into())),
            ("%1\r\n+k\r\n:1\r\n", Value::List(vec![text("k"), Value::Int(1)])),
            ("~1\r\n*1\r\n_\r\n", Value::List(vec![Value::List(vec![Value::Nil])])),
            ("|1\r\n+ttl\r\n:1\r\n:2\r\n", Value::Int(2)),
            (">2\r\n+invalidate\r\n_\r\n", Value::Push(vec![text("invalidate"), Value::Nil])),
        ] {
            assert_eq!(read(bytes.as_bytes()), Ok((wanted, bytes.len())), "{bytes:?}");
            for cut in 0..bytes.len() {
                assert_eq!(read(&bytes.as_bytes()[..cut]), Err(Stop::Unfinished), "{bytes:?} up to {cut}");
            }
        }
    }

    #[test]
    fn what_is_no_redis_is_told_at_once() {
        let deep = "*1\r\n".repeat(100);
        let long = "+".repeat(MAX_LINE + 2);
        for bytes in [
            "HTTP/1.1 400",
            "\x15\x03\x03",
            "\r\n",
            "$x\r\n",
            "$-2\r\n",
            "*999999999999\r\n",
            "$1\r\nab\r\n",
            ":\n",
            &deep,
            &long,
        ] {
            assert_eq!(read(bytes.as_bytes()), Err(Stop::Nonsense), "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(prop_oneof![any::<u8>(), "[-+:$*%~>|=!_#0-9\r\n]".prop_map(|text| text.as_bytes()[0])], 0..64)) {
            let _ = read(&bytes);
        }
    }
}
