//! The job that locks are for: many shells count in one file by read, sleep, write.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{World, eventually, kill};
use rustix::process::Signal;

const SHELLS: usize = 8;
const ROUNDS: usize = 40;

const COUNT: &str =
    r#"read -r count < counter; sleep 0.002; echo $((count + 1)) > counter; echo done >> completed"#;

fn count(world: &World) {
    world.write("counter", "0\n");
    std::thread::scope(|scope| {
        for _ in 0..SHELLS {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    world.output(["run", "n", "-c", COUNT]);
                }
            });
        }
    });
}

/// Two jobs run at once, and one of two increments is lost.
#[test]
fn eight_shells_count_exactly() {
    let world = World::new();
    count(&world);
    assert_eq!(world.read("counter").trim(), (SHELLS * ROUNDS).to_string());
}

/// A killed wrapper frees the lock under its running job, or a dead one keeps it for ever.
#[test]
fn eight_shells_count_exactly_while_holders_are_killed() {
    let world = World::new();
    let over = AtomicBool::new(false);
    let mut killed = 0;
    std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            let mut killed = 0;
            while !over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(50));
                let holder = world.claims("n", "held").first().and_then(|claim| claim["pid"].as_i64());
                killed += usize::from(holder.is_some_and(|pid| kill(pid as i32, Signal::KILL)));
            }
            killed
        });
        count(&world);
        over.store(true, Ordering::Relaxed);
        killed = killer.join().unwrap();
    });
    eventually("the last job is over", || !world.held("n"));
    assert!(killed > 0, "somebody was killed");
    assert_eq!(world.read("counter").trim(), world.lines("completed").to_string());
}
