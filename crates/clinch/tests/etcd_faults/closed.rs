//! Locks that were released closed: when they open, whatever etcd makes of their leases meanwhile.

use std::time::SystemTime;

use super::*;

/// For how long the locks of these tests are closed, unless etcd starts that anew.
pub(super) const CLOSED: Duration = Duration::from_secs(3600);

/// How far clocks of hosts may be apart, and a little.
pub(super) const LATE: Duration = Duration::from_secs(61);

/// Leaves a lock closed, since so long ago.
async fn leave_closed(etcd: &Etcd, locks: &Locks, name: &str, since: Duration) {
    assert_eq!(lock(locks, name).await.release_closed(CLOSED).await.unwrap(), Released::Released);
    backdate(etcd, name, since);
}

/// Has the record of a lock's only key say that it was written so long ago.
pub(super) fn backdate(etcd: &Etcd, name: &str, since: Duration) {
    let [key] = &keys(etcd, name)[..] else { panic!("{name} has no key, or several") };
    let value = etcd.ctl(&["get", "--print-value-only", key]);
    let (head, rest) = value.split_once("\"since\":\"").unwrap();
    let (_, tail) = rest.split_once('"').unwrap();
    let since = humantime::format_rfc3339_micros(SystemTime::now() - since);
    let value = format!("{head}\"since\":\"{since}\"{}", tail.trim_end());
    etcd.ctl(&["put", "--ignore-lease", key, &value]);
}

async fn try_lock(locks: &Locks, name: &str) -> Option<Guard> {
    locks.mutex(name).unwrap().try_lock().await.unwrap()
}

/// Until when a lock is shown as closed, if it is.
async fn shown(locks: &Locks, name: &str) -> Option<SystemTime> {
    locks.state(name).await.unwrap().and_then(|state| state.closed_until)
}

/// etcd gives every lease its whole time again after an election: a lock that is to be closed for a day would be so for nearly two, and
/// one that is to be closed for a month for ever.
#[tokio::test]
async fn a_closed_lock_opens_though_a_leader_came_that_starts_its_time_anew() {
    let etcd = Etcd::start();
    let locks = connect(&etcd.url()).await;
    for name in ["tried", "waited-for", "read", "listed"] {
        leave_closed(&etcd, &locks, name, CLOSED + LATE).await;
    }
    for (name, since) in [("early", CLOSED / 2), ("nearly", CLOSED + LATE / 2)] {
        leave_closed(&etcd, &locks, name, since).await;
    }
    etcd.restart();
    let locks = connect(&etcd.url()).await;
    assert_eq!(shown(&locks, "listed").await, None, "it is open for whoever comes");
    assert!(locks.list("listed").await.unwrap().is_empty());
    assert!(try_lock(&locks, "tried").await.is_some(), "its time is up");
    drop(within("its time is up for who waits", lock(&locks, "waited-for")).await);
    assert!(locks.rwlock("read").unwrap().try_read().await.unwrap().is_some(), "its time is up for readers");
    for name in ["early", "nearly"] {
        assert!(try_lock(&locks, name).await.is_none(), "{name} was opened too soon");
        assert!(shown(&locks, name).await.unwrap() > SystemTime::now(), "{name} opens in the past");
    }
}

/// As long as nobody else came to lead, etcd's count is right, and no wall clock matters.
#[tokio::test]
async fn a_closed_lock_opens_by_no_wall_clock_while_the_leader_stays() {
    let etcd = Etcd::start();
    let locks = connect(&etcd.url()).await;
    leave_closed(&etcd, &locks, "job", CLOSED * 48).await;
    assert!(try_lock(&locks, "job").await.is_none(), "opened by a wall clock");
    assert!(shown(&locks, "job").await.unwrap() > SystemTime::now(), "it opens in the past");
}

/// What keeps a lock closed for an evicted holder is exclusion: it may hold the lock still, whatever clocks say.
#[tokio::test]
async fn the_notice_of_an_evicted_holder_is_not_cut_short_by_a_wall_clock() {
    let etcd = Etcd::start();
    let (backend, locks) = (open(&etcd.url()).await, connect(&etcd.url()).await);
    let claim = ghosts::claim(1, "job", LONG_TTL);
    ghosts::granted(&*backend, &claim).await;
    backend.evict(&claim.name, claim.id).await.unwrap();
    backdate(&etcd, "job", LONG_TTL);
    etcd.restart();
    assert!(try_lock(&locks, "job").await.is_none(), "opened under a holder that may not have heard");
    assert!(shown(&locks, "job").await.unwrap() > SystemTime::now(), "it opens in the past");
    backend.release(&claim, Duration::ZERO).await.unwrap();
}
