//! What stands in a lock file, and where. Text, so that `cat` shows it to a person. Pure: bytes in, values out.
//!
//! | bytes | what |
//! | --- | --- |
//! | 0..192 | the header line: name hash, last ticket, reserved ticket, closed time, boot id; of a lock that was kept closed, when it opens and its period |
//! | 192..1024 | the record of a claim that found the lock free, one JSON line |
//! | 1024..3072 | the lock name, percent-encoded, one line |
//! | 4096 + 1024 i | the records of claims that found it taken, by ticket modulo [`RECORDS`] |
//!
//! Header and first record are neighbours so that an uncontended claim reads and writes once. A record counts only while its
//! ticket's byte is locked; what dead claims left behind is overwritten.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use serde::{Deserialize, Serialize};

use super::ofd::Range;
use crate::backend::ClaimState;
use crate::claim::{Claim, ClaimId, Mode, Owner};
use crate::clock::Instant;
use crate::name::LockName;
use crate::token::Token;

/// Live claims that one lock file can tell apart: the length of its queue. The kernel looks through all locks of a file for each question,
/// so who has to know all claims needs a second where there are so many. Each has its place in the file, which is a hole where
/// nobody is.
pub(super) const RECORDS: u64 = 8192;

/// Tickets that are made durable at a time: one fsync per this many claims.
pub(super) const RESERVE: u64 = 1024;

/// Where the first record starts.
pub(super) const HEADER_LEN: usize = 192;

/// The header and so much of the first record that its ticket can be told.
pub(super) const HEAD_LEN: usize = 256;

/// How many tickets pass until the room of those that have passed is given back: on many file systems that writes to the disk.
pub(super) const GIVE_BACK: u64 = 128;

/// The longest record line.
pub(super) const RECORD_LEN: usize = 1024 - HEADER_LEN;

/// Where the name line starts, and its longest form: every byte escaped, and the end of the line.
pub(super) const NAME_AT: u64 = 1024;
pub(super) const NAME_LEN: usize = 3 * LockName::MAX_LEN + 1;

/// Where the places of records start, and how long each is.
pub(super) const RECORDS_AT: u64 = 4096;
const RECORD_ROOM: u64 = 1024;

/// How long a lock file may become.
pub(super) const LONGEST: u64 = RECORDS_AT + RECORDS * RECORD_ROOM;

/// The least that a file system gives back.
const BLOCK: u64 = 4096;

/// The boot of a header whose mark may not have reached the disk yet.
pub(super) const NO_BOOT: u128 = 0;

/// The byte that guards the header: above all tickets.
pub(super) const META: u64 = 1 << 54;

/// All bytes that anybody keeps locked. Holding it whole is being alone.
pub(super) const ALL: Range = Range { first: 1, last: META };

/// Everything that only its own characters can spell in a file name, and that reads the same in any locale.
const UNSAFE_IN_FILE_NAMES: AsciiSet =
    CONTROLS.add(b' ').add(b'%').add(b'/').add(b'\\').add(b'~').add(b'*').add(b'?').add(b'"').add(b'\'');

/// The longest encoded name that still is its own file name: the limit is 255 with ".lock" and room to spare.
const PLAIN_FILE_NAME: usize = 200;

/// The fixed part of a lock file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Of the lock name, against directories that fold case.
    pub(super) name_hash: u128,
    /// The last ticket given, valid for the boot that wrote it.
    pub(super) last: u64,
    /// No ticket above this was ever given; durable, unless the boot is [`NO_BOOT`].
    pub(super) reserved: u64,
    /// Until when nobody is granted, in milliseconds of the wall clock, which alone survives a reboot. 0: the lock is open.
    pub(super) closed: u64,
    /// The boot that wrote this.
    pub(super) boot: u128,
    /// When it opens at the latest, in milliseconds after that boot: the wall clock may be set meanwhile.
    pub(super) opens: u64,
    /// Whether an earlier boot has closed it. Then it opens when the wall clock says so, too.
    pub(super) carried: bool,
    /// For how many seconds it was to be closed. 0 where an earlier version wrote this, or `opens` has no room: then `closed` alone counts.
    pub(super) period: u64,
}

/// The largest `closed`, `opens` and `period` for which the header line has room.
const MOST_CLOSED: u64 = 9_999_999_999_999_999;
const MOST_OPENS: u64 = 999_999_999_999;
const MOST_PERIOD: u64 = 9_999_999_999;

/// A moment on all clocks that tell whether a lock is kept closed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub(super) boot: u128,
    pub(super) since_boot: Instant,
    pub(super) wall: SystemTime,
}

/// How far a closed time that the wall clock tells may be from the one that is counted, since that clock is set right all the time.
const SLEW: Duration = Duration::from_secs(1);

impl Header {
    /// Writes the header line, padded to [`HEADER_LEN`].
    pub(super) fn write(&self, bytes: &mut Vec<u8>) {
        let Header { name_hash, last, reserved, closed, boot, opens, carried, period } = self;
        // Writing to a vector cannot fail.
        let _ = write!(
            bytes,
            "clinch 1 name={name_hash:032x} last={last:016} reserved={reserved:016} closed={closed:016} boot={boot:032x}"
        );
        if *period > 0 {
            let opens_or = if *carried { "latest" } else { "opens" };
            let _ = write!(bytes, " {opens_or}={opens:012} for={period:010}");
        }
        bytes.resize(HEADER_LEN - 1, b' ');
        bytes.push(b'\n');
    }

    /// Reads a header line. `None` for what is not one.
    pub(super) fn parse(bytes: &[u8]) -> Option<Header> {
        let line = std::str::from_utf8(bytes.get(..HEADER_LEN)?).ok()?;
        let mut fields = line.strip_prefix("clinch 1 ")?.trim_end().split(' ');
        let mut field = |key: &str| fields.next()?.strip_prefix(key)?.strip_prefix('=');
        let header = Header {
            name_hash: hex(field("name")?)?,
            last: field("last")?.parse().ok()?,
            reserved: field("reserved")?.parse().ok()?,
            closed: field("closed")?.parse().ok()?,
            boot: hex(field("boot")?)?,
            opens: 0,
            carried: false,
            period: 0,
        };
        let mut counted = || {
            let (key, opens) = fields.next()?.split_once('=')?;
            let period = fields.next()?.strip_prefix("for=")?;
            let carried = match key {
                "opens" => false,
                "latest" => true,
                _ => return None,
            };
            Some(Header { opens: opens.parse().ok()?, carried, period: period.parse().ok()?, ..header })
        };
        Some(counted().unwrap_or(header))
    }

    /// The header as this boot sees it: what an earlier boot gave without making it durable is made up for.
    pub(super) fn in_boot(self, at: &Moment) -> Header {
        if self.boot == at.boot {
            return self;
        }
        let header = Header { last: self.last.max(self.reserved), boot: at.boot, ..self };
        if self.period == 0 {
            return header;
        }
        // What it counted means another moment in this boot. What the wall clock said then stays: that of now may be yet to be set.
        let opens = until(Duration::from_nanos(at.since_boot.as_nanos()), Duration::from_secs(self.period));
        match opens <= MOST_OPENS {
            true => Header { opens, carried: true, ..header },
            false => Header { opens: 0, carried: false, period: 0, ..header },
        }
    }

    /// For how long it is kept closed yet. Within the boot that closed it, the wall clock does not matter; after it, what that says is not
    /// believed for longer than the period: it was ahead then, or is behind now.
    pub(super) fn closed_for(&self, at: &Moment) -> Option<Duration> {
        let left = |until, now| Duration::from_millis(until).saturating_sub(now);
        let counted = || left(self.opens, Duration::from_nanos(at.since_boot.as_nanos()));
        let told = || left(self.closed, Duration::from_millis(millis(at.wall)));
        let left = match (self.period, self.boot == at.boot, self.carried) {
            (0, ..) => told(),
            (_, true, false) => counted(),
            (_, true, true) => counted().min(told()),
            (period, false, _) => told().min(Duration::from_secs(period)),
        };
        (!left.is_zero()).then_some(left)
    }

    /// When it opens, for people. What was written then, as long as the wall clock agrees.
    pub(super) fn closed_until(&self, at: &Moment) -> Option<SystemTime> {
        let counted = at.wall + self.closed_for(at)?;
        let told = SystemTime::UNIX_EPOCH + Duration::from_millis(self.closed);
        let apart = told.duration_since(counted).unwrap_or_else(|error| error.duration());
        Some(if apart < SLEW { told } else { counted })
    }

    /// Keeps it closed for so long.
    pub(super) fn close(self, period: Duration, at: &Moment) -> Header {
        let seconds = period.as_secs() + u64::from(period.subsec_nanos() > 0);
        let closed = until(Duration::from_millis(millis(at.wall)), period).min(MOST_CLOSED);
        let opens = until(Duration::from_nanos(at.since_boot.as_nanos()), period);
        let (opens, period) =
            if opens <= MOST_OPENS && seconds <= MOST_PERIOD { (opens, seconds) } else { (0, 0) };
        Header { closed, opens, carried: false, period, ..self }
    }

    /// Opens it.
    pub(super) fn open(self) -> Header {
        Header { closed: 0, opens: 0, carried: false, period: 0, ..self }
    }
}

/// When a time is over, in milliseconds. Rounded up: a lock must not open early.
fn until(now: Duration, left: Duration) -> u64 {
    u64::try_from((now + left).as_millis()).unwrap_or(u64::MAX).saturating_add(1)
}

/// What a claim says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) ticket: u64,
    #[serde(with = "text")]
    claim: ClaimId,
    #[serde(with = "text")]
    mode: Mode,
    /// Since when it is granted, or queued: milliseconds of the wall clock.
    since: u64,
    /// Not granted yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    waiting: bool,
    /// When the holder will let go unless this is moved: nanoseconds after boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) until: Option<u64>,
    /// Somebody else has ended the claim; its byte does not count from then on: nanoseconds after boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ends: Option<u64>,
    /// Its holder has heard of that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    told: bool,
    owner: Arc<Owner>,
}

/// Values that stand in a record as the text that people see elsewhere too.
mod text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(value: &impl Display, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub(super) fn deserialize<'a, T: FromStr<Err: Display>, D: Deserializer<'a>>(
        from: D,
    ) -> Result<T, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

impl Record {
    pub(super) fn new(claim: &Claim, ticket: u64, granted: bool, wall: SystemTime) -> Record {
        Record {
            ticket,
            claim: claim.id,
            mode: claim.mode,
            since: millis(wall),
            waiting: !granted,
            until: None,
            ends: None,
            told: false,
            owner: claim.owner.clone(),
        }
    }

    /// Writes the record as a line; `None` when it is too long for its place.
    pub(super) fn write(&self, bytes: &mut Vec<u8>) -> Option<()> {
        let start = bytes.len();
        serde_json::to_writer(&mut *bytes, self).ok()?;
        bytes.push(b'\n');
        (bytes.len() - start <= RECORD_LEN).then_some(())
    }

    /// Reads the record at the start of these bytes; what follows its line is left over from an older one.
    pub(super) fn parse(bytes: &[u8]) -> Option<Record> {
        let end = bytes.iter().position(|byte| *byte == b'\n')?;
        serde_json::from_slice(bytes.get(..end)?).ok()
    }

    /// Whether what stands here begins as the record of this ticket does.
    pub(super) fn begins(bytes: &[u8], ticket: u64) -> bool {
        bytes.starts_with(format!("{{\"ticket\":{ticket},").as_bytes())
    }

    pub(super) fn is(&self, id: ClaimId) -> bool {
        self.claim == id
    }

    /// Whether it is of this claim, and nobody has ended that.
    pub(super) fn is_of(&self, id: ClaimId) -> bool {
        self.is(id) && !self.is_ending()
    }

    pub(super) fn mode(&self) -> Mode {
        self.mode
    }

    /// Whether its owner has not seen it granted yet.
    pub(super) fn is_waiting(&self) -> bool {
        self.waiting
    }

    /// Ends it at this moment, if it does not end before.
    pub(super) fn end(&mut self, at: Instant) {
        self.ends = Some(self.ends.map_or(at.as_nanos(), |ends| ends.min(at.as_nanos())));
    }

    /// Whether somebody else has ended it, now or soon.
    pub(super) fn is_ending(&self) -> bool {
        self.ends.is_some()
    }

    /// Whether its byte does not count any more.
    pub(super) fn has_ended(&self, now: Instant) -> bool {
        self.ends.is_some_and(|ends| ends <= now.as_nanos())
    }

    /// Whether the time has passed at which its holder lets go.
    pub(super) fn has_run_out(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| until <= now.as_nanos())
    }

    /// The process that holds it for as long as it likes, since nobody gave it an end.
    pub(super) fn kept_by(&self) -> Option<u32> {
        self.until.is_none().then_some(self.owner.pid)
    }

    /// The same, where it is another than the one that `asks`, or only waits: it would keep to no end. In a container each is
    /// number 1, but of a host of its own, as the store's documentation asks for.
    pub(super) fn is_kept_otherwise(&self, asks: &Claim) -> Option<u32> {
        let own = (&self.owner.host, self.owner.pid) == (&asks.owner.host, asks.owner.pid);
        self.kept_by().filter(|_| !own || self.waiting)
    }

    /// Whether its holder knows that it is ending.
    pub(super) fn was_told(&self) -> bool {
        self.told
    }

    pub(super) fn set_told(&mut self) {
        self.told = true;
    }

    pub(super) fn set_mode(&mut self, mode: Mode) {
        self.mode = mode;
    }

    pub(super) fn set_granted(&mut self, wall: SystemTime) {
        (self.waiting, self.since) = (false, millis(wall));
    }

    pub(super) fn state(&self, now: Instant) -> ClaimState {
        let end = self.until.into_iter().chain(self.ends).min();
        ClaimState {
            id: self.claim,
            mode: self.mode,
            granted: !self.waiting,
            token: Token::new(self.ticket),
            owner: (*self.owner).clone(),
            since: SystemTime::UNIX_EPOCH + Duration::from_millis(self.since),
            expires_in: end.map(|end| Instant::from_nanos(end).since(now)),
        }
    }
}

/// The byte that guards the record of a live ticket while it is changed: above all others.
pub(super) fn record_byte(ticket: u64) -> u64 {
    META + 1 + ticket % RECORDS
}

/// Where the record of a ticket stands if it is not the first one.
pub(super) fn record_at(ticket: u64) -> u64 {
    RECORDS_AT + (ticket % RECORDS) * RECORD_ROOM
}

/// What of a file (offset, length) no claim needs: all between the places of these tickets, where a block of the disk may fit in.
pub(super) fn unused(tickets: &[u64]) -> Vec<(u64, u64)> {
    let mut used: Vec<u64> = tickets.iter().map(|ticket| ticket % RECORDS).chain([RECORDS]).collect();
    used.sort_unstable();
    let mut from = 0;
    let gap = |place: u64| {
        let start = std::mem::replace(&mut from, place + 1);
        (RECORDS_AT + start * RECORD_ROOM, place.saturating_sub(start) * RECORD_ROOM)
    };
    used.into_iter().map(gap).filter(|(_, length)| *length >= BLOCK).collect()
}

/// The name line.
pub(super) fn name_line(name: &LockName) -> String {
    format!("{}\n", utf8_percent_encode(name.as_str(), &UNSAFE_IN_FILE_NAMES))
}

/// Reads the name line.
pub(super) fn parse_name(bytes: &[u8]) -> Option<LockName> {
    let end = bytes.iter().position(|byte| *byte == b'\n')?;
    let text = std::str::from_utf8(bytes.get(..end)?).ok()?;
    LockName::new(percent_decode_str(text).decode_utf8().ok()?).ok()
}

/// The file that holds a lock. One to one for ordinary names; long ones share their start and differ by hash, and the
/// name line settles what a hash cannot.
pub(super) fn file_name(name: &LockName) -> String {
    let mut encoded = utf8_percent_encode(name.as_str(), &UNSAFE_IN_FILE_NAMES).to_string();
    if encoded.starts_with(['.', '-']) {
        encoded = format!(
            "%{:02X}{}",
            encoded.as_bytes().first().copied().unwrap_or(b'.'),
            encoded.get(1..).unwrap_or("")
        );
    }
    if encoded.len() > PLAIN_FILE_NAME {
        let start: String = encoded.chars().take(64).collect();
        encoded = format!("{start}~{:032x}", hash(name));
    }
    format!("{encoded}.lock")
}

/// Whether this file name holds a hash, so that its name line decides.
pub(super) fn is_hashed(file: &str) -> bool {
    file.contains('~')
}

/// The name that a file name spells; `None` for a long one, whose file must be asked, and for other files.
pub(super) fn name_of_file(file: &str) -> Option<LockName> {
    let encoded = file.strip_suffix(".lock").filter(|encoded| !is_hashed(encoded))?;
    LockName::new(percent_decode_str(encoded).decode_utf8().ok()?).ok()
}

/// FNV-1a, 128 bits: the same in every build, for ever. Files outlive programs, so no hasher that may change. It need
/// not resist an attacker: two long names that collide get an error from the name line, never one lock.
pub(super) fn hash(name: &LockName) -> u128 {
    name.as_str().bytes().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash, byte| {
        (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    })
}

/// 32 hexadecimal digits, in two halves: `u128::from_str_radix` takes three times as long.
fn hex(text: &str) -> Option<u128> {
    let (high, low) = text.split_at_checked(16).filter(|(_, low)| low.len() == 16)?;
    let half = |digits| u64::from_str_radix(digits, 16).ok();
    Some(u128::from(half(high)?) << 64 | u128::from(half(low)?))
}

/// Milliseconds of the wall clock since 1970; 0 before.
pub(super) fn millis(wall: SystemTime) -> u64 {
    wall.duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header() -> Header {
        Header {
            name_hash: 7,
            last: 1_763_700_000_000_000,
            reserved: Token::MAX.get(),
            closed: 0,
            boot: u128::MAX,
            opens: 0,
            carried: false,
            period: 0,
        }
    }

    #[test]
    fn a_header_reads_back_and_fills_its_place() {
        let mut line = Vec::new();
        header().write(&mut line);
        assert_eq!(line.len(), HEADER_LEN);
        assert_eq!(Header::parse(&line), Some(header()));
        assert_eq!(Header::parse(&[0; HEADER_LEN]), None);
        assert_eq!(Header::parse(b"clinch 1"), None);
        let full = Header { closed: MOST_CLOSED, opens: MOST_OPENS, period: MOST_PERIOD, ..header() };
        line.clear();
        full.write(&mut line);
        assert_eq!((line.len(), Header::parse(&line)), (HEADER_LEN, Some(full)));
    }

    /// This far from 1970 by the wall clock, and as far after this boot.
    fn moment(boot: u128, wall: u64, since_boot: u64) -> Moment {
        let wall = SystemTime::UNIX_EPOCH + Duration::from_secs(wall);
        Moment { boot, wall, since_boot: Instant::from_nanos(since_boot * 1_000_000_000) }
    }

    const YEAR: u64 = 365 * 24 * 3600;
    const HOUR: Duration = Duration::from_secs(3600);

    /// A wall clock that was ahead once keeps a lock closed for as long as it was ahead.
    #[test]
    fn a_lock_is_closed_for_its_period_whatever_the_wall_clock_says() {
        let closed = header().close(HOUR, &moment(1, 60 * YEAR, 100));
        let closed = Header { boot: 1, ..closed };
        for wall in [0, 57 * YEAR, 60 * YEAR, 63 * YEAR] {
            let left = closed.closed_for(&moment(1, wall, 100 + 3599)).unwrap();
            assert!(left > Duration::from_millis(999) && left < Duration::from_millis(1002), "{left:?}");
            assert_eq!(closed.closed_for(&moment(1, wall, 100 + 3601)), None);
        }
        // After a reboot the wall clock is all there is.
        assert_eq!(closed.closed_for(&moment(2, 60 * YEAR + 3601, 5)), None);
        let over = closed.in_boot(&moment(2, 60 * YEAR + 3601, 5));
        assert_eq!(over.closed_for(&moment(2, 60 * YEAR + 3601, 6)), None);
        assert!(
            over.closed_for(&moment(2, 57 * YEAR, 6)).is_some(),
            "a clock that was ahead has opened it for good"
        );
        let half = closed.closed_for(&moment(2, 60 * YEAR + 1800, 5)).unwrap();
        assert!(half.as_secs() == 1800, "{half:?}");
        let behind = moment(2, 57 * YEAR, 5);
        assert_eq!(closed.closed_for(&behind), Some(HOUR));
        let again = closed.in_boot(&behind);
        assert_eq!(again.closed_for(&moment(2, 57 * YEAR, 5 + 3601)), None, "it never opens");
        assert_eq!(
            again.closed_for(&moment(2, 60 * YEAR + 3601, 6)),
            None,
            "a clock that was set right counts for nothing"
        );
        let third = again.in_boot(&moment(3, 60 * YEAR + 900, 5));
        let left = third.closed_for(&moment(3, 60 * YEAR + 900, 5)).unwrap();
        assert!(left.as_secs() == 2700, "a boot whose clock was behind has opened it early: {left:?}");
        let mut line = Vec::new();
        third.write(&mut line);
        assert_eq!((line.len(), Header::parse(&line)), (HEADER_LEN, Some(third)));
        assert_eq!(
            again.closed_until(&behind).unwrap(),
            SystemTime::UNIX_EPOCH + Duration::from_millis(57 * YEAR * 1000 + 3_600_001)
        );
    }

    /// An earlier version has closed it, and did not say for how long.
    #[test]
    fn what_an_earlier_version_closed_is_closed_until_its_time() {
        let old = Header { closed: 1_000_000, ..header() };
        let mut line = Vec::new();
        old.write(&mut line);
        assert!(!String::from_utf8(line).unwrap().contains("opens"));
        for boot in [u128::MAX, 1] {
            let old = old.in_boot(&moment(boot, 900, 5));
            assert_eq!(old.closed_for(&moment(boot, 999, 5)), Some(Duration::from_secs(1)));
            assert_eq!(old.closed_for(&moment(boot, 1000, 5)), None);
        }
    }

    #[test]
    fn another_boot_goes_on_above_what_may_have_been_given() {
        let seen = Header { last: 5, reserved: 1024, ..header() }.in_boot(&moment(1, 0, 0));
        assert_eq!((seen.last, seen.boot), (1024, 1));
        assert_eq!(Header { last: 5, boot: 1, ..header() }.in_boot(&moment(1, 0, 0)).last, 5);
    }

    #[test]
    fn the_longest_record_fits_its_place() {
        let owner =
            Owner { host: "\"".repeat(64), pid: u32::MAX, user: "\\".repeat(32), label: "\"".repeat(128) };
        let claim = Claim {
            id: ClaimId::from_bits(u128::MAX),
            name: LockName::new("n").unwrap(),
            mode: "4294967295 of 4294967295".parse().unwrap(),
            ttl: Duration::from_secs(1),
            enqueue: true,
            place: false,
            isolated: false,
            owner: Arc::new(owner),
        };
        let mut record = Record::new(&claim, Token::MAX.get(), false, SystemTime::now());
        (record.until, record.ends, record.told) = (Some(u64::MAX), Some(u64::MAX), true);
        let mut line = Vec::new();
        record.write(&mut line).unwrap();
        line.extend_from_slice(b"rest of an older record\n");
        assert_eq!(Record::parse(&line), Some(record.clone()));
        assert!(record.is(claim.id) && !record.is(ClaimId::from_bits(1)));
    }

    proptest! {
        /// What is emptied must be nobody's, and what is nobody's is, so that a file does not grow.
        #[test]
        fn what_is_unused_is_between_the_places_of_live_claims(first in 1..1u64 << 53, live in prop::collection::vec(0..RECORDS, 0..20)) {
            let tickets: Vec<u64> = live.iter().map(|ticket| first + ticket).collect();
            let parts = unused(&tickets);
            let free: u64 = parts.iter().map(|(_, length)| length).sum();
            prop_assert!(free >= (RECORDS - tickets.len() as u64 * (BLOCK / RECORD_ROOM)) * RECORD_ROOM - BLOCK);
            for (at, length) in parts {
                prop_assert!(at >= RECORDS_AT && at + length <= LONGEST);
                for ticket in &tickets {
                    let place = record_at(*ticket);
                    prop_assert!(place + RECORD_ROOM <= at || place >= at + length);
                }
            }
        }

        #[test]
        fn file_names_are_valid_and_spell_their_names(name in "\\PC{1,40}|[./%~a-zA-Z -]{1,40}") {
            let name = LockName::new(name).unwrap();
            let file = file_name(&name);
            prop_assert!(file.len() <= 255 && !file.contains('/') && !file.starts_with('.') && !file.starts_with('-'));
            if !is_hashed(&file) {
                prop_assert_eq!(name_of_file(&file), Some(name.clone()));
            }
            prop_assert_eq!(parse_name(name_line(&name).as_bytes()), Some(name));
        }

        #[test]
        fn garbage_is_no_header_and_no_record(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = (Header::parse(&bytes), Record::parse(&bytes), parse_name(&bytes));
        }
    }

    #[test]
    fn the_longest_name_fits_its_line() {
        let name = LockName::new("\u{1}".repeat(512)).unwrap();
        assert!(name_line(&name).len() <= NAME_LEN);
        assert_eq!(parse_name(name_line(&name).as_bytes()), Some(name.clone()));
        assert!(file_name(&name).len() <= 255);
    }
}
