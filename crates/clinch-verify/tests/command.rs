//! The command: exit status, output, messages.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test may fail")]

use std::io::Write;
use std::process::{Command, Stdio};

const VALID: &str = r#"{"k":"inv","id":1,"p":"c1","lock":"a","f":"acquire","mode":"x","claim":"9f","t":1000000}
{"k":"ok","id":1,"p":"c1","lock":"a","f":"acquire","mode":"x","claim":"9f","token":1,"t":2000000}
"#;
const SECOND: &str =
    r#"{"k":"ok","id":1,"p":"c2","lock":"a","f":"acquire","mode":"x","claim":"77","token":2,"t":3000000}"#;

/// Runs the command with a history on standard input: exit status, standard output, standard error.
fn run(args: &[&str], input: &str) -> (i32, String, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_clinch-verify"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that stops at its arguments does not read; that is no failure of this test.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn valid_is_0() {
    let (status, out, err) = run(&["-"], VALID);
    assert_eq!((status, err.as_str()), (0, ""));
    assert_eq!(out, "valid: 0 violations in 2 events, 1 grants, 1 locks\n");
}

#[test]
fn violated_is_1_and_shows_the_witness() {
    let (status, out, _) = run(&["-"], &format!("{VALID}{SECOND}"));
    assert_eq!(status, 1);
    assert!(
        out.starts_with("exclusion: lock \"a\": claim 9f of c1 (exclusive, token 1) and claim 77"),
        "{out}"
    );
    assert!(out.contains(SECOND), "{out}");
}

#[test]
fn what_a_history_leaves_open_is_2_with_the_reason() {
    let history = include_str!("histories/silent-past-its-deadline.jsonl");
    let (status, out, err) = run(&["-"], history);
    assert_eq!(status, 2);
    assert!(out.starts_with("loss: unknown: lock \"L\": the deadline of claim ac of a"), "{out}");
    assert_eq!(err, "clinch-verify: no verdict: questions stay open in 6 events\n");
}

#[test]
fn the_report_is_had_as_json() {
    let (status, out, _) = run(&["--json", "-"], &format!("{VALID}{SECOND}"));
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(status, 1);
    assert_eq!(report["verdict"], "violated");
    assert_eq!(report["violations"][0]["property"], "exclusion");
    assert_eq!(report["violations"][0]["witness"][0]["event"]["k"], "inv");
}

#[test]
fn properties_can_be_chosen() {
    let (status, ..) = run(&["--only=tokens,fence", "-"], &format!("{VALID}{SECOND}"));
    assert_eq!(status, 0);
}

#[test]
fn no_verdict_is_2() {
    let (status, out, err) = run(&["-"], "");
    assert_eq!(status, 2);
    assert!(out.starts_with("unknown"), "{out}");
    assert_eq!(err, "clinch-verify: no verdict: nothing was granted in 0 events\n");
}

#[test]
fn unusable_input_is_2_with_the_place() {
    let (status, out, err) = run(&["-"], &format!("{VALID}oops\n"));
    assert_eq!((status, out.as_str()), (2, ""));
    assert_eq!(err, "clinch-verify: standard input: line 3, column 1: expected value\n");
    let (status, _, err) = run(&["/does/not/exist"], "");
    assert_eq!(status, 2);
    assert!(err.starts_with("clinch-verify: /does/not/exist: No such file"), "{err}");
}

#[test]
fn wrong_arguments_are_2_with_the_reason() {
    for (args, reason) in [
        (&[][..], "no FILE given"),
        (&["--slak", "-"], "unknown option --slak"),
        (&["--slack"], "--slack needs a value"),
        (&["--slack", "5s", "-"], "whole number of milliseconds, not \"5s\""),
        (&["--json=yes", "-"], "--json takes no value"),
        (&["--only", "fences", "-"], "no property is called \"fences\""),
        (&["--only", "overtaking", "-"], "only with --fifo"),
    ] {
        let (status, _, err) = run(args, "");
        assert_eq!(status, 2);
        assert!(err.contains(reason), "{err}");
    }
}

#[test]
fn help_names_every_option() {
    let (status, out, _) = run(&["--help"], "");
    assert_eq!(status, 0);
    for option in ["--json", "--slack", "--late", "--fifo", "--only", "--help", "--version"] {
        assert!(out.contains(option));
    }
}
