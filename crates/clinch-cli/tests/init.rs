//! As process 1 of a container.

mod common;

use std::process::Command;

use common::World;

/// As process 1, orphans stay zombies, or a signal that nobody else could send is lost.
#[test]
fn as_process_1_it_reaps_orphans_and_passes_signals_on() {
    let world = World::new();
    let job = r#"
        (sh -c 'echo $$ > orphan; exec sleep 0.2' &)
        while [ ! -s orphan ]; do sleep 0.02; done
        orphan=$(cat orphan); tries=0
        while [ -e /proc/$orphan ]; do
            sleep 0.02; tries=$((tries + 1)); [ $tries -lt 1000 ] || exit 11
        done
        [ $PPID = 1 ] || exit 12
        trap 'exit 5' TERM
        kill -TERM 1
        while :; do sleep 0.02; done"#;
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc", env!("CARGO_BIN_EXE_clinch"), "run", "x", "-c", job]);
    command.current_dir(world.path(".")).env("CLINCH_URL", world.url()).env_remove("CLINCH_HELD");
    let output = command.output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "needs root for a PID namespace: {message}");
    assert!(!world.held("x"));
}
