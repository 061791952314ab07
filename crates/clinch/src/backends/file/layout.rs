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

use std::time::SystemTime;

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};

use super::ofd::Range;
use crate::name::LockName;

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

/// The byte that guards the header: above all tickets.
pub(super) const META: u64 = 1 << 54;

/// All bytes that anybody keeps locked. Holding it whole is being alone.
pub(super) const ALL: Range = Range { first: 1, last: META };

/// Everything that only its own characters can spell in a file name, and that reads the same in any locale.
const UNSAFE_IN_FILE_NAMES: AsciiSet =
    CONTROLS.add(b' ').add(b'%').add(b'/').add(b'\\').add(b'~').add(b'*').add(b'?').add(b'"').add(b'\'');

/// The longest encoded name that still is its own file name: the limit is 255 with ".lock" and room to spare.
const PLAIN_FILE_NAME: usize = 200;

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

/// Milliseconds of the wall clock since 1970; 0 before.
pub(super) fn millis(wall: SystemTime) -> u64 {
    wall.duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::header::Header;
    use super::super::record::Record;
    use super::*;

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
