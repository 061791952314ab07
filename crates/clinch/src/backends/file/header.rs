//! The header of a lock file: the last ticket, and for how long the lock is kept closed. Pure: bytes and moments in, values out.

use std::io::Write;
use std::time::{Duration, SystemTime};

use super::layout::{HEADER_LEN, millis};
use crate::clock::Instant;

/// The boot of a header whose mark may not have reached the disk yet.
pub(super) const NO_BOOT: u128 = 0;

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

/// 32 hexadecimal digits, in two halves: `u128::from_str_radix` takes three times as long.
fn hex(text: &str) -> Option<u128> {
    let (high, low) = text.split_at_checked(16).filter(|(_, low)| low.len() == 16)?;
    let half = |digits| u64::from_str_radix(digits, 16).ok();
    Some(u128::from(half(high)?) << 64 | u128::from(half(low)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::token::Token;

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
}
