//! One open lock file: who is live in it. A claim is live while its description keeps the byte of its ticket locked.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::SystemTime;

use rustix::fs::FallocateFlags;

use super::dir::{self, Dir, Stamp, kind};
use super::header::Header;
use super::layout::{self, ALL, HEADER_LEN, META, RECORD_LEN, RECORDS};
use super::ofd::{self, Range};
use super::record::Record;
use super::times::{PAUSE_BETWEEN_TRIES, TRIES, TRIES_THAT_YIELD, TRIES_TO_READ};
use crate::backend::ClaimState;
use crate::claim::{ClaimId, Mode, Owner};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;
use crate::token::Token;

/// The owner of a claim whose record cannot be read.
const UNKNOWN: &str = "somebody whose record is damaged";

/// A lock file, open in a description of its own.
#[derive(Debug)]
pub(super) struct LockFile {
    file: OwnedFd,
}

/// A claim whose byte is locked.
#[derive(Clone, Debug)]
pub(super) struct Live {
    pub(super) ticket: u64,
    /// `None` while its owner is between locking the byte and writing the record, which is shorter than any wait.
    pub(super) record: Option<Record>,
}

impl Live {
    /// Whether it still counts: nobody has taken it away.
    pub(super) fn counts(&self, now: Instant) -> bool {
        self.record.as_ref().is_none_or(|record| !record.has_ended(now))
    }

    /// What is told of it. Who has a byte and no record that can be read holds the lock, for all that anybody knows.
    pub(super) fn state(&self, now: Instant) -> ClaimState {
        let unknown = || ClaimState {
            id: ClaimId::from_bits(0),
            mode: self.mode(),
            granted: true,
            token: Token::new(self.ticket),
            owner: Owner { host: UNKNOWN.into(), pid: 0, user: String::new(), label: String::new() },
            since: SystemTime::UNIX_EPOCH,
            expires_in: None,
        };
        self.record.as_ref().map_or_else(unknown, |record| record.state(now))
    }

    /// Its mode; exclusive, the strictest, while that is not known.
    pub(super) fn mode(&self) -> Mode {
        self.record.as_ref().map_or(Mode::Exclusive, Record::mode)
    }
}

impl LockFile {
    pub(super) fn new(file: OwnedFd) -> LockFile {
        LockFile { file }
    }

    pub(super) fn descriptor(&self) -> &OwnedFd {
        &self.file
    }

    /// The header; `None` while the file is new.
    pub(super) fn header(&self) -> Result<Option<Header>> {
        Ok(self.head()?.map(|(header, _)| header))
    }

    /// The header, and whether the first record is not the one of its last ticket.
    pub(super) fn head(&self) -> Result<Option<(Header, bool)>> {
        let mut bytes = [0; layout::HEAD_LEN];
        let len = self.read(&mut bytes, 0)?;
        let bytes = bytes.get(..len).unwrap_or_default();
        let first = bytes.get(HEADER_LEN..).unwrap_or_default();
        match Header::parse(bytes) {
            Some(header) => Ok(Some((header, !Record::begins(first, header.last)))),
            None if bytes.iter().all(|byte| *byte == 0) => Ok(None),
            None => Err(self.damaged()?),
        }
    }

    fn damaged(&self) -> Result<Error> {
        let error = Error::new(
            ErrorKind::Unsupported,
            "does not begin with a clinch header: damaged, or not a lock file",
        );
        // Who comes after it was moved away would not meet those who are in it.
        Ok(error.with_remedy(match self.tickets(META - 1)?.is_empty() {
            true => "nobody is in it: move it away",
            false => "somebody holds its lock yet: leave it where it is, and end their jobs first (fuser tells who has it open)",
        }))
    }

    /// The name line, which hashed file names need.
    pub(super) fn stored_name(&self) -> Result<Option<LockName>> {
        let mut bytes = [0; layout::NAME_LEN];
        let len = self.read(&mut bytes, layout::NAME_AT)?;
        Ok(layout::parse_name(bytes.get(..len).unwrap_or_default()))
    }

    pub(super) fn check_name(&self, name: &LockName) -> Result<()> {
        match self.stored_name()? {
            Some(stored) if stored == *name => Ok(()),
            _ => Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "lock name \"{name}\" has the same hash as another long name in this directory; choose another"
                ),
            )),
        }
    }

    /// The claims with tickets up to `last` whose bytes are locked, in order. One's own is not among them.
    pub(super) fn live(&self, last: u64) -> Result<Vec<Live>> {
        let tickets = self.tickets(last)?;
        if tickets.is_empty() {
            return Ok(Vec::new());
        }
        let first = self.record_at(HEADER_LEN as u64)?;
        let with_record = |ticket| {
            let record = match &first {
                Some(first) if first.ticket == ticket => Some(first.clone()),
                _ => self.record(ticket)?,
            };
            Ok(Live { ticket, record })
        };
        tickets.into_iter().map(with_record).collect()
    }

    /// The same for who tells people of it: a claim that has no record then has a damaged one, and is not just being made. That holds
    /// unless the header is kept busy for longer than it should be.
    pub(super) fn live_for_people(&self) -> Result<Vec<Live>> {
        let mut live = self.live(META - 1)?;
        for attempt in 0..TRIES {
            if live.iter().all(|live| live.record.is_some()) {
                break;
            }
            // Who is between its byte and its record has the header. Its byte was locked before this look.
            let is_made = ofd::find(&self.file, Range { first: META, last: META }).map_err(failed)?.is_none();
            let mut settled = Vec::with_capacity(live.len());
            for Live { ticket, record } in live {
                let record = record.map_or_else(|| self.record(ticket), |record| Ok(Some(record)))?;
                // Another's record may stand in the place of one that has left.
                if record.is_some() || self.live_at(ticket)?.is_some() {
                    settled.push(Live { ticket, record });
                }
            }
            live = settled;
            if is_made {
                break;
            }
            pause(attempt);
        }
        Ok(live)
    }

    /// The claim with the lowest ticket, if its byte is not one's own.
    pub(super) fn first_live(&self) -> Result<Option<Live>> {
        let mut first = None;
        // The kernel finds some lock, not the lowest; what lies below it is a part of a queue, so this is soon over.
        while let Some(range) = below(first)
            && let Some(found) = ofd::find(&self.file, range).map_err(failed)?
        {
            first = Some(found);
        }
        match first.filter(|found| found.last < META) {
            Some(found) => Ok(Some(Live { ticket: found.last, record: self.record(found.last)? })),
            None => Ok(None),
        }
    }

    /// The claim with this ticket, if its byte is locked.
    pub(super) fn live_at(&self, ticket: u64) -> Result<Option<Live>> {
        match ofd::find(&self.file, Range { first: ticket, last: ticket }).map_err(failed)? {
            Some(found) if found.last == ticket => Ok(Some(Live { ticket, record: self.record(ticket)? })),
            _ => Ok(None),
        }
    }

    /// Tickets whose bytes are locked, in order.
    pub(super) fn tickets(&self, last: u64) -> Result<Vec<u64>> {
        let mut tickets = Vec::new();
        let mut todo = vec![Range { first: ALL.first, last }];
        while let Some(range) = todo.pop() {
            if range.first > range.last {
                continue;
            }
            let Some(found) = ofd::find(&self.file, range).map_err(failed)? else { continue };
            // A claim that found the file empty keeps everything up to its ticket, and for a moment everything.
            if found.last <= last {
                tickets.push(found.last);
            }
            if tickets.len() as u64 > RECORDS {
                // Each question costs the kernel a look at all of them.
                let message =
                    format!("another program locks bytes of the lock file: there are more than {RECORDS}");
                return Err(Error::new(ErrorKind::Refused, message));
            }
            if found.first > range.first {
                todo.push(Range { first: range.first, last: found.first - 1 });
            }
            if found.last < range.last {
                todo.push(Range { first: found.last + 1, last: range.last });
            }
        }
        tickets.sort_unstable();
        Ok(tickets)
    }

    /// The record of a live ticket.
    pub(super) fn record(&self, ticket: u64) -> Result<Option<Record>> {
        for _ in 0..TRIES_TO_READ {
            for at in [layout::record_at(ticket), HEADER_LEN as u64] {
                if let Some(record) = self.record_at(at)?
                    && record.ticket == ticket
                {
                    return Ok(Some(record));
                }
            }
        }
        Ok(None)
    }

    fn record_at(&self, at: u64) -> Result<Option<Record>> {
        let mut bytes = [0; RECORD_LEN];
        let len = self.read(&mut bytes, at)?;
        Ok(Record::parse(bytes.get(..len).unwrap_or_default()))
    }

    /// Rewrites the record of a live ticket, wherever it stands.
    pub(super) fn rewrite(&self, record: &Record) -> Result<()> {
        let first = self.record_at(HEADER_LEN as u64)?.is_some_and(|first| first.ticket == record.ticket);
        let at = if first { HEADER_LEN as u64 } else { layout::record_at(record.ticket) };
        self.write(&line(record)?, at)
    }

    /// Lets go of everything, in all processes that share the description.
    pub(super) fn unlock_all(&self) -> Result<()> {
        ofd::unlock(&self.file, ALL).map_err(failed)
    }

    /// Which file this is, and when anything about it last changed.
    pub(super) fn stamp(&self) -> Result<Stamp> {
        let stat = rustix::fs::fstat(&self.file).map_err(|error| failed(error.into()))?;
        Ok(Stamp::from(stat))
    }

    fn read(&self, bytes: &mut [u8], at: u64) -> Result<usize> {
        loop {
            match rustix::io::pread(&self.file, &mut *bytes, at) {
                Err(rustix::io::Errno::INTR) => {}
                result => return result.map_err(|error| failed(error.into())),
            }
        }
    }

    pub(super) fn write(&self, mut bytes: &[u8], mut at: u64) -> Result<()> {
        while !bytes.is_empty() {
            match rustix::io::pwrite(&self.file, bytes, at) {
                Ok(0) => return Err(failed(io::ErrorKind::WriteZero.into())),
                Ok(len) => {
                    bytes = bytes.get(len..).unwrap_or_default();
                    at += len as u64;
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(failed(error.into())),
            }
        }
        Ok(())
    }

    /// Gives back the room of records that nobody needs, in the name of who has this ticket. Else a lock that many have waited for would keep room
    /// for all of them for ever.
    pub(super) fn give_back(&self, own: u64) -> Result<()> {
        let mut live = self.tickets(META - 1)?;
        live.push(own);
        for (at, length) in layout::unused(&live) {
            let holes = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // Not every file system can.
            let _ = rustix::fs::fallocate(&self.file, holes, at, length);
        }
        Ok(())
    }

    /// Gives back the room of all records but the first, whose holder alone may be in the file.
    pub(super) fn give_all_back(&self) {
        // Where that fails it is tried again by the next.
        let _ = rustix::fs::ftruncate(&self.file, layout::RECORDS_AT);
    }

    /// Lets go of everything, and gives back the room of all records where nobody else is: a lock that a crowd has used, and nobody since,
    /// would keep it.
    pub(super) fn leave_place(&self) -> Result<()> {
        // Whatever fails here, it must be left.
        if ofd::try_lock(&self.file, ALL).unwrap_or(false) {
            self.give_all_back();
        }
        self.unlock_all()
    }

    pub(super) fn sync(&self) -> Result<()> {
        rustix::fs::fsync(&self.file).map_err(|error| failed(error.into()))
    }
}

impl AsFd for LockFile {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.file.as_fd()
    }
}

pub(super) fn pause(attempt: u32) {
    if attempt < TRIES_THAT_YIELD {
        std::thread::yield_now();
    } else {
        std::thread::sleep(PAUSE_BETWEEN_TRIES);
    }
}

/// The tickets below a range that was found; all of them at first.
fn below(found: Option<Range>) -> Option<Range> {
    match found {
        None => Some(Range { first: ALL.first, last: META - 1 }),
        Some(found) if found.first > ALL.first => Some(Range { first: ALL.first, last: found.first - 1 }),
        Some(_) => None,
    }
}

/// A record as its line.
pub(super) fn line(record: &Record) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(RECORD_LEN);
    record.write(&mut bytes).ok_or_else(too_long)?;
    Ok(bytes)
}

pub(super) fn too_long() -> Error {
    Error::invalid("host, user and label of the owner do not fit into a lock file's record")
}

/// An error of a damaged file with the file's path.
pub(super) fn in_file(dir: &Dir, file: &str, error: Error) -> Error {
    match error.kind() {
        ErrorKind::Unsupported => error.at(dir.lock_path(file).display()),
        _ => error,
    }
}

/// An I/O error as this crate's.
pub(super) fn failed(error: io::Error) -> Error {
    let message = match kind(&error) {
        ErrorKind::Exhausted => "no room for the lock's record; free some disk space, quota or kernel locks",
        ErrorKind::Refused if error.kind() == io::ErrorKind::NotSeekable => {
            "what stands in place of the lock file is no regular file; remove it"
        }
        ErrorKind::Refused if dir::is_unsupported(&error) => {
            "the file system cannot do what a lock file needs; use a directory on another file system"
        }
        ErrorKind::Refused => "the lock file may not be written; is the file system read-only?",
        _ => "reading or writing a lock file failed",
    };
    Error::new(kind(&error), message).with_source(error)
}
