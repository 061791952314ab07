//! A lock file that is held so that nobody else changes it: how a ticket is taken, and records are changed.
//!
//! The claim's ticket is a byte that its description keeps locked. A claim that finds the file wholly unlocked takes
//! everything in one call and lets go of what lies above its ticket: two calls for lock, check and slot together, and
//! no lower ticket can come to life again, since tickets only rise. Otherwise the byte [`META`] guards the header while a ticket is
//! taken, and the ticket's byte is locked *before* the ticket is published, so that whoever sees a later ticket sees
//! this one too.

use std::time::{Duration, SystemTime};

use super::dir::Dir;
use super::header::{Header, Moment, NO_BOOT};
use super::layout::{self, ALL, GIVE_BACK, HEADER_LEN, META, RECORD_LEN, RECORDS, RESERVE};
use super::lock_file::{Live, LockFile, failed, in_file, line, pause, too_long};
use super::ofd::{self, Range};
use super::record::Record;
use super::times::TRIES;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::name::LockName;
use crate::token::Token;

/// The header, held so that nobody else changes it or takes a ticket.
pub(super) struct Held<'a> {
    file: &'a LockFile,
    pub(super) header: Header,
    /// Whether claims have come since the last that found the file unlocked, whose records may stand in the places.
    crowded: bool,
    /// What is to be unlocked at the end.
    range: Range,
}

/// The record of a live ticket, held so that nobody else changes it.
pub(super) struct HeldRecord<'a> {
    file: &'a LockFile,
    ticket: u64,
    range: Range,
}

/// What a lock file must know of the world outside it.
pub(super) struct World<'a> {
    pub(super) dir: &'a Dir,
    pub(super) name: &'a LockName,
    /// The name of the lock's file.
    pub(super) file: String,
    pub(super) hash: u128,
    pub(super) boot: u128,
    pub(super) env: &'a Env,
    pub(super) wall: SystemTime,
}

impl Moment {
    pub(super) fn now(env: &Env, boot: u128) -> Moment {
        Moment { boot, since_boot: env.now(), wall: env.clock().wall() }
    }
}

impl World<'_> {
    pub(super) fn moment(&self) -> Moment {
        Moment { boot: self.boot, since_boot: self.env.now(), wall: self.wall }
    }

    /// A new file's header. Tickets start at the wall clock in microseconds, so that they rise even over the removal of
    /// the whole directory.
    fn new_header(&self) -> Header {
        let start = self.wall.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_micros());
        let start = u64::try_from(start).unwrap_or(0).min(Token::MAX.get() / 2).max(1);
        Header {
            name_hash: self.hash,
            last: start,
            reserved: start,
            closed: 0,
            boot: self.boot,
            opens: 0,
            carried: false,
            period: 0,
        }
    }
}

impl LockFile {
    /// Takes the whole file if nobody is in it.
    pub(super) fn hold_alone(&self, world: &World<'_>) -> Result<Option<Held<'_>>> {
        if !ofd::try_lock(self, ALL).map_err(failed)? {
            return Ok(None);
        }
        self.held(world, ALL).map(Some)
    }

    /// Takes the header. `None` when somebody has had it for longer than it takes to use it.
    pub(super) fn hold(&self, world: &World<'_>) -> Result<Option<Held<'_>>> {
        let meta = Range { first: META, last: META };
        if self.lock_soon(meta)? { self.held(world, meta).map(Some) } else { Ok(None) }
    }

    /// As [`LockFile::hold`], for operations that cannot wait for another chance.
    pub(super) fn hold_or_fail(&self, world: &World<'_>) -> Result<Held<'_>> {
        self.hold(world)?.ok_or_else(|| kept_busy(world.name))
    }

    /// Takes the record of a live ticket, so that nobody else changes it: two who read and rewrite it at once would undo
    /// one another's change. `None` when somebody has had it for longer than that takes.
    pub(super) fn hold_record(&self, ticket: u64) -> Result<Option<HeldRecord<'_>>> {
        let byte = layout::record_byte(ticket);
        let range = Range { first: byte, last: byte };
        Ok(self.lock_soon(range)?.then_some(HeldRecord { file: self, ticket, range }))
    }

    fn lock_soon(&self, range: Range) -> Result<bool> {
        for attempt in 0..TRIES {
            if ofd::try_lock(self, range).map_err(failed)? {
                return Ok(true);
            }
            pause(attempt);
        }
        Ok(false)
    }

    fn held(&self, world: &World<'_>, range: Range) -> Result<Held<'_>> {
        let mut held = Held { file: self, header: world.new_header(), crowded: false, range };
        match self.head().map_err(|error| in_file(world.dir, &world.file, error))? {
            Some((header, _)) if header.name_hash != world.hash => Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the lock directory does not tell \"{}\" from another name; does it fold case?",
                    world.name
                ),
            )),
            Some((header, crowded)) => {
                (held.header, held.crowded) = (header, crowded);
                if header.boot != world.boot {
                    held.header = header.in_boot(&world.moment());
                    // Counted from the first look of this boot on, not from each.
                    if held.header.opens != header.opens {
                        held.write_header()?;
                    }
                }
                if layout::is_hashed(&world.file) {
                    self.check_name(world.name)?;
                }
                Ok(held)
            }
            None => {
                if range != ALL
                    && let Some(last) = self.tickets(META - 1)?.last()
                {
                    // Somebody emptied the file under those who are in it; who comes after them comes later.
                    held.header.last = held.header.last.max(*last);
                    held.header.reserved = held.header.last;
                }
                held.init(world)?;
                Ok(held)
            }
        }
    }
}

impl Held<'_> {
    /// Writes a new file: the name, then the header. Its name in the directory is durable before anybody takes a ticket,
    /// for the header alone says that there is nothing left to do here.
    fn init(&self, world: &World<'_>) -> Result<()> {
        self.file.write(layout::name_line(world.name).as_bytes(), layout::NAME_AT)?;
        world.dir.sync().map_err(failed)?;
        self.write_header()
    }

    /// The next ticket. Makes a block of them durable when the last block is used up.
    fn next_ticket(&mut self, live: &[Live]) -> Result<u64> {
        // Somebody may have written an older copy over the file.
        let newest = live.iter().map(|other| other.ticket).max().unwrap_or(0);
        let mut ticket = self.header.last.max(newest).saturating_add(1);
        // Tickets whose record's place belongs to a live claim are passed over.
        while live.iter().any(|other| other.ticket % RECORDS == ticket % RECORDS) {
            ticket = ticket.saturating_add(1);
        }
        if ticket > Token::MAX.get() {
            return Err(Error::new(ErrorKind::Exhausted, "the tokens of this lock are used up"));
        }
        if ticket > self.header.reserved {
            // Until the mark is durable, it stands in a header that no boot believes: whoever finds it there, since we were
            // killed or the disk failed, goes on above it and makes a mark of its own.
            self.header.reserved = ticket.saturating_add(RESERVE);
            Header { boot: NO_BOOT, ..self.header }.write_to(self.file)?;
            self.file.sync()?;
        }
        Ok(ticket)
    }

    /// Takes a ticket in a file that is held whole, and keeps its byte and all below.
    pub(super) fn claim_alone(mut self, record: impl FnOnce(u64) -> Record) -> Result<u64> {
        if self.crowded {
            self.file.give_all_back();
        }
        let ticket = self.next_ticket(&[])?;
        // Nobody is granted while it is closed: a time that is over means nothing to whoever has another clock.
        self.header = Header { last: ticket, ..self.header.open() };
        let mut bytes = Vec::with_capacity(HEADER_LEN + RECORD_LEN);
        self.header.write(&mut bytes);
        record(ticket).write(&mut bytes).ok_or_else(too_long)?;
        self.file.write(&bytes, 0)?;
        // What stays locked are this ticket and all that were given before, which nobody has any more.
        self.range.first = ticket + 1;
        Ok(ticket)
    }

    /// Takes a ticket behind the live claims, after `prepare` has made ready what its holder needs.
    pub(super) fn claim_behind<T>(
        mut self,
        live: &[Live],
        record: impl FnOnce(u64) -> Record,
        prepare: impl FnOnce(u64) -> Result<T>,
    ) -> Result<(u64, T)> {
        if live.len() as u64 >= RECORDS {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!("{RECORDS} claims hold or wait for this lock already; a file queue is no longer"),
            ));
        }
        let ticket = self.next_ticket(live)?;
        let prepared = prepare(ticket)?;
        if !ofd::try_lock(self.file, Range { first: ticket, last: ticket }).map_err(failed)? {
            return Err(Error::new(ErrorKind::Unavailable, "another program locks bytes of the lock file"));
        }
        let published = self.publish(&record(ticket));
        if published.is_err() {
            // Not left to the close, since a forked child may have a copy of the descriptor.
            let _ = ofd::unlock(self.file, Range { first: ticket, last: ticket });
        }
        published.map(|()| (ticket, prepared))
    }

    /// The ticket first: should it fail in between, or its process be killed, the next must not get the same, since one would be taken for the
    /// other.
    fn publish(&mut self, record: &Record) -> Result<()> {
        let (line, at) = (line(record)?, layout::record_at(record.ticket));
        let before = std::mem::replace(&mut self.header.last, record.ticket);
        self.write_header()?;
        if before / GIVE_BACK != record.ticket / GIVE_BACK {
            self.file.give_back(record.ticket)?;
        }
        match self.file.write(&line, at) {
            Err(error) if error.kind() == ErrorKind::Exhausted => {
                self.file.give_back(record.ticket)?;
                self.file.write(&line, at)
            }
            written => written,
        }
    }

    /// Keeps the lock closed for so long from this moment on, if it is not for longer already.
    pub(super) fn close_for(&mut self, period: Duration, from: &Moment) -> Result<()> {
        if self.header.closed_for(from).is_none_or(|left| left < period) {
            self.header = self.header.close(period, from);
        }
        self.write_header()?;
        // It may be meant to outlast a power cut.
        self.file.sync()
    }

    /// Opens a lock that was kept closed.
    pub(super) fn open_now(&mut self) -> Result<()> {
        self.header = self.header.open();
        self.write_header()
    }

    /// Finds the record of a live claim.
    pub(super) fn find(&self, is_it: impl Fn(&Record) -> bool) -> Result<Option<Record>> {
        let live = self.file.live(META - 1)?.into_iter();
        Ok(live.filter_map(|live| live.record).find(is_it))
    }

    /// Finds the record of a live claim and changes it.
    pub(super) fn change(
        &self,
        name: &LockName,
        is_it: impl Fn(&Record) -> bool,
        change: impl FnOnce(&mut Record),
    ) -> Result<Option<Record>> {
        let Some(Record { ticket, .. }) = self.find(&is_it)? else { return Ok(None) };
        let held = self.file.hold_record(ticket)?.ok_or_else(|| kept_busy(name))?;
        let Some(mut record) = held.read()?.filter(is_it) else { return Ok(None) };
        change(&mut record);
        held.rewrite(&record)?;
        Ok(Some(record))
    }

    fn write_header(&self) -> Result<()> {
        self.header.write_to(self.file)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // Cannot fail for a valid range of an open file; if it did, closing the file frees the bytes.
        let _ = ofd::unlock(self.file, self.range);
    }
}

impl Header {
    fn write_to(&self, file: &LockFile) -> Result<()> {
        let mut bytes = Vec::with_capacity(HEADER_LEN);
        self.write(&mut bytes);
        file.write(&bytes, 0)
    }
}

impl HeldRecord<'_> {
    pub(super) fn read(&self) -> Result<Option<Record>> {
        self.file.record(self.ticket)
    }

    pub(super) fn rewrite(&self, record: &Record) -> Result<()> {
        self.file.rewrite(record)
    }
}

impl Drop for HeldRecord<'_> {
    fn drop(&mut self) {
        // As with the header.
        let _ = ofd::unlock(self.file, self.range);
    }
}

pub(super) fn kept_busy(name: &LockName) -> Error {
    let message = format!(
        "another process has kept the file of lock \"{name}\" busy for longer than it should take; is one stopped, or the disk slow?"
    );
    Error::new(ErrorKind::Unavailable, message)
}
