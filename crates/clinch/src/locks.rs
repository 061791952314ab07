//! The entry point: a URL or a backend becomes [`Locks`], and names become primitives.

mod stores;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use self::stores::{Asked, examine, is_unmade, open};
use crate::acquire::{LeaseOptions, Target};
use crate::backend::{Backend, Capabilities, Freed, LockState, Renewal, Survey};
use crate::check::Check;
use crate::claim::{Claim, ClaimId, Loss, LossKind, Mode, Owner};
use crate::engine::Engine;
use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::guard::Released;
use crate::lane::Lane;
use crate::lease;
use crate::mutex::Mutex;
use crate::name::LockName;
use crate::rwlock::RwLock;
use crate::semaphore::Semaphore;

/// The TTL when nobody says another: long enough to ride out a failover, short enough that a crashed holder is no drama.
const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// Connects to the store that `url` names, with the host's clock and network and a background thread of its own.
///
/// | URL | store |
/// | --- | --- |
/// | `etcd://host`, `etcds://` | etcd, one server or a cluster; see [`backends::etcd`](crate::backends::etcd) |
/// | `file:///dir` | files of this host; `file://` alone is the user's default directory |
/// | `memory://` | this process, a fresh store; `memory://NAME` is one store per name |
/// | `redlock://h1,h2,h3` | a quorum of independent Redis masters; see [`redlock`](crate::backends::redis::redlock) |
/// | `redis://host`, `redis+sentinel://`, `redis+cluster://`, ... | Redis or Valkey; see [`backends::redis`](crate::backends::redis) |
///
/// Every URL takes `ttl=` (100 ms to 24 h, default 30 s), `drift=` (1 to 25, default 10: by how many percent the clocks of
/// the store and of this host may run apart; see [`Drift`](crate::Drift)) and `require=` (a comma-separated list of [`Capabilities`]
/// that the store must have). Unknown keys are errors.
///
/// Any executor will do. A tokio runtime that polls what is asked here also drives its connections, so its only thread must not be
/// blocked by another executor's `block_on` inside it: the answer that is waited for would never be read.
///
/// # Errors
///
/// [`ErrorKind::Invalid`] for a URL that is wrong, [`ErrorKind::Unsupported`] for a store or property that this build or
/// platform does not have, [`ErrorKind::Unavailable`] or [`ErrorKind::Refused`] when the store could not be used.
///
/// # Examples
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// let locks = clinch::connect("memory://?ttl=10s&require=fencing,fifo").await?;
/// # drop(locks);
/// # Ok::<_, clinch::Error>(()) }).unwrap();
/// ```
pub async fn connect(url: &str) -> Result<Locks> {
    Locks::connect(url, Env::host(Lane::thread())).await
}

/// The locks of one store. Clones share the connection and the background lane.
#[derive(Clone)]
pub struct Locks {
    engine: Arc<Engine>,
    options: LeaseOptions,
}

/// Who renews a lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Renew {
    /// The keeper, for as long as the guard lives and [`Locks::max_hold`] allows.
    #[default]
    Auto,
    /// Nobody but [`Guard::extend`](crate::Guard::extend): the lease is lost one TTL after it was granted. An eviction is
    /// told within some seconds all the same.
    Never,
}

impl Locks {
    /// As [`connect`], in this world.
    ///
    /// # Errors
    ///
    /// As [`connect`], and [`ErrorKind::Closed`] for a world of the process that this one was forked from.
    pub async fn connect(url: &str, env: Env) -> Result<Locks> {
        let Asked { mut url, env, ttl, require } = Asked::parse(url, env)?;
        let backend = env.here(open(&mut url, &env)).await?;
        url.finish()?;
        backend.capabilities().require(&require)?;
        let locks = Locks::new(backend, env);
        match ttl {
            Some(ttl) => locks.ttl(ttl),
            None => Ok(locks),
        }
    }

    /// Looks at what the promises of the store of this URL rest on, also of one that [`connect`] refuses or does not reach, and says how
    /// each thing stands. What [`Backend::examine`] says of a store that was made otherwise.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] for a URL that is wrong, [`ErrorKind::Unsupported`] for a store that this build or platform does not have.
    /// What else is amiss is a [`Check`] that does not pass.
    ///
    /// # Examples
    ///
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// use clinch::{Env, Lane, Locks, Verdict};
    ///
    /// for check in Locks::examine("memory://", Env::host(Lane::thread())).await? {
    ///     println!("{} {}: {}", check.verdict, check.what, check.seen);
    ///     assert_eq!(check.verdict, Verdict::Pass);
    /// }
    /// # Ok::<_, clinch::Error>(()) }).unwrap();
    /// ```
    pub async fn examine(url: &str, env: Env) -> Result<Vec<Check>> {
        let Asked { mut url, env, .. } = Asked::parse(url, env)?;
        env.here(examine(&mut url, &env)).await
    }

    /// Whether to connect to this URL would make the store: a directory of `file://` that is not there. Nobody has locked anything in it,
    /// so that who only looks need not make it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] for a URL that is wrong; others for a directory that cannot be made, as of [`connect`].
    pub fn is_unmade(url: &str, env: Env) -> Result<bool> {
        let Asked { mut url, .. } = Asked::parse(url, env)?;
        let is_unmade = is_unmade(&mut url)?;
        if is_unmade {
            url.finish()?;
        }
        Ok(is_unmade)
    }

    /// The locks of a backend that was made otherwise.
    pub fn new(backend: Arc<dyn Backend>, env: Env) -> Locks {
        let options = LeaseOptions {
            ttl: DEFAULT_TTL.min(backend.longest_ttl()),
            max_hold: None,
            manual: false,
            isolated: false,
            owner: Arc::new(Owner::of_this_process()),
        };
        Locks { engine: Engine::new(backend, env), options }
    }

    /// What the store promises.
    pub fn capabilities(&self) -> Capabilities {
        self.engine.backend.capabilities()
    }

    /// The same locks with leases of `ttl`, from 100 ms to 24 h: how long a lock stays taken after its holder is gone.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] outside that range.
    pub fn ttl(mut self, ttl: Duration) -> Result<Locks> {
        lease::check_ttl(ttl, self.engine.backend.longest_ttl())?;
        self.options.ttl = ttl;
        Ok(self)
    }

    /// How long a lease lives without a renewal.
    pub fn lease_ttl(&self) -> Duration {
        self.options.ttl
    }

    /// The same locks with leases that are kept for at most `time` from their grant, renewed or not; then they are lost,
    /// and the lock is freed when the guard is dropped or, if it is not, up to five seconds later.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] for zero.
    pub fn max_hold(mut self, time: Duration) -> Result<Locks> {
        if time.is_zero() {
            return Err(Error::invalid("max_hold must be longer than zero"));
        }
        self.options.max_hold = Some(time);
        Ok(self)
    }

    /// The same locks with leases that are renewed like this.
    pub fn renew(mut self, renew: Renew) -> Locks {
        self.options.manual = renew == Renew::Never;
        self
    }

    /// The same locks, each with a lease of its own.
    ///
    /// Where a store's leases can carry many claims (etcd), those of one client and TTL share one, so that one renewal
    /// serves them all; but then they are also lost together. Elsewhere this changes nothing.
    pub fn isolated(mut self) -> Locks {
        self.options.isolated = true;
        self
    }

    /// The same locks with claims that say what they are for: at most 128 bytes, shown by `clinch ls`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] when it is longer or holds control characters.
    pub fn label(mut self, label: &str) -> Result<Locks> {
        if label.len() > Owner::MAX_LABEL || label.chars().any(char::is_control) {
            return Err(Error::invalid(format!(
                "a label may have at most {} bytes and no control characters",
                Owner::MAX_LABEL
            )));
        }
        self.options.owner = Arc::new(Owner { label: label.to_owned(), ..(*self.options.owner).clone() });
        Ok(self)
    }

    /// The same locks with claims that name another process as their owner: who asks for a shell that is to hold the lock.
    pub fn on_behalf_of(mut self, pid: u32) -> Locks {
        self.options.owner = Arc::new(Owner { pid, ..(*self.options.owner).clone() });
        self
    }

    /// The mutex of this name.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] for a name that is none; see [`LockName`].
    pub fn mutex(&self, name: &str) -> Result<Mutex> {
        Ok(Mutex::new(self.target(name)?))
    }

    /// The read-write lock of this name.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] for a name that is none; see [`LockName`].
    pub fn rwlock(&self, name: &str) -> Result<RwLock> {
        Ok(RwLock::new(self.target(name)?))
    }

    /// The semaphore of this name, with `capacity` permits (1 to 2^32 - 1).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] for a name that is none, and for no permits.
    pub fn semaphore(&self, name: &str, capacity: u32) -> Result<Semaphore> {
        Semaphore::new(self.target(name)?, capacity)
    }

    /// The locks whose name starts with `prefix` and that somebody holds, waits for, or keeps closed.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`] when the store did not answer; [`ErrorKind::Refused`] where some locks may not be looked at, as in a
    /// directory of several users. [`Locks::survey`] shows the others.
    pub async fn list(&self, prefix: &str) -> Result<Vec<LockState>> {
        self.engine.here(self.engine.backend.list(prefix)).await
    }

    /// As [`Locks::list`]; where some locks may not be looked at, those that may, and why these are not all.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`] when the store did not answer.
    pub async fn survey(&self, prefix: &str) -> Result<Survey> {
        self.engine.here(self.engine.backend.survey(prefix)).await
    }

    /// One lock as the store sees it; `None` when nobody holds it, waits for it, or keeps it closed.
    ///
    /// # Errors
    ///
    /// As [`Locks::list`], and [`ErrorKind::Invalid`] for a name that is none.
    pub async fn state(&self, name: &str) -> Result<Option<LockState>> {
        self.engine.here(self.engine.backend.state(&LockName::new(name)?)).await
    }

    /// Takes a claim away from whoever made it: an operator's last resort. The next holder's token is larger, so a
    /// fenced store refuses what the old one still writes.
    ///
    /// A lock that lingers closed is opened, also where the claim only waits for that or is gone.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`] when the store did not answer.
    pub async fn evict(&self, name: &str, claim: ClaimId) -> Result<Freed> {
        self.engine.here(self.engine.backend.evict(&LockName::new(name)?, claim)).await
    }

    /// Opens a lock that lingers closed, and does nothing to those who hold it or wait for it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`] when the store did not answer.
    pub async fn open(&self, name: &str) -> Result<()> {
        // As the eviction of a claim that is gone does, whoever's.
        let (name, nobody) = (LockName::new(name)?, self.engine.env.random().claim_id()?);
        self.engine.here(self.engine.backend.evict(&name, nobody)).await.map(drop)
    }

    /// Renews a [detached](crate::Guard::detach) lease, so that it lasts `ttl` from this moment, or longer where another renewal asked for
    /// more.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Lost`] when the store does not have it any more.
    pub async fn renew_detached(&self, name: &str, claim: ClaimId, ttl: Duration) -> Result<()> {
        lease::check_ttl(ttl, self.engine.backend.longest_ttl())?;
        let mut claim = self.detached(name, claim)?;
        claim.ttl = ttl;
        let name = claim.name.clone();
        let claims = [Arc::new(claim)];
        match self.engine.here(async { Ok(self.engine.backend.renew(&claims).await.pop()) }).await? {
            Some(Renewal::Renewed(_)) => Ok(()),
            Some(Renewal::Lost(loss)) => Err(Error::lost(&name, loss)),
            Some(Renewal::Failed(error)) => Err(error),
            None => Err(Error::new(ErrorKind::Unknown, "the store did not answer")),
        }
    }

    /// Releases a [detached](crate::Guard::detach) lease.
    ///
    /// Where leases live in the store, nobody can tell whether a process still holds this one: it is freed at once, as by its holder's own
    /// word. End a job that runs under it first, or take the lock away by [`Locks::evict`], which gives the job time to stop.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`] when the store did not answer; [`ErrorKind::Unknown`] when an answer was lost, and nobody can tell
    /// whether this or the end of the lease has freed it; [`ErrorKind::Unsupported`] where the claim ends with the process that
    /// holds it, unless [`Locks::renew_detached`] has given it an end.
    pub async fn release_detached(&self, name: &str, claim: ClaimId) -> Result<Released> {
        self.release_detached_closed(name, claim, Duration::ZERO).await
    }

    /// As [`Locks::release_detached`], but keeps the lock closed for `linger` from now, as [`Guard::release_closed`](crate::Guard::release_closed)
    /// does: for who sees to what a process that was killed has left.
    ///
    /// Where the claim ends with the process that holds it, it still does. Only the lock is closed behind it, and only by a client
    /// [`on_behalf_of`](Locks::on_behalf_of) that process.
    ///
    /// # Errors
    ///
    /// As [`Locks::release_detached`] and [`Guard::release_closed`](crate::Guard::release_closed).
    pub async fn release_detached_closed(
        &self,
        name: &str,
        claim: ClaimId,
        linger: Duration,
    ) -> Result<Released> {
        lease::check_linger(linger)?;
        let claim = self.detached(name, claim)?;
        let releases = &self.engine.releases;
        let free = async {
            // It may be over already.
            let over = Some(self.engine.env.now());
            let freed = releases.free(&claim, linger, releases.until(&claim, None), over).await;
            if freed.is_err() {
                self.engine.backend.forget(&claim);
            }
            freed
        };
        match self.engine.here(free).await? {
            Freed::Removed => Ok(Released::Released),
            Freed::Absent => {
                Ok(Released::AlreadyLost(Loss::new(LossKind::Deleted, "the store has no such claim")))
            }
        }
    }

    /// Refuses new claims and waits, at most `patience` long, until the releases under way in the background are done, or their
    /// leases have run out by themselves.
    ///
    /// Guards that are still held stay held and are released when dropped.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`] when some were not; their leases run out by themselves.
    pub async fn close(&self, patience: Duration) -> Result<()> {
        self.engine.here(self.engine.close(patience)).await
    }

    fn target(&self, name: &str) -> Result<Target> {
        let name = LockName::new(name)?;
        Ok(Target { engine: self.engine.clone(), name, options: self.options.clone() })
    }

    fn detached(&self, name: &str, id: ClaimId) -> Result<Claim> {
        let LeaseOptions { ttl, owner, .. } = self.options.clone();
        Ok(Claim {
            id,
            name: LockName::new(name)?,
            mode: Mode::Exclusive,
            ttl,
            enqueue: false,
            place: false,
            isolated: true,
            owner,
        })
    }
}

impl fmt::Debug for Locks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locks").field("backend", &self.engine.backend).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::url::StoreUrl;

    #[tokio::test]
    async fn what_is_listed_as_a_store_is_one() {
        let env = Env::host(Lane::here().unwrap());
        for scheme in crate::url::here() {
            // No host is called so: nobody is asked.
            let mut url = StoreUrl::parse(&format!("{scheme}://[")).unwrap();
            let opened = open(&mut url, &env).await;
            assert!(!opened.is_err_and(|error| error.kind() == ErrorKind::Unsupported), "{scheme}");
        }
    }
}
