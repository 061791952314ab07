//! A connection that is cut after any byte of any operation.

use super::*;

/// How many cuts are tried side by side; most of the time is pauses between attempts.
const LANES: usize = 8;

/// What is longer than this is not cut after each byte but after every seventh.
const SHORT: u64 = 128;

/// One attempt at an operation: a client whose connection is cut, one that is left alone, and a lock.
struct Scene {
    far: Locks,
    near: Locks,
    name: String,
    proxy: Proxy,
    cut: Option<(Direction, u64)>,
    meter: Mutex<[u64; 2]>,
}

const BOTH: [Direction; 2] = [Direction::Requests, Direction::Replies];

impl Scene {
    async fn new(hazard: &str, cut: Option<(Direction, u64)>) -> Scene {
        let proxy = Proxy::start(SERVER.addr());
        let (far, near) = (connect_through(&proxy).await, connect(&SERVER.url()).await);
        // Of one length, for the name is among the bytes.
        let name = match cut {
            None => unique(&format!("{hazard}/uncut")),
            Some((direction, byte)) => format!("{hazard}/{:.3}/{byte:04}", format!("{direction:?}")),
        };
        Scene { far, near, name, proxy, cut, meter: Mutex::default() }
    }

    /// From here on bytes count.
    fn arm(&self) {
        *self.meter.lock().unwrap() = BOTH.map(|direction| self.proxy.forwarded(direction));
        if let Some((direction, bytes)) = self.cut {
            self.proxy.cut_after(direction, bytes);
        }
    }

    /// How many bytes went each way since then.
    fn bytes(&self) -> [u64; 2] {
        let start = *self.meter.lock().unwrap();
        BOTH.map(|direction| self.proxy.forwarded(direction) - start[direction as usize])
    }
}

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// Tries an operation once without a cut, and then with a cut after each byte that it took.
fn sweep(hazard: &str, operation: impl AsyncFn(&Scene) + Sync) {
    let attempt = async |cut| {
        let scene = Scene::new(hazard, cut).await;
        operation(&scene).await;
        let bytes = scene.bytes();
        if let Some((direction, byte)) = cut {
            assert!(scene.proxy.cuts() == 1 || bytes[direction as usize] <= byte, "{cut:?} of {bytes:?}");
        }
        expect_unused(&SERVER, &scene.near, &scene.name).await;
        bytes
    };
    // The first one also loads the scripts.
    run(attempt(None));
    let bytes = run(attempt(None));
    let cuts = BOTH.into_iter().flat_map(|direction| {
        let bytes = bytes[direction as usize];
        let step = if bytes <= SHORT { 1 } else { 7 };
        (0..bytes).step_by(step).map(move |byte| Some((direction, byte)))
    });
    let cuts: Vec<_> = cuts.collect();
    std::thread::scope(|threads| {
        for lane in 0..LANES {
            let (cuts, attempt) = (&cuts, &attempt);
            threads.spawn(move || {
                for cut in cuts.iter().skip(lane).step_by(LANES) {
                    run(attempt(*cut));
                }
            });
        }
    });
}

#[test]
fn a_cut_while_locking_and_releasing() {
    sweep("cut/lock", async |scene| {
        scene.arm();
        let guard = lock(&scene.far, &scene.name).await;
        enter(&SERVER, &guard);
        leave_and_release(&SERVER, guard).await;
    });
}

#[test]
fn a_cut_while_waiting_and_being_granted() {
    sweep("cut/wait", async |scene| {
        let holder = lock(&scene.near, &scene.name).await;
        enter(&SERVER, &holder);
        scene.arm();
        let waiter = queue(&scene.far, &scene.name);
        sees_waiters(&SERVER, &scene.name, 1).await;
        leave_and_release(&SERVER, holder).await;
        let guard = waiter.await.unwrap();
        enter(&SERVER, &guard);
        leave_and_release(&SERVER, guard).await;
    });
}

#[test]
fn a_cut_while_trying() {
    sweep("cut/try", async |scene| {
        scene.arm();
        let guard = scene.far.mutex(&scene.name).unwrap().try_lock().await.unwrap().unwrap();
        enter(&SERVER, &guard);
        leave_and_release(&SERVER, guard).await;
    });
}

#[test]
fn a_cut_while_extending() {
    sweep("cut/extend", async |scene| {
        let guard = lock(&scene.far, &scene.name).await;
        enter(&SERVER, &guard);
        scene.arm();
        if let Err(error) = guard.extend(2 * LONG_TTL).await {
            assert_eq!(error.kind(), ErrorKind::Unknown, "{error:?}");
        }
        assert!(guard.is_held());
        eventually("it is extended", async || guard.extend(2 * LONG_TTL).await.ok()).await;
        leave_and_release(&SERVER, guard).await;
    });
}

#[test]
fn a_cut_while_downgrading() {
    sweep("cut/downgrade", async |scene| {
        let guard = scene.far.rwlock(&scene.name).unwrap().write().await.unwrap();
        enter(&SERVER, &guard);
        scene.arm();
        let guard = guard.downgrade().await.unwrap();
        let reader = scene.near.rwlock(&scene.name).unwrap().read().timeout(PATIENCE).await.unwrap();
        assert!(scene.near.mutex(&scene.name).unwrap().try_lock().await.unwrap().is_none());
        reader.release().await.unwrap();
        leave_and_release(&SERVER, guard).await;
    });
}

#[test]
fn a_cut_while_a_cancelled_waiter_withdraws() {
    sweep("cut/withdraw", async |scene| {
        let holder = lock(&scene.near, &scene.name).await;
        enter(&SERVER, &holder);
        let waiter = queue(&scene.far, &scene.name);
        sees_waiters(&SERVER, &scene.name, 1).await;
        scene.arm();
        waiter.abort();
        sees_waiters(&SERVER, &scene.name, 0).await;
        leave_and_release(&SERVER, holder).await;
    });
}
