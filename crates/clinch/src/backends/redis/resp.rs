//! The wire: commands as bytes, and answers out of bytes, in protocol 2 and 3 of Redis.

use crate::claim::ClaimId;

/// The longest answer that is read, in bytes. A longer one is surely not one to a command of ours.
const MAX_ANSWER: usize = 256 << 20;

/// The longest line: of a number, a status or an error. What has none that short is no Redis.
const MAX_LINE: usize = 64 << 10;

/// How deep lists may lie in each other.
const MAX_DEPTH: usize = 16;

/// For how many values of a list there is room before they have come: a head alone must not cost memory.
const MOST_AT_ONCE: usize = 64;

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

/// A command and its arguments. `Debug` is left out on purpose: a password may be among them.
#[derive(Clone)]
pub(super) struct Command {
    words: u64,
    body: Vec<u8>,
}

/// For how many bytes of arguments there is room at first: most commands are a script's with some keys and an owner.
const ROOM: usize = 512;

/// For how many where there are many keys: a key, and the id and the time that a script is told of it.
const KEY: usize = 96;

/// What can be an argument.
pub(super) trait Arg {
    fn write_to(&self, body: &mut Vec<u8>);
}

impl<T: AsRef<str> + ?Sized> Arg for &T {
    fn write_to(&self, body: &mut Vec<u8>) {
        bulk(body, self.as_ref().as_bytes());
    }
}

/// One argument in several parts.
impl<T: AsRef<[u8]>, const N: usize> Arg for [T; N] {
    fn write_to(&self, body: &mut Vec<u8>) {
        head(body, b'$', self.iter().map(|part| part.as_ref().len() as u64).sum());
        self.iter().for_each(|part| body.extend_from_slice(part.as_ref()));
        body.extend_from_slice(b"\r\n");
    }
}

impl Arg for String {
    fn write_to(&self, body: &mut Vec<u8>) {
        bulk(body, self.as_bytes());
    }
}

impl Arg for ClaimId {
    fn write_to(&self, body: &mut Vec<u8>) {
        bulk(body, &hex_digits(*self));
    }
}

impl Arg for u64 {
    fn write_to(&self, body: &mut Vec<u8>) {
        bulk(body, digits(*self, &mut [0; 20]));
    }
}

/// A number in 16 digits, as scripts compare it as text; a larger one is the largest of these.
pub(super) struct Sixteen(pub(super) u64);

impl Arg for Sixteen {
    fn write_to(&self, body: &mut Vec<u8>) {
        let mut rest = self.0.min(9_999_999_999_999_999);
        let mut digits = [0; 16];
        for digit in digits.iter_mut().rev() {
            *digit = b'0' + (rest % 10) as u8;
            rest /= 10;
        }
        body.extend_from_slice(b"$16\r\n");
        body.extend_from_slice(&digits);
        body.extend_from_slice(b"\r\n");
    }
}

impl Command {
    pub(super) fn new(name: &str) -> Command {
        Command::of_keys(name, 0)
    }

    /// A command of so many keys.
    pub(super) fn of_keys(name: &str, keys: usize) -> Command {
        let mut command = Command { words: 0, body: Vec::with_capacity(ROOM.max(keys * KEY)) };
        command.arg(name);
        command
    }

    pub(super) fn arg(&mut self, arg: impl Arg) -> &mut Command {
        arg.write_to(&mut self.body);
        self.words += 1;
        self
    }

    /// Another command that has one more argument.
    pub(super) fn and(&self, arg: impl Arg) -> Command {
        self.and_keys(arg, 0)
    }

    /// As [`Command::and`], with room for so many keys.
    pub(super) fn and_keys(&self, arg: impl Arg, keys: usize) -> Command {
        let mut body = Vec::with_capacity(ROOM.max(self.body.len() + 64).max(keys * KEY));
        body.extend_from_slice(&self.body);
        let mut command = Command { words: self.words, body };
        command.arg(arg);
        command
    }

    pub(super) fn write_to(&self, out: &mut Vec<u8>) {
        head(out, b'*', self.words);
        out.extend_from_slice(&self.body);
    }
}

fn bulk(out: &mut Vec<u8>, bytes: &[u8]) {
    head(out, b'$', bytes.len() as u64);
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}

/// The line before what has a length.
fn head(out: &mut Vec<u8>, kind: u8, length: u64) {
    if (10..100).contains(&length) {
        // As most are: one copy instead of four.
        let [tens, ones] = [length / 10, length % 10].map(|digit| b'0' + digit as u8);
        return out.extend_from_slice(&[kind, tens, ones, b'\r', b'\n']);
    }
    out.push(kind);
    out.extend_from_slice(digits(length, &mut [0; 20]));
    out.extend_from_slice(b"\r\n");
}

/// A number as text.
pub(super) fn digits(value: u64, room: &mut [u8; 20]) -> &[u8] {
    let (mut rest, mut first) = (value, room.len());
    for digit in room.iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
        first -= 1;
        if rest == 0 {
            break;
        }
    }
    room.get(first..).unwrap_or_default()
}

/// A claim's id as text.
pub(super) fn hex_digits(id: ClaimId) -> [u8; 32] {
    let mut digits = [0; 32];
    for (two, byte) in digits.as_chunks_mut().0.iter_mut().zip(id.bits().to_be_bytes()) {
        *two = [hex(byte >> 4), hex(byte & 15)];
    }
    digits
}

fn hex(nibble: u8) -> u8 {
    nibble + if nibble < 10 { b'0' } else { b'a' - 10 }
}

/// These bytes are no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Nonsense;

/// Reads the answers of one connection. Of an answer that is not all there it keeps what is, so that a long one that comes
/// in many parts is looked at once.
#[derive(Default)]
pub(super) struct Reader {
    /// Lists that are not complete, each inside the one before it.
    open: Vec<Open>,
    /// How many bytes of the answer were taken.
    taken: usize,
}

/// A list of which some values are missing.
struct Open {
    kind: Kind,
    values: Vec<Value>,
    missing: usize,
}

#[derive(Clone, Copy)]
enum Kind {
    List,
    Push,
    /// They belong to the value that follows, and nobody wants to know them.
    Attributes,
}

/// What can be read at once.
enum Part {
    Whole(Value),
    /// The head of a list of so many values.
    Head(Kind, usize),
}

impl Reader {
    /// Takes an answer from the front of `bytes`. `None`: what is left there is the beginning of something.
    pub(super) fn read(&mut self, bytes: &mut &[u8]) -> Result<Option<Value>, Nonsense> {
        loop {
            let before = bytes.len();
            let part = part(bytes)?;
            self.taken += before - bytes.len();
            if self.taken + if part.is_none() { bytes.len() } else { 0 } > MAX_ANSWER {
                return Err(Nonsense);
            }
            let whole = match part {
                None => return Ok(None),
                Some(Part::Whole(value)) => Some(value),
                Some(Part::Head(..)) if self.open.len() >= MAX_DEPTH => return Err(Nonsense),
                Some(Part::Head(kind, missing)) => {
                    let values = Vec::with_capacity(missing.min(MOST_AT_ONCE));
                    self.open.push(Open { kind, values, missing });
                    None
                }
            };
            if let Some(answer) = self.close(whole) {
                self.taken = 0;
                return Ok(Some(answer));
            }
        }
    }

    /// Puts a value where it belongs, and closes the lists that are then complete. The value that lies in no list is an
    /// answer.
    fn close(&mut self, mut whole: Option<Value>) -> Option<Value> {
        loop {
            let Some(list) = self.open.last_mut() else { return whole };
            if let Some(value) = whole.take() {
                list.values.push(value);
                list.missing -= 1;
            }
            if list.missing > 0 {
                return None;
            }
            let Open { kind, values, .. } = self.open.pop()?;
            whole = match kind {
                Kind::List => Some(Value::List(values)),
                Kind::Push => Some(Value::Push(values)),
                Kind::Attributes => None,
            };
        }
    }
}

/// Takes a value that is no list, or the head of a list; nothing when it is not all there.
fn part(bytes: &mut &[u8]) -> Result<Option<Part>, Nonsense> {
    let Some((line, mut rest)) = line(bytes)? else { return Ok(None) };
    let (kind, line) = line.split_first().ok_or(Nonsense)?;
    let head = |kind, each| -> Result<Part, Nonsense> {
        let length = length(line)?;
        Ok(length.map_or(Part::Whole(Value::Nil), |length| Part::Head(kind, length * each)))
    };
    let part = match kind {
        b'+' | b',' | b'(' => Part::Whole(Value::Text(line.to_vec())),
        b'-' => Part::Whole(Value::Error(String::from_utf8_lossy(line).into_owned())),
        b':' => Part::Whole(Value::Int(int(line)?)),
        b'#' => Part::Whole(Value::Int(i64::from(line == b"t"))),
        b'_' => Part::Whole(Value::Nil),
        b'$' | b'=' | b'!' => match length(line)? {
            None => Part::Whole(Value::Nil),
            Some(length) => {
                let Some(text) = text(&mut rest, length)? else { return Ok(None) };
                Part::Whole(match kind {
                    b'!' => Value::Error(String::from_utf8_lossy(text).into_owned()),
                    // A form of three letters and a colon come first.
                    b'=' => Value::Text(text.get(4..).unwrap_or_default().to_vec()),
                    _ => Value::Text(text.to_vec()),
                })
            }
        },
        b'*' | b'~' => head(Kind::List, 1)?,
        b'%' => head(Kind::List, 2)?,
        b'>' => head(Kind::Push, 1)?,
        b'|' => head(Kind::Attributes, 2)?,
        _ => return Err(Nonsense),
    };
    *bytes = rest;
    Ok(Some(part))
}

/// A line, and what follows it.
type Split<'a> = (&'a [u8], &'a [u8]);

fn line(bytes: &[u8]) -> Result<Option<Split<'_>>, Nonsense> {
    match bytes.iter().position(|byte| *byte == b'\n') {
        Some(end) => {
            let (line, rest) = bytes.split_at_checked(end + 1).ok_or(Nonsense)?;
            Ok(Some((line.strip_suffix(b"\r\n").ok_or(Nonsense)?, rest)))
        }
        None if bytes.len() > MAX_LINE => Err(Nonsense),
        None => match bytes.first() {
            Some(kind) if !b"+-:$*_#,(!=%~>|".contains(kind) => Err(Nonsense),
            _ => Ok(None),
        },
    }
}

/// Takes so many bytes and the end of their line.
fn text<'a>(bytes: &mut &'a [u8], length: usize) -> Result<Option<&'a [u8]>, Nonsense> {
    let Some((text, rest)) = bytes.split_at_checked(length) else { return Ok(None) };
    match rest {
        [b'\r', b'\n', rest @ ..] => {
            *bytes = rest;
            Ok(Some(text))
        }
        [] | [b'\r'] => Ok(None),
        _ => Err(Nonsense),
    }
}

fn int(line: &[u8]) -> Result<i64, Nonsense> {
    std::str::from_utf8(line).ok().and_then(|line| line.parse().ok()).ok_or(Nonsense)
}

fn length(line: &[u8]) -> Result<Option<usize>, Nonsense> {
    match int(line)? {
        -1 => Ok(None),
        length => {
            let length = usize::try_from(length).ok().filter(|length| *length <= MAX_ANSWER);
            length.map(Some).ok_or(Nonsense)
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

    /// What a connection that sends these bytes and no more says first, and how many of them that takes.
    fn read(mut bytes: &[u8]) -> Result<Option<(Value, usize)>, Nonsense> {
        let all = bytes.len();
        let value = Reader::default().read(&mut bytes)?;
        Ok(value.map(|value| (value, all - bytes.len())))
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
            .arg(Sixteen(120))
            .arg(Sixteen(u64::MAX))
            .arg(id)
            .write_to(&mut out);
        let max = u64::MAX.to_string();
        let words = [
            "SET",
            "k",
            "ü",
            "ab",
            "0",
            "1203",
            &max,
            "0000000000000120",
            "9999999999999999",
            &id.to_string(),
        ];
        let wanted = Value::List(words.map(text).to_vec());
        assert_eq!(read(&out), Ok(Some((wanted, out.len()))));
    }

    #[test]
    fn an_argument_of_any_length_reads_back() {
        for length in [0, 1, 9, 10, 99, 100, 101, 12_345] {
            let (word, mut out) = ("x".repeat(length), Vec::new());
            Command::new("SET").arg(&word).arg([&word, "y"]).write_to(&mut out);
            let wanted = Value::List([text("SET"), text(&word), text(&format!("{word}y"))].into());
            assert_eq!(read(&out), Ok(Some((wanted, out.len()))), "{length}");
        }
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
            assert_eq!(read(bytes.as_bytes()), Ok(Some((wanted.clone(), bytes.len()))), "{bytes:?}");
            for cut in 0..bytes.len() {
                assert_eq!(read(&bytes.as_bytes()[..cut]), Ok(None), "{bytes:?} up to {cut}");
                let (mut reader, mut first) = (Reader::default(), &bytes.as_bytes()[..cut]);
                assert_eq!(reader.read(&mut first), Ok(None));
                let mut both = [first, &bytes.as_bytes()[cut..]].concat();
                both.extend_from_slice(b":7\r\n");
                let mut both = &both[..];
                assert_eq!(reader.read(&mut both), Ok(Some(wanted.clone())), "{bytes:?} cut at {cut}");
                assert_eq!(reader.read(&mut both), Ok(Some(Value::Int(7))));
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
            assert_eq!(read(bytes.as_bytes()), Err(Nonsense), "{bytes:?}");
        }
    }

    #[test]
    fn a_long_answer_that_comes_in_parts_is_looked_at_once() {
        let (mut reader, mut kept, mut seen) = (Reader::default(), Vec::new(), None);
        let all = "*1000\r\n".to_owned() + &"*2\r\n$3\r\nabc\r\n:12\r\n".repeat(1000);
        for byte in all.bytes() {
            assert_eq!(seen, None);
            kept.push(byte);
            let mut rest = &kept[..];
            seen = reader.read(&mut rest).unwrap();
            assert!(rest.len() < 9, "{} bytes will be looked at again", rest.len());
            kept = rest.to_vec();
        }
        let pair = Value::List(vec![text("abc"), Value::Int(12)]);
        assert_eq!(seen, Some(Value::List(vec![pair; 1000])));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(prop_oneof![any::<u8>(), "[-+:$*%~>|=!_#0-9\r\n]".prop_map(|text| text.as_bytes()[0])], 0..64)) {
            let (mut reader, mut rest) = (Reader::default(), &bytes[..]);
            while let Ok(Some(_)) = reader.read(&mut rest) {}
        }
    }
}
