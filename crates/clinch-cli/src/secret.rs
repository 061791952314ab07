//! Secrets where another word is expected: they would be repeated in an error, or stored where everybody sees them.

use std::ffi::OsStr;

use crate::args::{Cli, Verb};
use crate::exit::Failure;

/// Why nothing is done with a command line that has a secret in the wrong place.
pub(crate) fn misplaced() -> Failure {
    Failure::usage(
        "a URL with a password stands where another word is expected; the URL of the store is said by CLINCH_URL",
    )
}

/// Whether a URL that holds a secret stands where the name of a lock, or a command, is expected.
pub(crate) fn is_misplaced(cli: &Cli) -> bool {
    let words = match &cli.verb {
        Verb::Run(run) => {
            let label = run.lease.label.as_deref().map(OsStr::new);
            let more = [run.command.first().map(AsRef::as_ref), run.events.as_deref(), label];
            [Some(OsStr::new(&run.name))].into_iter().chain(more).collect()
        }
        Verb::Ls(ls) => vec![Some(OsStr::new(&ls.names))],
        Verb::Show(show) => vec![Some(OsStr::new(&show.name))],
        Verb::Acquire(acquire) => {
            vec![Some(OsStr::new(&acquire.name)), acquire.lease.label.as_deref().map(OsStr::new)]
        }
        Verb::Renew(renew) => vec![Some(OsStr::new(&renew.name))],
        Verb::Release(release) => vec![Some(OsStr::new(&release.name))],
        Verb::Break(break_) => vec![Some(OsStr::new(&break_.name))],
        Verb::Hold(hold) => vec![Some(OsStr::new(&hold.name))],
        Verb::Man(man) => vec![man.verb.as_deref().map(OsStr::new)],
        Verb::Top(_)
        | Verb::Doctor(_)
        | Verb::Completions(_)
        | Verb::Complete(_)
        | Verb::Schema(_)
        | Verb::EndJob(_) => Vec::new(),
    };
    words.into_iter().flatten().any(|word| stands_in(&word.to_string_lossy()))
}

/// Whether an error about the words of the command line would repeat one.
pub(crate) fn is_repeated_by(error: &clap::Error) -> bool {
    error.context().any(|(_, value)| stands_in(&value.to_string()))
}

/// Whether a word is, or has in it, a URL that holds a secret, which nobody may repeat. Other URLs may be names.
fn stands_in(word: &str) -> bool {
    word.match_indices("://").any(|(at, _)| {
        let before = word.get(..at).unwrap_or_default();
        let is_of_scheme = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
        let start = before.trim_end_matches(is_of_scheme).len();
        let (scheme, url) = (before.get(start..).unwrap_or_default(), word.get(start..).unwrap_or_default());
        has_password(url) || is_store(scheme) && clinch::holds_secret(url)
    })
}

/// Whether a user and a password stand where they belong, whatever the URL is of.
fn has_password(url: &str) -> bool {
    let authority = url.split_once("://").map_or("", |(_, rest)| rest);
    let authority = authority.split(['/', '?', '#']).next().unwrap_or_default();
    authority.rsplit_once('@').is_some_and(|(user, _)| user.contains(':'))
}

/// Whether a scheme is one of a store that has passwords. Theirs may stand anywhere, if their letters were not escaped.
fn is_store(scheme: &str) -> bool {
    let scheme = scheme.to_ascii_lowercase();
    ["redis", "redlock", "etcd", "valkey"].iter().any(|one| scheme.starts_with(one))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_found_wherever_it_stands_in_a_word() {
        for word in [
            "redis://me:hunter2@h",
            "redsi://me:hunter2@h",
            "sentinel://:hunter2@h/main",
            "https://me:hunter2@ci/job",
            "--url redis://me:hunter2@h",
            "CLINCH_URL=redis://me:hunter2@h",
            "\u{fffd}redis://me:hunter2\u{fffd}@h",
            "redis://h?password=hunter2",
            "REDISS://me:p/hunter2@h",
        ] {
            assert!(stands_in(word), "{word}");
        }
        for word in [
            "nightly",
            "http://host:8443/users/@me",
            "docker://reg:5000/app@sha256:aa",
            "https://ci/job?author=me",
            "mailto:me@host",
            "redis://me@h",
            "://",
            "file:///a:b@c",
        ] {
            assert!(!stands_in(word), "{word}");
        }
    }
}
