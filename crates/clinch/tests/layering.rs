//! The architecture holds: which module uses which is read off the `use` lines.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test code"
)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Modules from the bottom up. One may use its own layer and those below, and nothing above.
const LAYERS: [(&str, &[&str]); 9] = [
    (
        "values",
        &[
            "calm", "check", "claim", "drift", "error", "fence", "name", "process", "queue", "sync", "token",
            "url",
        ],
    ),
    ("time", &["clock", "lease"]),
    ("world", &["env", "lane", "net", "random", "readable", "timer"]),
    ("trait", &["backend"]),
    ("stores", &["backends"]),
    ("engine", &["release", "tenure", "keeper", "engine", "claimed", "guard", "acquire"]),
    ("primitives", &["mutex", "rwlock", "semaphore"]),
    ("front", &["locks"]),
    ("suite", &["conformance"]),
];

/// What must not be known although it is on a lower layer or the same.
const FORBIDDEN: [(&str, &[&str], &str); 6] = [
    ("backends", &["lease"], "when to renew or give up is the engine's business"),
    ("engine", &["backends"], "only locks.rs names stores"),
    (
        "primitives",
        &["backends", "backend", "engine", "keeper", "release"],
        "primitives are thin fronts of acquire.rs",
    ),
    ("keeper", &["claimed", "guard", "acquire", "engine"], "the keeper knows claims, not guards"),
    ("tenure", &["keeper", "guard", "env", "release"], "a tenure is judgement without a clock or a store"),
    ("guard", &["acquire"], "a guard does not wait"),
];

fn layer(module: &str) -> usize {
    let found = LAYERS.iter().position(|(_, modules)| modules.contains(&module));
    found.unwrap_or_else(|| panic!("module \"{module}\" is in no layer: add it to the table"))
}

/// All files but those that hold tests alone.
fn sources(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let entries = entries.filter(|path| !path.ends_with("tests.rs"));
    entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] }).collect()
}

/// The modules of this crate that a file names after `crate::`, tests left out.
fn used(text: &str) -> BTreeSet<String> {
    let code = text.split("mod tests {").next().unwrap();
    let code: Vec<&str> = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    let code = code.join("\n");
    let after = code.split("crate::").skip(1);
    let words = after.flat_map(|after| match after.strip_prefix('{') {
        Some(group) => group.split('}').next().unwrap().split(',').map(str::trim).collect(),
        None => vec![after],
    });
    let module =
        |word: &str| word.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    // Capitalised words are the crate's re-exports, which all layers may name.
    words.map(module).filter(|word| word.starts_with(|c: char| c.is_lowercase())).collect()
}

#[test]
fn modules_use_only_what_lies_below_them() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut seen = 0;
    for path in sources(&src) {
        let inside = path.strip_prefix(&src).unwrap();
        let module = inside.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs");
        if module == "lib" {
            continue;
        }
        seen += 1;
        let text = std::fs::read_to_string(&path).unwrap();
        for other in used(&text) {
            if other == module || matches!(other.as_str(), "connect" | "conformance_properties") {
                continue;
            }
            assert!(layer(&other) <= layer(module), "{} uses {other}, which lies above it", inside.display());
            for (who, what, why) in FORBIDDEN {
                let concerned = who == module || LAYERS[layer(module)].0 == who;
                assert!(
                    !(concerned && what.contains(&other.as_str())),
                    "{} uses {other}: {why}",
                    inside.display()
                );
            }
        }
    }
    assert!(seen > 20, "the sources were not found");
}

#[test]
fn one_file_reads_the_clock() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let engine = sources(&src).into_iter().filter(|path| !path.ends_with("clock.rs"));
    // The suite stands outside the engine and may date its simulated worlds.
    for path in engine.filter(|path| !path.to_string_lossy().contains("conformance")) {
        let text = std::fs::read_to_string(&path).unwrap();
        let code = text.split("mod tests {").next().unwrap();
        for reading in ["SystemTime::now()", "Instant::now()", "clock_gettime"] {
            assert!(!code.contains(reading), "{} reads a clock by {reading}", path.display());
        }
    }
}

/// A child would go on with what its parent's runtime does.
#[test]
fn whatever_a_runtime_runs_ends_with_its_process() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let doors = ["process.spawn(", "process().spawn(", "process().spawn_on(", "lane.spawn(", "lane().spawn("];
    let mut seen = 0;
    for path in sources(&src) {
        let is_door = ["process.rs", "lane.rs"].iter().any(|door| path.ends_with(door));
        if is_door || path.to_string_lossy().contains("conformance") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let code = text.split("mod tests {").next().unwrap();
        for line in code.lines().filter(|line| line.contains("spawn(") || line.contains("spawn_on(")) {
            seen += 1;
            let goes_through = doors.iter().any(|door| line.contains(door));
            assert!(goes_through, "{} spawns past Process::spawn: {}", path.display(), line.trim());
        }
    }
    assert!(seen > 10, "the sources were not found");
}

/// Code as it awaits: without spaces, and without what is awaited by another, in blocks of its own or behind the door.
fn awaiting(code: &str) -> String {
    /// Up to the end of a group, or of the code.
    fn group(code: &mut std::str::Chars<'_>) -> String {
        let mut text = String::new();
        while let Some(c) = code.next() {
            match c {
                ')' | '}' => break,
                '(' | '{' => {
                    let inside = group(code);
                    let elsewhere = ["async", "asyncmove", ".here"].iter().any(|start| text.ends_with(start));
                    let (open, close) = if c == '(' { ("(", ")") } else { ("{", "}") };
                    text += open;
                    if inside.contains(".await") && !elsewhere {
                        text += &inside;
                    }
                    text += close;
                }
                c if c.is_whitespace() => {}
                c => text.push(c),
            }
        }
        text
    }
    let mut code = code.chars();
    let text = group(&mut code);
    assert_eq!(code.next(), None, "brackets do not match after {text}");
    text
}

#[test]
fn whatever_callers_poll_goes_through_one_door() {
    /// What goes through it elsewhere, and the request that is its caller's.
    const ELSEWHERE: [&str; 8] = [
        ".here()",
        "Locks::connect()",
        "guard.release()",
        "self.0.release()",
        "self.release_closed()",
        "self.release_detached_closed()",
        "self.told()",
        ".try_acquire()",
    ];
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut seen = 0;
    for path in sources(&src).into_iter().filter(|path| !path.to_string_lossy().contains("conformance")) {
        let text = std::fs::read_to_string(&path).unwrap();
        let code = text.split("\nmod tests {").next().unwrap();
        let mut lines = code.lines();
        while let Some(line) = lines.next() {
            let (indent, start) = line.split_at(line.len() - line.trim_start().len());
            let what = format!("{}: {start}", path.display());
            // A timer, which keeps wakers for later and calls each apart.
            let future = start.starts_with("pub fn ") && start.contains("-> impl Future");
            assert!(!future || start.contains("fn sleep_until("), "{what}");
            if !start.starts_with("pub async fn ") && !start.contains("async fn try_acquire(") {
                continue;
            }
            seen += 1;
            let end = format!("{indent}}}");
            let body = lines.by_ref().take_while(|line| **line != end);
            let body = body.filter(|line| !line.trim_start().starts_with("//"));
            let body = awaiting(&[line].into_iter().chain(body).chain(["}"]).collect::<String>());
            // `run` alone awaits what is its caller's: the request, and the body.
            let run = start.starts_with("pub async fn run<");
            assert!(run || !body.contains("select!"), "{what} waits for several things");
            let awaited = body.split(".await").collect::<Vec<_>>();
            for awaited in &awaited[..awaited.len() - 1] {
                let through =
                    ELSEWHERE.iter().any(|door| awaited.ends_with(door)) || run && awaited.ends_with("=self");
                assert!(through, "{what} awaits {awaited}, not through `Env::here`");
            }
        }
    }
    assert!(seen > 20, "the functions were not found");
}

#[test]
fn no_third_party_client_shows_in_the_public_api() {
    // Signatures are on lines that begin with `pub `; tokio and std are the platform, serde stays in attributes.
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for path in sources(&src) {
        for line in std::fs::read_to_string(&path)
            .unwrap()
            .lines()
            .filter(|line| line.trim_start().starts_with("pub "))
        {
            for client in ["rustix::", "libc::", "serde_json::", "redis::", "tonic::"] {
                assert!(!line.contains(client), "{}: {line}", path.display());
            }
        }
    }
}
