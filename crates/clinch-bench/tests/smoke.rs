//! Every scenario runs and reports as it should. Nothing here depends on how fast the machine is.

// Helpers of tests are tests too, which clippy does not see.
#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)]

use std::process::{Command, Output};

use serde_json::Value;

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_clinch-bench")).args(args).output().unwrap()
}

/// Runs one scenario with little work and returns what it reported.
fn quick(scenario: &str, more: &[&str]) -> Value {
    let output = bench(&[&[scenario, "--quick", "--json"], more].concat());
    assert!(output.status.success(), "{scenario}: {}", String::from_utf8_lossy(&output.stderr));
    let all: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(all["machine"]["cores"].as_u64().unwrap() > 0);
    let [report] = all["scenarios"].as_array().unwrap().as_slice() else {
        panic!("one scenario was asked for")
    };
    assert_eq!(report["scenario"], scenario);
    assert!(report["error"].is_null(), "{report}");
    report.clone()
}

/// The cases of a table, and the value of a metric in the only round of one of them.
fn cases(table: &Value) -> Vec<&str> {
    table["rows"].as_array().unwrap().iter().map(|row| row["case"].as_str().unwrap()).collect()
}

fn value(table: &Value, case: &str, metric: &str) -> f64 {
    let row = table["rows"].as_array().unwrap().iter().find(|row| row["case"] == case).unwrap();
    let figure = row["figures"].as_array().unwrap().iter().find(|figure| figure["metric"] == metric);
    figure.unwrap_or_else(|| panic!("no {metric} in {row}"))["rounds"][0].as_f64().unwrap()
}

#[test]
fn file_pair_compares_with_the_bare_calls() {
    let report = quick("file-pair", &["--rounds", "2"]);
    let table = &report["tables"][0];
    assert_eq!(cases(table), ["open + flock + close", "clinch"]);
    assert_eq!(table["rows"][1]["ratio"]["rounds"].as_array().unwrap().len(), 2);
    assert!(value(table, "clinch", "p99") >= value(table, "clinch", "p50"));
    assert!(report["targets"][0]["measured"].as_f64().unwrap() > 0.0);
}

#[test]
fn run_compares_whole_processes() {
    // Any command that takes all arguments and succeeds will do.
    let report = quick("run", &["--clinch", "/bin/true"]);
    assert_eq!(cases(&report["tables"][0]), ["flock -n f true", "clinch run -n x -- true", "true"]);
}

#[test]
fn run_without_the_binary_says_how_to_build_it_and_fails() {
    let output = bench(&["run", "--quick", "--clinch", "/nonexistent/clinch"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stdout).contains("cargo build --release -p clinch-cli"));
}

#[test]
fn contention_counts_hand_offs_of_tasks_and_processes_without_violations() {
    let report = quick("file-contention", &[]);
    let tables = report["tables"].as_array().unwrap();
    assert_eq!(tables.len(), 2);
    for table in tables {
        assert_eq!(cases(table), ["flock", "clinch", "clinch, resting too", "flock, asking again at once"]);
        for case in ["flock", "clinch"] {
            assert!(value(table, case, "hand-offs to another waiter") > 0.0);
            assert_eq!(value(table, case, "violations"), 0.0);
        }
    }
}

#[test]
fn kill_measures_the_grant_after_it() {
    let report = quick("kill", &[]);
    let table = &report["tables"][0];
    assert_eq!(cases(table), ["flock", "clinch"]);
    assert!(value(table, "clinch", "kill to grant") > 0.0);
}

#[test]
fn held_loses_nothing_on_any_store() {
    let report = quick("held", &[]);
    let table = &report["tables"][0];
    for case in ["file://", "memory://, TTL 9 s"] {
        assert_eq!(value(table, case, "leases"), 100.0);
        assert_eq!(value(table, case, "lost"), 0.0);
        assert!(value(table, case, "keeper CPU") >= 0.0);
    }
}

#[test]
fn a_pair_on_redis_is_two_commands() {
    let report = quick("redis-pair", &[]);
    let table = &report["tables"][0];
    assert_eq!(cases(table), ["raw", "clinch", "clinch, lean=on", "rslock"]);
    for case in cases(table) {
        assert_eq!(value(table, case, "commands"), 2.0, "{case}");
    }
    let notes: Vec<&str> =
        report["notes"].as_array().unwrap().iter().map(|note| note.as_str().unwrap()).collect();
    assert!(notes.contains(&"MONITOR saw raw send 100 EVALSHA, 100 SET for 100 pairs."), "{notes:?}");
    assert!(notes.contains(&"MONITOR saw clinch send 200 EVALSHA for 100 pairs."), "{notes:?}");
}

#[test]
fn throughput_on_redis_is_measured_in_processes_of_their_own() {
    let report = quick("redis-throughput", &[]);
    for case in ["raw", "clinch", "clinch, lean=on", "rslock"] {
        assert!(value(&report["tables"][0], case, "pairs") > 0.0);
        assert!(value(&report["tables"][0], case, "client CPU") > 0.0);
    }
}

#[test]
fn contention_on_redis_hands_over_without_violations() {
    // On a busy host the short time of a smoke test may pass before anybody has handed anything over.
    let handed_over = (0..10).any(|_| {
        let report = quick("redis-contention", &[]);
        let tables = report["tables"].as_array().unwrap();
        assert_eq!(tables.len(), 2, "processes that hold, tasks that do not");
        let all = || tables.iter().flat_map(|table| cases(table).into_iter().map(move |case| (table, case)));
        assert!(all().all(|(table, case)| value(table, case, "violations") == 0.0), "{report}");
        all().all(|(table, case)| {
            value(table, case, "hand-offs to another waiter") > 0.0 && value(table, case, "commands") >= 2.0
        })
    });
    assert!(handed_over);
}

#[test]
fn held_leases_on_redis_are_renewed_and_stay() {
    let report = quick("redis-held", &[]);
    for case in ["raw", "clinch", "rslock"] {
        assert_eq!(value(&report["tables"][0], case, "lost"), 0.0);
        assert_eq!(value(&report["tables"][0], case, "keys at the end"), 100.0);
    }
    assert!(value(&report["tables"][0], "clinch", "renewals") > 0.0);
}

#[test]
fn kills_on_redis_are_measured_to_the_next_grant() {
    let report = quick("redis-kill", &[]);
    let (held, queued) = (&report["tables"][0], &report["tables"][1]);
    for case in cases(held) {
        assert!(value(held, case, "grant after the end of the lease") > -1000.0);
    }
    for case in cases(queued) {
        assert!(value(queued, case, "release to grant") > 0.0);
    }
}

#[test]
fn a_pair_on_etcd_is_two_requests_and_two_writes() {
    // On a busy host it may take as long as until the lease of a client is to be renewed, whatever pairs there are.
    let unrenewed = (0..10).any(|_| {
        let report = quick("etcd-pair", &[]);
        let table = &report["tables"][0];
        assert_eq!(cases(table), ["raw", "raw on tonic's channel", "clinch"]);
        if cases(table).iter().any(|case| value(table, case, "renewals") > 0.0) {
            return false;
        }
        for case in cases(table) {
            assert_eq!(value(table, case, "requests"), 2.0, "{case}");
            assert!(value(table, case, "Raft rounds") >= 2.0, "{case}");
        }
        true
    });
    assert!(unrenewed, "a pair reads");
}

#[test]
fn contention_on_etcd_hands_over_without_violations() {
    let report = quick("etcd-contention", &[]);
    let tables = report["tables"].as_array().unwrap();
    assert_eq!(tables.len(), 2, "with a hold and without");
    for table in tables {
        assert_eq!(cases(table), ["Go's concurrency.Mutex", "etcd's Lock API", "clinch"]);
        assert!(value(table, "clinch", "acquisitions") > 0.0);
        for case in cases(table) {
            // etcd's own locks wait for 100 ms at a time, so they may get nothing while they are watched.
            assert!(value(table, case, "requests") > 0.0);
            assert!(value(table, case, "messages") >= value(table, case, "requests"));
            assert_eq!(value(table, case, "violations"), 0.0);
        }
    }
}

#[test]
fn held_leases_on_etcd_are_renewed_and_stay() {
    let report = quick("etcd-held", &[]);
    for case in ["raw", "clinch"] {
        assert_eq!(value(&report["tables"][0], case, "lost"), 0.0);
        assert_eq!(value(&report["tables"][0], case, "keys at the end"), 100.0);
        assert!(value(&report["tables"][0], case, "keepalives") > 0.0);
    }
}

#[test]
fn kills_on_etcd_are_measured_to_the_next_grant() {
    let report = quick("etcd-kill", &[]);
    let table = &report["tables"][0];
    for case in ["Go's concurrency.Mutex", "clinch"] {
        assert!(value(table, case, "grant after the end of the lease") > -1000.0);
    }
}

#[test]
fn a_pair_on_five_servers_is_two_rounds_or_three() {
    let report = quick("redlock-pair", &[]);
    let table = &report["tables"][0];
    assert_eq!(
        cases(table),
        ["raw, all five", "raw, first three", "clinch, fencing=off", "clinch", "rslock"]
    );
    for case in ["raw, all five", "raw, first three"] {
        assert_eq!(value(table, case, "commands"), 10.0, "{case}");
    }
    // A server that did not answer in time is asked again, or met again.
    for case in ["rslock", "clinch, fencing=off"] {
        assert!(value(table, case, "commands") >= 10.0, "{case}");
    }
    for case in ["raw, all five", "raw, first three", "rslock"] {
        assert!(value(table, case, "acquire p50") > 0.0 && value(table, case, "release p50") > 0.0);
    }
}

#[test]
fn servers_that_stand_still_leave_nothing_behind() {
    let report = quick("redlock-stopped", &[]);
    let (few, many, ends) = (&report["tables"][0], &report["tables"][1], &report["tables"][2]);
    assert_eq!(cases(few), ["all up", "1 stopped", "2 stopped"]);
    for case in cases(few) {
        assert_eq!(value(few, case, "keys left"), 0.0, "{case}");
    }
    assert!(value(many, "3 stopped", "failed after") >= 1000.0);
    assert_eq!(value(many, "3 stopped", "keys left on the others"), 0.0);
    assert_eq!(value(many, "3 stopped", "keys left"), 0.0);
    assert!(cases(ends).iter().all(|case| value(ends, case, "lock, release and exit") > 0.0));
}

#[test]
fn contention_on_five_servers_counts_votes_and_has_no_violations() {
    let report = quick("redlock-contention", &[]);
    let tables = report["tables"].as_array().unwrap();
    assert_eq!(tables.len(), 3, "tasks, processes, votes");
    for table in &tables[..2] {
        assert_eq!(cases(table), ["clinch", "one server"]);
        assert!(value(table, "clinch", "votes") >= 1.0);
        assert_eq!(value(table, "clinch", "violations"), 0.0);
    }
    for case in cases(&tables[2]) {
        let share = |end| value(&tables[2], case, end);
        let all = share("won") + share("held") + share("too early") + share("split");
        assert!(share("won") > 0.0 && (all - 100.0).abs() < 1e-6, "{case}: {all}");
    }
}

#[test]
fn help_lists_the_scenarios_and_a_wrong_argument_fails() {
    let help = bench(&["--help"]);
    assert!(help.status.success());
    for scenario in [
        "file-pair",
        "run",
        "file-contention",
        "kill",
        "held",
        "redis-contention",
        "etcd-contention",
        "redlock-stopped",
    ] {
        assert!(String::from_utf8_lossy(&help.stdout).contains(scenario));
    }
    assert_eq!(bench(&["--fast"]).status.code(), Some(1));
}
