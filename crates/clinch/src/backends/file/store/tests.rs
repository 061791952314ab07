//! What processes do to one another's claims, at the worst moments.

use std::cell::{Cell, RefCell};
use std::path::Path;

use super::super::dir::Options;
use super::*;
use crate::backend::NOTICE;
use crate::clock::{Clock, Instant};
use crate::lane::Lane;
use crate::locks::Locks;
use crate::net::Tcp;
use crate::random::Random;

const TTL: Duration = Duration::from_secs(60);

fn store(dir: &Path, clock: Clock) -> Arc<File> {
    let lane = Lane::thread();
    let tcp = Arc::new(Tcp::new(Clock::host(), lane.clone()));
    File::new(Dir::open(dir, Options::default()).unwrap(), Env::new(clock, Random::system(), lane, tcp))
        .unwrap()
}

fn locks(store: &Arc<File>) -> Locks {
    Locks::new(store.clone(), store.env.clone())
}

thread_local! {
    static AT_NEXT_LOOK: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
    static AHEAD: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// Does something at this look at the clock from now on.
fn at_look(number: u32, then: Box<dyn FnOnce()>) {
    AT_NEXT_LOOK.set(Some(match number {
        1 => then,
        more => Box::new(move || at_look(more - 1, then)),
    }));
}

fn clock() -> Instant {
    let first = AT_NEXT_LOOK.take();
    first.into_iter().for_each(|first| first());
    Clock::host().now() + AHEAD.get()
}

/// Who looks whether its lease is over reads the old end, is stopped, and goes by a clock that has passed it: it lets go of what
/// was renewed meanwhile.
#[tokio::test]
async fn a_lease_that_is_renewed_while_it_is_looked_at_is_not_over() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, other) = (store(dir.path(), Clock::told(clock)), store(dir.path(), Clock::host()));
    let guard = locks(&ours).mutex("job").unwrap().lock().await.unwrap();
    let (outside, id) = (locks(&other), guard.claim_id());
    outside.renew_detached("job", id, TTL).await.unwrap();
    let claim = {
        let state = outside.state("job").await.unwrap().unwrap().claims.remove(0);
        let (name, mode, owner) = (guard.name().clone(), state.mode, Arc::new(state.owner));
        Claim { id, name, mode, ttl: TTL, enqueue: false, place: false, isolated: true, owner }
    };
    let slot = ours.slot(id).unwrap();
    let own = || ours.own_state(&lock(&slot)).unwrap().unwrap();
    let by_path = || ours.state_in("job.lock", "", None).unwrap().unwrap().claims.remove(0);
    let looks: [(u32, &dyn Fn() -> crate::backend::ClaimState); 2] = [(2, &own), (4, &by_path)];
    for (ahead, look) in looks {
        let (other, claim) = (other.clone(), Claim { ttl: TTL * (ahead + 1), ..claim.clone() });
        AHEAD.set(Duration::ZERO);
        AT_NEXT_LOOK.set(Some(Box::new(move || {
            assert!(matches!(other.prolong(&claim).unwrap(), Renewal::Renewed(_)));
            AHEAD.set(TTL * ahead);
        })));
        assert!(look().expires_in.unwrap() > Duration::ZERO, "it was renewed in time");
    }
}

/// Who evicts may be stopped before it writes, for longer than the notice: the claim would be over as soon as its holder can hear.
#[tokio::test]
async fn a_notice_counts_from_when_it_can_be_heard() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, other) = (store(dir.path(), Clock::host()), store(dir.path(), Clock::told(clock)));
    let guard = locks(&ours).mutex("job").unwrap().lock().await.unwrap();
    let file = other.open("job.lock", false).unwrap().unwrap();
    let world = other.world(guard.name());
    // The first look tells the time as it is.
    at_look(2, Box::new(|| AHEAD.set(2 * NOTICE)));
    let begun = other.end_soon(&world, &file, guard.claim_id()).unwrap().unwrap();
    other.end_in_time(&world, &file, &begun, guard.claim_id()).unwrap();
    let record = file.record(begun.ticket).unwrap().unwrap();
    AHEAD.set(2 * NOTICE);
    assert!(record.is_ending() && !record.has_ended(clock()), "over before anybody could hear of it");
    AHEAD.set(4 * NOTICE);
    assert!(record.has_ended(clock()), "it is over in time");
}

/// A record is busy between the two writes of an eviction, and its holder is told meanwhile: the eviction says that there was nothing to
/// evict, and what it has begun goes on for ten minutes.
#[tokio::test]
async fn an_eviction_ends_what_it_has_begun() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, other) = (store(dir.path(), Clock::host()), store(dir.path(), Clock::told(clock)));
    let guard = locks(&ours).mutex("job").unwrap().lock().await.unwrap();
    let slot = ours.slot(guard.claim_id()).unwrap();
    let (ticket, busy) = (lock(&slot).ticket, Arc::new(Mutex::new(None)));
    let record = || lock(&slot).file.record(ticket).unwrap().unwrap();
    let keep_busy = {
        let (ours, slot, busy) = (ours.clone(), slot.clone(), busy.clone());
        move || {
            assert!(
                matches!(ours.check(&mut lock(&slot), &ours.glance()).unwrap(), Renewal::Lost(_)),
                "it has begun"
            );
            let file = ours.open("job.lock", false).unwrap().unwrap();
            std::mem::forget(file.hold_record(ticket).unwrap().expect("nobody has it"));
            *lock(&busy) = Some(file);
        }
    };
    // It looks once for the directory, once for how long it may take, and once for the first write.
    at_look(4, Box::new(keep_busy));
    let evicted = other.evict(guard.name(), guard.claim_id());
    let (evicted, ()) = tokio::join!(evicted, async {
        while !record().was_told() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        lock(&busy).take().expect("it was busy");
    });
    assert_eq!(evicted.unwrap(), Freed::Removed);
    assert!(record().has_ended(Clock::host().now() + NOTICE), "it has not said when it is over");
}

/// A shell works on under a claim whose holder, which only keeps it, has heard of its eviction: another gets in beside it.
#[tokio::test]
async fn who_works_under_a_lease_is_not_told_through_its_keeper() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, other) = (store(dir.path(), Clock::host()), store(dir.path(), Clock::host()));
    let guard = locks(&ours).mutex("job").unwrap().lock().await.unwrap();
    let (outside, id) = (locks(&other), guard.claim_id());
    outside.renew_detached("job", id, TTL).await.unwrap();
    let evictor = tokio::spawn({
        let outside = outside.clone();
        async move { outside.evict("job", id).await }
    });
    let slot = ours.slot(id).unwrap();
    while !matches!(ours.check(&mut lock(&slot), &ours.glance()).unwrap(), Renewal::Lost(_)) {
        tokio::task::yield_now().await;
    }
    let record = {
        let slot = lock(&slot);
        slot.file.record(slot.ticket).unwrap().unwrap()
    };
    assert!(!record.was_told(), "the evictor takes the lock for free");
    assert!(outside.mutex("job").unwrap().try_lock().await.unwrap().is_none());
    // Who works says that it is done.
    let released = outside.release_detached("job", id).await.unwrap();
    assert!(matches!(released, crate::Released::AlreadyLost(_)));
    assert!(outside.mutex("job").unwrap().try_lock().await.unwrap().is_some());
    assert_eq!(evictor.await.unwrap().unwrap(), Freed::Removed);
}

/// Who sees to the end of a process closes its lock too soon, or for good; or a stranger closes it under that process.
#[tokio::test]
async fn a_lock_is_closed_behind_its_holder_by_who_acts_for_that() {
    const LINGER: Duration = Duration::from_secs(3600);
    let dir = tempfile::tempdir().unwrap();
    let (ours, other) = (store(dir.path(), Clock::host()), store(dir.path(), Clock::host()));
    let guard = locks(&ours).mutex("job").unwrap().lock().await.unwrap();
    let (outside, id) = (locks(&other), guard.claim_id());
    let stranger = outside.clone().on_behalf_of(std::process::id() + 1);
    let error = stranger.release_detached_closed("job", id, LINGER).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let error = outside.release_detached("job", id).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let state = async || outside.state("job").await.unwrap().unwrap();
    assert!(state().await.closed_until.is_none());
    outside.release_detached_closed("job", id, LINGER).await.unwrap();
    assert!(guard.verify().await.is_ok() && state().await.claims.len() == 1, "it is held yet");
    drop(guard);
    assert!(state().await.claims.is_empty() && state().await.closed_until.is_some());
    assert!(outside.mutex("job").unwrap().try_lock().await.unwrap().is_none());
}

/// A claim that was found to be in order long after its file was last touched is not looked at more closely, nor by its whole path:
/// whatever makes newcomers meet elsewhere must show all the same.
#[tokio::test]
async fn a_holder_whose_file_was_long_untouched_is_told() {
    let top = tempfile::tempdir().unwrap();
    let (path, job, other) = (top.path().join("locks"), "job.lock", "other.lock");
    let rename = |from: &Path, to: &Path| std::fs::rename(from, to).unwrap();
    let ways: [(&str, &dyn Fn()); 6] = [
        ("its file was removed", &|| std::fs::remove_file(path.join(job)).unwrap()),
        ("its file was moved within the directory", &|| rename(&path.join(job), &path.join("moved"))),
        ("its file was moved out of the directory", &|| rename(&path.join(job), &top.path().join("moved"))),
        ("another file came in its place", &|| rename(&path.join(other), &path.join(job))),
        ("its directory was moved", &|| rename(&path, &top.path().join("moved"))),
        ("a link to another directory came in its place", &|| {
            rename(&path, &top.path().join("moved"));
            std::os::unix::fs::symlink(top.path(), &path).unwrap();
        }),
    ];
    for (what, change) in ways {
        let ours = store(&path, Clock::host());
        let (guard, _other) = (lock_at(&ours, "job").await, lock_at(&ours, "other").await);
        let slot = ours.slot(guard.claim_id()).unwrap();
        let check = || {
            let glance = ours.glance();
            let later = Glance { now: glance.now + Duration::from_secs(3600), ..glance };
            ours.check(&mut lock(&slot), &later).unwrap()
        };
        assert!(matches!((check(), check()), (Renewal::Renewed(_), Renewal::Renewed(_))));
        assert!(lock(&slot).checked.is_some(), "it goes by what it saw");
        change();
        assert!(matches!(check(), Renewal::Lost(_)), "not told that {what}");
        for left in [path.clone(), top.path().join("moved")] {
            let _ = std::fs::remove_dir_all(&left).or_else(|_| std::fs::remove_file(&left));
        }
    }
}

async fn lock_at(store: &Arc<File>, name: &str) -> crate::Guard {
    locks(store).mutex(name).unwrap().lock().await.unwrap()
}
