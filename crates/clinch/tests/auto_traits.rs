//! Guards, clients and futures can be sent to, shared with and spawned on other threads.

use clinch::{
    Acquire, Capabilities, Claim, ClaimId, Clock, Detached, Env, Error, Guard, Instant, Lane, LockName,
    Locks, Loss, Mutex, Random, Released, RwLock, Semaphore, Standing, Token, WriteGuard,
};

fn everywhere<T: Send + Sync + Unpin + 'static>() {}

fn spawnable<T: Send>(_: T) {}

#[test]
fn values_are_send_and_sync() {
    everywhere::<Acquire<'static>>();
    everywhere::<Acquire<'static, WriteGuard>>();
    everywhere::<Capabilities>();
    everywhere::<Claim>();
    everywhere::<ClaimId>();
    everywhere::<Clock>();
    everywhere::<Detached>();
    everywhere::<Env>();
    everywhere::<Error>();
    everywhere::<Guard>();
    everywhere::<Instant>();
    everywhere::<Lane>();
    everywhere::<LockName>();
    everywhere::<Locks>();
    everywhere::<Loss>();
    everywhere::<Mutex>();
    everywhere::<Random>();
    everywhere::<Released>();
    everywhere::<RwLock>();
    everywhere::<Semaphore>();
    everywhere::<Standing>();
    everywhere::<Token>();
    everywhere::<WriteGuard>();
    everywhere::<std::sync::Arc<dyn clinch::backend::Backend>>();
}

/// Never called: that it compiles is the test.
#[allow(dead_code, reason = "compiled, not run")]
fn futures_are_send(locks: &Locks, guard: &Guard, mutex: &Mutex, lock: &RwLock, semaphore: &Semaphore) {
    let time = std::time::Duration::from_secs(1);
    spawnable(clinch::connect("memory://"));
    spawnable(mutex.lock().into_future());
    spawnable(mutex.lock().run(async |guard: &Guard| guard.token()));
    spawnable(mutex.try_lock());
    spawnable(lock.read().into_future());
    spawnable(lock.write().into_future());
    spawnable(lock.try_read());
    spawnable(lock.try_write());
    spawnable(semaphore.acquire(1).map(IntoFuture::into_future));
    spawnable(semaphore.try_acquire(1));
    spawnable(guard.changed(&Standing::Held));
    spawnable(guard.extend(time));
    spawnable(guard.lost());
    spawnable(guard.verify());
    spawnable(locks.close(time));
    spawnable(locks.list(""));
    spawnable(locks.state("name"));
    spawnable(locks.evict("name", ClaimId::from_bits(1)));
    spawnable(locks.renew_detached("name", ClaimId::from_bits(1), time));
    spawnable(locks.release_detached("name", ClaimId::from_bits(1)));
    spawnable(locks.release_detached_closed("name", ClaimId::from_bits(1), std::time::Duration::ZERO));
}

#[allow(dead_code, reason = "compiled, not run")]
fn ending_futures_are_send(guard: Guard, other: Guard, writer: WriteGuard, another: WriteGuard) {
    spawnable(guard.release());
    spawnable(other.release_closed(std::time::Duration::ZERO));
    spawnable(writer.downgrade());
    spawnable(another.release());
}
