//! The store trait: what a backend does, in steps that are idempotent by claim id.
//!
//! A backend knows how to take one step at a time on its store. Loops, deadlines, renewal and loss are above it, once.

use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;

use crate::check::Check;
use crate::claim::{Claim, ClaimId, Loss, Mode, Owner};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::lease;
use crate::name::LockName;
use crate::token::Token;

/// How long an evicted holder has, at most, to hear of it and to stop before the lock is another's: a renewal is due
/// every 5 s, what nobody renews is looked at every 4 s, one of these may hang for 3 s before the next is sent, and a job that is
/// told to end has 4 s after that. Whoever hears of it and stops sooner opens the lock by its release.
/// One that is cut off from the store all that time does not hear of it and goes on until its own deadline: what it writes then only
/// a fencing token keeps out.
pub const NOTICE: Duration = Duration::from_secs(15);

/// How long a release that nobody answered is tried again now and then, if the claim's TTL is not longer. A server that was
/// stopped may grant when it goes on what has long been given up, and the claim would then hold the lock for its TTL.
pub const LEFT_FOR: Duration = Duration::from_secs(3600);

/// How long a grant that a store gave of its own accord stands until its waiter has taken it, by a step or by the first renewal
/// of its lease. A waiter whose future is kept but not polled takes nothing: then the lock goes on to the next.
pub const TAKE_WITHIN: Duration = Duration::from_secs(3);

/// The longest that one attempt to hear from the store may take.
pub(crate) const MAX_ATTEMPT: Duration = Duration::from_secs(3);

/// How long the engine gives one call of [`Backend::renew`] for leases of this TTL: a sixth of it, at most 3 s, so that three
/// attempts fit between the first and the deadline (two with a `drift=` above 15 %), and two into the [notice](NOTICE) of an eviction.
/// A lease that was handed over for less than its TTL, and was not renewed since, is given all that it has, at most 3 s.
pub fn attempt(ttl: Duration) -> Duration {
    (ttl / 6).min(MAX_ATTEMPT)
}

/// What [`Backend::shard`] says. A panic there ends neither the keeper nor a release.
pub(crate) fn shard(backend: &dyn Backend, name: &LockName) -> u64 {
    catch_unwind(AssertUnwindSafe(|| backend.shard(name))).unwrap_or_default()
}

/// One store that can hold locks.
///
/// # Contract
///
/// - Every step is idempotent by claim id: repeating it after a lost answer gives the same answer and does nothing twice.
/// - A step may be dropped at any poll. Whatever it was doing, [`Backend::release`] of its claim, called later, leaves
///   nothing of the claim behind, also when the dropped step reaches the store after that call began.
/// - An error is [`ErrorKind::Unavailable`] only if the step was surely not applied, else [`ErrorKind::Unknown`].
/// - Of every claim of which a step was begun, the release is repeated until it is answered: at once, and when that fails from
///   time to time in the background, for the claim's TTL and at least an hour, for as long as the client lives. So a server that
///   was stopped for longer than the TTL, and then grants what nobody wants any more, is told. A backend keeps what it needs for
///   that until the release is answered or [`Backend::forget`] is called, and no longer.
/// - No step waits for longer than it takes to learn that the store does not answer, but for [`Backend::wait`].
#[async_trait]
pub trait Backend: Debug + Send + Sync + 'static {
    /// What this store can promise.
    fn capabilities(&self) -> Capabilities;

    /// Takes one step towards a grant. A granted claim is granted again, with the same token and its TTL from now on; a
    /// queued one keeps its place.
    async fn claim(&self, claim: &Claim) -> Result<Progress>;

    /// The longest TTL that the store can keep its promises for; a longer one is refused before anything is sent.
    fn longest_ttl(&self) -> Duration {
        lease::MAX_TTL
    }

    /// Waits until another step of this queued claim is worth taking. May end early, never silently late.
    async fn wait(&self, claim: &Claim) -> Result<Wake>;

    /// Which of the store's independent servers keeps this lock, as far as is known at this moment. Claims on different
    /// ones are never renewed in one call, so that a server that hangs delays nothing but its own.
    fn shard(&self, _name: &LockName) -> u64 {
        0
    }

    /// Renews held and queued claims alike, in as few trips as the store allows; one answer each, in order. Never makes a
    /// lease shorter: an older request may arrive after one that asked for more. For a claim that says
    /// [`place`](Claim::place) only the place in the queue is renewed, never a grant.
    async fn renew(&self, claims: &[Arc<Claim>]) -> Vec<Renewal>;

    /// Waits until the store tells of its own accord that claims are gone, and which. The keeper asks all the time, so
    /// that a loss is told at once and not at the next renewal. A store that tells nothing never answers.
    ///
    /// # Cancel safety
    ///
    /// What was not returned is told by the next call, or by the claim's next renewal.
    async fn lost(&self) -> Vec<(ClaimId, Loss)> {
        std::future::pending().await
    }

    /// Reads whether a granted claim still holds, without renewing it: the strongest read that the store has.
    async fn verify(&self, claim: &Claim) -> Result<Renewal>;

    /// Turns an exclusive grant into a shared one, keeping its token and letting waiting readers in.
    async fn downgrade(&self, claim: &Claim) -> Result<()>;

    /// Leaves the queue or frees the lock; idempotent; only ever one's own claim. With a `linger`, nobody else is
    /// granted for that long from now; a store that cannot do that refuses as [`ErrorKind::Unsupported`] and does
    /// nothing.
    async fn release(&self, claim: &Claim, linger: Duration) -> Result<Freed>;

    /// No step of this claim will follow on this client, although no release of it was answered: it is detached, or its release
    /// was given up. What is known of it here can go.
    fn forget(&self, _claim: &Claim) {}

    /// All locks whose name starts with `prefix` and that have at least one live claim, ordered by name; an error where some
    /// may not be looked at.
    async fn list(&self, prefix: &str) -> Result<Vec<LockState>>;

    /// Those of them that may be looked at, and why these are not all.
    async fn survey(&self, prefix: &str) -> Result<Survey> {
        Ok(Survey { locks: self.list(prefix).await?, unread: None })
    }

    /// One lock as [`Backend::list`] would show it; `None` when that would not.
    async fn state(&self, name: &LockName) -> Result<Option<LockState>> {
        Ok(self.list(name.as_str()).await?.into_iter().find(|state| state.name == *name))
    }

    /// A claim of this client as [`Backend::state`] would show its lock's; `None` when it does not count any more.
    async fn own_state(&self, claim: &Claim) -> Result<Option<ClaimState>> {
        let claims = self.state(&claim.name).await?.map(|state| state.claims).unwrap_or_default();
        Ok(claims.into_iter().find(|live| live.id == claim.id))
    }

    /// An operator's release of somebody else's claim.
    ///
    /// A live holder is told of its loss at once, where the store can tell, else by its next renewal. Nobody else is granted
    /// what it held until it has released the claim, until its lease would have run out, or until [`NOTICE`] has passed,
    /// whichever comes first. A lock that lingers closed is opened, whatever becomes of the claim.
    async fn evict(&self, name: &LockName, claim: ClaimId) -> Result<Freed>;

    /// Looks at what the promises of this store rest on, and says how each thing stands: what its URL means, its servers or directory,
    /// our rights there. Changes nothing that a lock is made of.
    async fn examine(&self) -> Vec<Check> {
        Vec::new()
    }

    /// Gives back what the client keeps in the store for claims to come. Called once no more are made; may be dropped at any
    /// poll.
    async fn close(&self) {}

    /// A descriptor that keeps a granted claim alive in whatever process inherits it, on stores where the kernel frees
    /// the lock with its last descriptor. Close-on-exec is set.
    fn descriptor(&self, _claim: ClaimId) -> Option<OwnedFd> {
        None
    }

    /// The key that stands for a claim of this client, on stores where a transaction of the caller's own can be made
    /// conditional on it.
    fn key(&self, _claim: ClaimId) -> Option<String> {
        None
    }
}

/// The answer to one step of a claim.
#[derive(Clone, Debug)]
pub enum Progress {
    /// Not granted, and nothing of the claim was left in the store.
    Busy(Busy),
    /// The claim holds the lock.
    Granted(Grant),
    /// The claim has a place in the queue.
    Queued(Busy),
}

/// Why a claim was not granted.
#[derive(Clone, Debug, Default)]
pub struct Busy {
    /// Live claims ahead, or fewer where counting them all would cost too much; 0 only when the lock lingers closed.
    pub ahead: u32,
    /// Whoever stands first, if the store tells.
    pub holder: Option<ClaimState>,
    /// How long the claim's place in the queue lives without a renewal; `None` when it cannot expire, and for a claim
    /// that has no place.
    pub place_ttl: Option<Duration>,
    /// Whether nobody could say if the lock is taken: too few servers vote, their votes are split, or its file cannot be read. A request
    /// that hears nothing else fails as one does whose store is out of reach.
    pub undecided: bool,
    /// What else there is to tell people, where several servers decide or none did: what each of them answered.
    pub detail: Option<Arc<str>>,
}

/// A granted claim.
#[derive(Clone, Copy, Debug)]
pub struct Grant {
    /// The fencing token.
    pub token: Token,
    /// How long the store keeps the grant without a renewal; `None` when it never expires.
    pub ttl: Option<Duration>,
    /// A moment that surely lies before the store began to count the TTL. `None` means before the step was sent, which
    /// the caller knows; needed where [`Backend::wait`] brought the grant.
    pub from: Option<Instant>,
}

/// Why [`Backend::wait`] ended.
#[derive(Clone, Copy, Debug)]
pub enum Wake {
    /// The store pushed the grant itself.
    Granted(Grant),
    /// Take another step.
    Step,
}

/// The answer to one renewal.
#[derive(Debug)]
pub enum Renewal {
    /// No answer that proves anything; to be tried again.
    Failed(Error),
    /// The claim is gone.
    Lost(Loss),
    /// The claim lives for this long from when the renewal was sent; `None`: until it is released.
    Renewed(Option<Duration>),
}

/// What a release found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freed {
    /// There was no such claim.
    Absent,
    /// The claim was removed.
    Removed,
}

/// The locks of a store, as far as they may be looked at.
#[derive(Debug, Default)]
pub struct Survey {
    /// These, ordered by name.
    pub locks: Vec<LockState>,
    /// Why others may not be: nobody knows from here whether they are held. `None`: there are none.
    pub unread: Option<Error>,
}

/// A lock as the store sees it.
#[derive(Clone, Debug)]
pub struct LockState {
    /// Its name.
    pub name: LockName,
    /// Its live claims, first in the queue first.
    pub claims: Vec<ClaimState>,
    /// Until when it stays closed although nobody holds it.
    pub closed_until: Option<SystemTime>,
}

/// A claim as the store sees it.
#[derive(Clone, Debug)]
pub struct ClaimState {
    /// Its id.
    pub id: ClaimId,
    /// Its mode.
    pub mode: Mode,
    /// Whether it is granted.
    pub granted: bool,
    /// Its token, where one is already fixed.
    pub token: Option<Token>,
    /// Who made it.
    pub owner: Owner,
    /// Since when it is granted, or queued.
    pub since: SystemTime,
    /// What is left of its lease, or of the notice that it was given; `None` when it does not expire.
    pub expires_in: Option<Duration>,
}

macro_rules! capabilities {
    ($($(#[$doc:meta])* $field:ident = $name:literal,)*) => {
        /// What a store can promise. What differs between stores is one of these, never a store's name.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Capabilities {
            $($(#[$doc])* pub $field: bool,)*
        }

        impl Capabilities {
            /// Each property's name in `require=` and whether it is there.
            pub fn entries(&self) -> impl Iterator<Item = (&'static str, bool)> {
                [$(($name, self.$field),)*].into_iter()
            }
        }
    };
}

capabilities! {
    /// Every grant carries a token that is larger than all before; without this, all tokens are 0.
    fencing = "fencing",
    /// Claims are granted in the order in which the store received them.
    fifo = "fifo",
    /// A claim that has to wait has a place in the store: it is listed, and an operator can evict it. Without this a
    /// waiter only asks again and again, and leaves nothing in the store that anybody could see or would have to clear.
    queue = "queue",
    /// Has shared claims.
    shared = "shared",
    /// Has permits.
    permits = "permits",
    /// A release can keep the lock closed for a time.
    linger = "linger",
    /// Waiters are woken by the store; nothing polls.
    push = "push",
    /// A lease ends by itself when it is not renewed, so a stopped or cut-off holder does not block for ever.
    expiry = "expiry",
    /// The lock is free as soon as its holder's process is dead, without waiting for a TTL.
    crash_release = "crash-release",
    /// A claim can outlive the process that made it, so that `acquire` and `release` may be two commands.
    detached = "detached",
    /// Claims of different processes exclude each other.
    processes = "processes",
    /// Claims of different hosts exclude each other.
    hosts = "hosts",
    /// Tokens go on rising after the store was restarted.
    restart = "survives-restart",
    /// Exclusion and tokens hold over a failover.
    failover = "survives-failover",
    /// A release finishes at its first poll, without a runtime.
    inline = "inline",
}

impl Capabilities {
    /// Refuses when a property of this comma-separated list is absent.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] naming what is absent, [`ErrorKind::Invalid`] for a name that is no property.
    pub fn require(&self, list: &str) -> Result<()> {
        for wanted in list.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            match self.entries().find(|(name, _)| *name == wanted) {
                Some((_, true)) => {}
                Some((name, false)) => {
                    return Err(Error::new(
                        ErrorKind::Unsupported,
                        format!("this store does not have the required property \"{name}\""),
                    ));
                }
                None => {
                    let known: Vec<_> = self.entries().map(|(name, _)| name).collect();
                    return Err(Error::invalid(format!(
                        "\"{wanted}\" in require= is no property; there are {}",
                        known.join(", ")
                    )));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn require_names_what_is_absent() {
        let store = Capabilities { fencing: true, ..Capabilities::default() };
        assert!(store.require("").is_ok() && store.require("fencing").is_ok());
        let absent = store.require("fencing, fifo").unwrap_err();
        assert_eq!(absent.kind(), ErrorKind::Unsupported);
        assert!(absent.to_string().contains("\"fifo\""));
        assert_eq!(store.require("fast").unwrap_err().kind(), ErrorKind::Invalid);
    }
}
