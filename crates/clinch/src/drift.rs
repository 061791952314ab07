//! How far two clocks may run apart.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::error::{Error, Result};

/// By how many percent of the time that passes the clocks of this host and of a store may run apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drift(u32);

impl Drift {
    /// Quartz differs by 0.01 %, but a clock that is being corrected by slewing runs up to 8.3 % off (chrony's
    /// `maxslewrate`), on the store's host as on this one.
    pub const DEFAULT: Drift = Drift(10);

    /// What `drift=` may say.
    const RANGE: RangeInclusive<u32> = 1..=25;

    /// A drift of 1 to 25 percent.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) outside that range.
    pub fn percent(percent: u32) -> Result<Drift> {
        if Drift::RANGE.contains(&percent) {
            return Ok(Drift(percent));
        }
        let (least, most) = Drift::RANGE.into_inner();
        Err(Error::invalid(format!(
            "drift= is by how many percent clocks may run apart, {least} to {most}; {percent} is not"
        )))
    }

    /// The percentage.
    #[cfg(feature = "redis")]
    pub(crate) fn percentage(self) -> u32 {
        self.0
    }

    /// How far the clocks may come apart while this time passes.
    pub fn over(self, time: Duration) -> Duration {
        time / 100 * self.0
    }
}
