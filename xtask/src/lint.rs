//! What must hold of the source: formatting, lints, documentation, that each feature compiles alone, and that the planted
//! mutants still apply.

use crate::mutants;
use crate::shell::{Result, cargo, run as sh};

/// Features of the library; each must compile without the others.
const FEATURES: [&str; 5] = ["etcd", "memory", "file", "redis", "conformance"];

pub(crate) fn run() -> Result {
    sh(&mut cargo(&["fmt", "--all", "--check"]))?;
    mutants::check(&[])?;
    sh(&mut cargo(&["clippy", "--workspace", "--all-targets", "--all-features", "--", "--deny=warnings"]))?;
    for feature in [""].into_iter().chain(FEATURES) {
        let feature = format!("--features={feature}");
        let alone = [
            "clippy",
            "--package=clinch",
            "--lib",
            "--no-default-features",
            &feature,
            "--",
            "--deny=warnings",
        ];
        sh(&mut cargo(&alone))?;
    }
    sh(cargo(&["doc", "--workspace", "--all-features", "--no-deps"]).env("RUSTDOCFLAGS", "--deny=warnings"))
}
