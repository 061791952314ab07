//! Names that a store would fold, cut or take for something else.

use super::Fixture;
use super::client::{Client, unique};
use super::faults::Step;
use crate::error::ErrorKind;
use crate::guard::Released;
use crate::name::LockName;

/// P10: names that are none are refused before anything is sent.
pub async fn bad_names_reach_the_store(fixture: &dyn Fixture) {
    let client = Client::new(fixture).await;
    let long = "n".repeat(LockName::MAX_LEN + 1);
    // 257 letters of two bytes: short enough in letters, too long in bytes.
    let wide = "é".repeat(LockName::MAX_LEN / 2 + 1);
    for bad in ["", "\0", "a\0b", &long, &wide] {
        assert_eq!(client.locks.mutex(bad).unwrap_err().kind(), ErrorKind::Invalid, "{bad:?}");
        assert_eq!(client.locks.rwlock(bad).unwrap_err().kind(), ErrorKind::Invalid, "{bad:?}");
        assert_eq!(client.locks.semaphore(bad, 2).unwrap_err().kind(), ErrorKind::Invalid, "{bad:?}");
        assert_eq!(client.locks.state(bad).await.unwrap_err().kind(), ErrorKind::Invalid, "{bad:?}");
    }
    assert_eq!(client.faults.calls_of(Step::Claim) + client.faults.calls_of(Step::List), 0);
}

/// Names that some store, file system or wire format would fold into another, cut, or take for syntax.
fn tricky() -> Vec<String> {
    let plain = [
        "a",
        "A",
        "b ",
        "b",
        " b",
        "a/b",
        "a%2Fb",
        "a%2fb",
        "a\\b",
        "a//b",
        "a/",
        "/",
        "/a",
        ".",
        "..",
        "../a",
        "./a",
        "...",
        ".a",
        ".lock",
        "-",
        "-rf",
        "--",
        "%",
        "%%",
        "%00",
        "%2",
        "%ZZ",
        "a\nb",
        "a\rb",
        "\t",
        "{a}",
        "{a",
        "}",
        "a:b",
        "a*",
        "a?",
        "[a]",
        "'",
        "\"",
        "a'; drop table",
        "$(a)",
        "~",
        "~root",
        "#",
        "&",
        "|",
        "con",
        "nul",
        // Pairs that Unicode normalization, case folding or a lossy conversion would make one.
        "\u{e9}",
        "e\u{301}",
        "\u{df}",
        "ss",
        "SS",
        "\u{131}",
        "i",
        "I",
        "\u{130}",
        "\u{fb01}",
        "fi",
        "\u{c5}",
        "\u{212b}",
        "A\u{30a}",
        "a\u{200b}",
        "a\u{feff}",
        "\u{7f}",
        "\u{1b}[31m",
        "\u{6f22}\u{5b57}",
        "\u{1f512}",
        "\u{10ffff}",
        "\u{fffd}",
        "?",
    ];
    let mut names: Vec<String> = plain.map(str::to_owned).into();
    names.extend(["x".repeat(255), "x".repeat(256), "x".repeat(LockName::MAX_LEN - 1)]);
    names.extend([
        "x".repeat(LockName::MAX_LEN),
        "%".repeat(LockName::MAX_LEN),
        "/".repeat(LockName::MAX_LEN),
    ]);
    names.extend(["é".repeat(LockName::MAX_LEN / 2), "\u{1}".repeat(LockName::MAX_LEN)]);
    names
}

/// Distinct names are distinct locks: all can be held at a time, each excludes a second holder, and the store lists
/// every one of them exactly as it was given, once.
pub async fn names_collide(fixture: &dyn Fixture) {
    let (one, other) = (Client::new(fixture).await, Client::new(fixture).await);
    let names = tricky();
    let mut guards = Vec::new();
    for name in &names {
        guards.push(one.lock(name).await);
    }
    let listed = other.locks.list("").await.unwrap();
    for (name, guard) in names.iter().zip(&guards) {
        let states: Vec<_> = listed.iter().filter(|state| state.name.as_str() == name).collect();
        assert_eq!(states.len(), 1, "{name:?} is listed {} times", states.len());
        let ids: Vec<_> = states[0].claims.iter().map(|claim| claim.id).collect();
        assert_eq!(ids, [guard.claim_id()], "{name:?} has foreign claims");
        assert!(!other.could_lock(name).await, "{name:?} is held twice");
        assert_eq!(guard.name().as_str(), name);
    }
    let sorted = listed.is_sorted_by(|one, other| one.name <= other.name);
    assert!(sorted, "the list is not in the order of names");
    for guard in guards {
        assert!(guard.is_held());
        assert_eq!(guard.release().await.unwrap(), Released::Released);
    }
    let left = other.locks.list("").await.unwrap();
    let left: Vec<_> =
        left.iter().filter(|state| names.iter().any(|name| name == state.name.as_str())).collect();
    assert!(left.is_empty(), "released locks are listed: {left:?}");
}

/// A prefix is compared byte for byte and is no pattern.
pub async fn list_by_prefix(fixture: &dyn Fixture) {
    let client = Client::new(fixture).await;
    let base = unique("prefix");
    let ends = ["", "/a", "/a/b", "/A", "/%", "/*", "/é", "/e\u{301}"];
    let mut guards = Vec::new();
    for end in ends {
        guards.push(client.lock(&format!("{base}{end}")).await);
    }
    for end in ["", "/", "/a", "/a/", "/%", "/*", "/e", "/\u{e9}", "/nothing", "%"] {
        let prefix = format!("{base}{end}");
        let listed = client.locks.list(&prefix).await.unwrap();
        let listed: Vec<_> = listed.iter().map(|state| state.name.as_str().to_owned()).collect();
        let mut expected: Vec<_> = ends.iter().map(|end| format!("{base}{end}")).collect();
        expected.retain(|name| name.starts_with(&prefix));
        expected.sort_unstable();
        assert_eq!(listed, expected, "the list of {prefix:?}");
    }
    let state = client.locks.state(&base).await.unwrap().expect("the lock is held");
    assert_eq!(state.claims[0].id, guards[0].claim_id());
}
