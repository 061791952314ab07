//! Grants that a store gives of its own accord, and tells the waiter.

use clinch::backend::Grant;

use super::*;

/// A store that grants to whoever waits, for a time of its own, and tells that some time later.
#[derive(Debug)]
struct Pushing {
    store: Arc<Faulty>,
    env: Env,
    lasts: Duration,
    told_after: Duration,
}

#[async_trait::async_trait]
impl Backend for Pushing {
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }
    async fn claim(&self, claim: &Claim) -> clinch::Result<Progress> {
        self.store.claim(claim).await
    }
    async fn wait(&self, claim: &Claim) -> clinch::Result<Wake> {
        self.store.wait(claim).await?;
        let from = self.env.clock().now();
        // Known to the waiter's client as a push, not as its own step.
        let Progress::Granted(grant) = self.store.claim(claim).await? else { return Ok(Wake::Step) };
        pass(&self.env, self.told_after).await;
        Ok(Wake::Granted(Grant { ttl: Some(self.lasts), from: Some(from), ..grant }))
    }
    async fn renew(&self, claims: &[Arc<Claim>]) -> Vec<Renewal> {
        self.store.renew(claims).await
    }
    async fn verify(&self, claim: &Claim) -> clinch::Result<Renewal> {
        self.store.verify(claim).await
    }
    async fn downgrade(&self, claim: &Claim) -> clinch::Result<()> {
        self.store.downgrade(claim).await
    }
    async fn release(&self, claim: &Claim, linger: Duration) -> clinch::Result<Freed> {
        self.store.release(claim, linger).await
    }
    async fn list(&self, prefix: &str) -> clinch::Result<Vec<LockState>> {
        self.store.list(prefix).await
    }
    async fn evict(&self, name: &LockName, claim: ClaimId) -> clinch::Result<Freed> {
        self.store.evict(name, claim).await
    }
}

/// How often a waiter asks that is pushed such a grant, the first time and the store's own included, and what is left of its lease when
/// it has it.
async fn pushed(renew: Renew, lasts: Duration, told_after: Duration) -> (u64, Duration) {
    let env = world(21);
    let (store, _, near) = faulty(&env);
    let pushing = Pushing { store: store.clone(), env: env.clone(), lasts, told_after };
    let locks = Locks::new(Arc::new(pushing), env.clone()).ttl(TTL).unwrap().renew(renew);
    let held = near.mutex("job").unwrap().lock().await.unwrap();
    let mutex = locks.mutex("job").unwrap();
    let waiter = tokio::spawn(async move { mutex.lock().await.unwrap() });
    pass(&env, Duration::from_secs(1)).await;
    // Of the grant alone it is to be seen how long it lasts.
    store.hang(Step::Renew);
    held.release().await.unwrap();
    let guard = waiter.await.unwrap();
    let left = guard.deadline().unwrap().since(env.clock().now());
    assert!(near.mutex("job").unwrap().try_lock().await.unwrap().is_none());
    (store.calls_of(Step::Claim), left)
}

#[tokio::test(start_paused = true)]
async fn a_pushed_grant_is_used_as_it_is_where_that_is_enough() {
    const SHORT: Duration = Duration::from_secs(3);
    let (whole, short) = (TTL * 8 / 10, SHORT * 8 / 10);
    let (asked, left) = pushed(Renew::Auto, SHORT, Duration::ZERO).await;
    assert!(asked == 2 && left > short && left < SHORT, "{asked} {left:?}");
    // Nobody would make it longer.
    let (asked, left) = pushed(Renew::Never, SHORT, Duration::ZERO).await;
    assert!(asked == 3 && left > whole, "{asked} {left:?}");
    let (asked, left) = pushed(Renew::Never, TTL, Duration::ZERO).await;
    assert!(asked == 2 && left > whole, "{asked} {left:?}");
}

#[tokio::test(start_paused = true)]
async fn a_pushed_grant_that_is_heard_late_counts_from_when_it_was_made() {
    let late = TTL / 2;
    let (asked, left) = pushed(Renew::Auto, TTL, late).await;
    assert!(asked == 2 && left < TTL - late, "{asked} {left:?}");
    // With little left, the rest of its lease is asked for first.
    let (asked, left) = pushed(Renew::Auto, TTL, TTL * 2 / 3).await;
    assert!(asked == 3 && left > TTL * 8 / 10, "{asked} {left:?}");
}
