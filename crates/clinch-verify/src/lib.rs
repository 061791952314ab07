//! Histories of distributed locks and the checker that judges them.
//!
//! A *history* is what clients and fenced stores saw: one event per line, each with the time at which it was seen.
//! [`Recorder`] writes one, [`History`] reads it, [`check()`] says whether the lock kept its promises and, where it
//! did not, shows the few events that prove it.
//!
//! The crate depends on no lock library, reads no clock and talks to no store: it can judge any lock whose clients
//! can say when they asked, when they were answered and until when they believed the answer.
//!
//! # Examples
//!
//! ```
//! use clinch_verify::{Mode, Property, Recorder, Rules, Verdict, check};
//!
//! let recorder = Recorder::memory();
//! let first = recorder.claim("c1", "nightly", "9f3a", Mode::Exclusive).ttl_ms(30_000);
//! let call = first.acquire(1_000);
//! call.granted(2_000, Some(41), Some(29_000_000_000));
//!
//! // A second client is told that it holds the same lock, although the first has not let go.
//! let second = recorder.claim("c2", "nightly", "77b0", Mode::Exclusive).ttl_ms(30_000);
//! second.acquire(3_000).granted(4_000, Some(42), Some(29_000_000_000));
//!
//! let report = check(&recorder.history(), &Rules::default());
//! assert_eq!(report.verdict, Verdict::Violated);
//! assert!(report.of(Property::Exclusion).next().is_some());
//! ```

mod check;
mod event;
mod history;
mod recorder;

pub use check::{Counts, Doubt, Evidence, Property, Report, Rules, Verdict, Violation, check};
pub use event::{Event, Kind, Mode, Op};
pub use history::{History, ReadError};
pub use recorder::{Call, ClaimRecorder, Recorder};
