//! Waiters who died and cannot be told: they keep their places, and stand in nobody's way.

use super::queues::{backend, claim};
use super::*;
use crate::common::release;
use clinch::Mode;
use clinch::backend::Progress;

/// Puts waiters in front of a queue whose inbox nobody listens to.
fn put_silent(redis: &Redis, count: usize) {
    let fill = "local now = redis.call('TIME')[1]
        local function key(of) return redis.call('KEYS', '*' .. of .. '*:clinch:job')[1] end
        for i = 1, tonumber(ARGV[1]) do
          local id = string.format('%032x', i + 1000000)
          redis.call('LPUSH', key('queue'), id)
          redis.call('HSET', key('claims'), id, 'w x ' .. now .. '000 120000 ' .. now .. '000000 00ff {}')
        end";
    redis.call(&["EVAL", fill, "0", &count.to_string()]);
}

fn told(redis: &Redis) -> u64 {
    redis.client().commandstats().get("publish").copied().unwrap_or(0)
}

/// When the lock stays closed, and when it is taken away, the first who hears it is told when that ends.
#[tokio::test]
async fn who_is_told_of_an_end_is_one_who_hears_it() {
    for evicted in [false, true] {
        let redis = Redis::start();
        let (locks, backend) = (connect(&redis.url()).await, backend(&redis).await);
        let holder = claim("job", Mode::Exclusive, 1);
        assert!(matches!(backend.claim(&holder).await.unwrap(), Progress::Granted(_)));
        let waiter = queue(&locks, "job");
        sees_waiters(&redis, "job", 1).await;
        put_silent(&redis, 2);
        let before = told(&redis);
        match evicted {
            true => backend.evict(&holder.name, holder.id).await.unwrap(),
            false => backend.release(&holder, Duration::from_millis(300)).await.unwrap(),
        };
        assert_eq!(told(&redis) - before, 3, "two who cannot hear it, and one who does");
        backend.release(&holder, Duration::ZERO).await.unwrap();
        // Who is not told looks after half a minute.
        let next = tokio::time::timeout(Duration::from_secs(20), waiter).await.expect("nobody was told");
        release(next.unwrap()).await;
    }
}

#[tokio::test]
async fn a_try_is_granted_what_only_the_dead_wait_for() {
    for dead in [1, 300] {
        let redis = Redis::start();
        let (locks, backend) = (connect(&redis.url()).await, backend(&redis).await);
        let holder = claim("job", Mode::Exclusive, 1);
        assert!(matches!(backend.claim(&holder).await.unwrap(), Progress::Granted(_)));
        let next = claim("job", Mode::Exclusive, 2);
        assert!(matches!(backend.claim(&next).await.unwrap(), Progress::Queued(_)));
        put_silent(&redis, dead);
        let mutex = locks.mutex("job").unwrap();
        backend.release(&next, Duration::ZERO).await.unwrap();
        assert!(mutex.try_lock().await.unwrap().is_none(), "two hold it");
        backend.release(&holder, Duration::ZERO).await.unwrap();
        for _ in 0..2 {
            release(mutex.try_lock().await.unwrap().expect("the dead keep it from who lives")).await;
        }
    }
}

/// More than one script passes: who asks again, or renews its place, comes to its turn.
#[tokio::test]
async fn who_lives_behind_many_dead_is_granted() {
    for renews in [false, true] {
        let redis = Redis::start();
        let backend = backend(&redis).await;
        let holder = claim("job", Mode::Exclusive, 1);
        assert!(matches!(backend.claim(&holder).await.unwrap(), Progress::Granted(_)));
        let mut next = claim("job", Mode::Exclusive, 2);
        assert!(matches!(backend.claim(&next).await.unwrap(), Progress::Queued(_)));
        put_silent(&redis, 600);
        // The holder died.
        redis.call(&["DEL", "clinch:job"]);
        next.place = renews;
        let next = Arc::new(next);
        for _ in 0..4 {
            match renews {
                true => drop(backend.renew(std::slice::from_ref(&next)).await),
                false => drop(backend.claim(&next).await.unwrap()),
            }
        }
        let held_by = super::holder(&redis, "job").map(|(id, _)| id);
        assert_eq!(held_by, Some(next.id.to_string()));
        let queue = redis.call(&["KEYS", "*queue:clinch:job"]).array().remove(0).text();
        assert_eq!(redis.call(&["LLEN", &queue]).int(), 600, "the dead keep their places, once");
    }
}
