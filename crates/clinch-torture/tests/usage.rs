//! The binary as people meet it.

#![allow(clippy::unwrap_used, reason = "test code")]

use std::process::{Command, Output};

fn torture(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_clinch-torture")).args(words).output().unwrap()
}

#[test]
fn help_names_the_stores() {
    let help = torture(&["--help"]);
    let text = String::from_utf8(help.stdout).unwrap();
    assert!(help.status.success());
    for store in ["memory", "file", "redis", "sentinel", "cluster", "redlock", "etcd"] {
        assert!(text.contains(store), "{store} is not in:\n{text}");
    }
}

#[test]
fn an_unknown_store_is_refused_before_anything_is_started() {
    let refused = torture(&["radis"]);
    assert!(!refused.status.success() && refused.stdout.is_empty());
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(text.contains("\"radis\" is neither a store nor an option"), "{text}");
}
