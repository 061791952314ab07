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

/// The ids in the `/proc` of another namespace are those of strangers, who would be taken for the caller, or be killed in place of the job.
#[test]
fn ids_of_another_namespace_are_not_believed() {
    let world = World::new();
    for (umount, args, code) in [
        (":", "run x true", 70),
        ("umount -l /proc", "run x true", 70),
        (":", "acquire x", 64),
        (":", "acquire --for 1 x", 0),
    ] {
        let script = format!("{umount}; \"$CLINCH\" {args}");
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--fork", "sh", "-c", &script]);
        command.env("CLINCH", env!("CARGO_BIN_EXE_clinch"));
        command.env("CLINCH_URL", world.url()).env_remove("CLINCH_HELD");
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args}: {said}");
        assert!(code != 70 || said.contains("mount -t proc"), "{said}");
    }
}
