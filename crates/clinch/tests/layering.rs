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
        &["calm", "claim", "drift", "error", "fence", "name", "process", "queue", "sync", "token", "url"],
    ),
    ("time", &["clock", "lease"]),
    ("world", &["env", "lane", "net", "random", "readable", "timer"]),
    ("trait", &["backend"]),
    ("stores", &["backends"]),
    ("engine", &["release", "tenure", "keeper", "engine", "guard", "acquire"]),
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
    ("keeper", &["guard", "acquire", "engine"], "the keeper knows claims, not guards"),
    ("tenure", &["keeper", "guard", "env", "release"], "a tenure is judgement without a clock or a store"),
    ("guard", &["acquire"], "a guard does not wait"),
];

fn layer(module: &str) -> usize {
    let found = LAYERS.iter().position(|(_, modules)| modules.contains(&module));
    found.unwrap_or_else(|| panic!("module \"{module}\" is in no layer: add it to the table"))
}

fn sources(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
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
