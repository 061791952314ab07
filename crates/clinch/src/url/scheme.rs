//! What a store URL begins with, and what was meant by one that begins otherwise.

use crate::error::{Error, ErrorKind};

/// A scheme, the feature that brings its store, and whether this build has that.
type Scheme = (&'static str, &'static str, bool);

const SCHEMES: [Scheme; 13] = [
    ("file", "file", cfg!(feature = "file")),
    ("memory", "memory", cfg!(feature = "memory")),
    ("redis", "redis", cfg!(feature = "redis")),
    ("rediss", "redis", cfg!(feature = "redis")),
    ("redis+unix", "redis", cfg!(feature = "redis")),
    ("redis+sentinel", "redis", cfg!(feature = "redis")),
    ("rediss+sentinel", "redis", cfg!(feature = "redis")),
    ("redis+cluster", "redis", cfg!(feature = "redis")),
    ("rediss+cluster", "redis", cfg!(feature = "redis")),
    ("redlock", "redis", cfg!(feature = "redis")),
    ("redlocks", "redis", cfg!(feature = "redis")),
    ("etcd", "etcd", cfg!(feature = "etcd")),
    ("etcds", "etcd", cfg!(feature = "etcd")),
];

/// What others call these stores.
const OTHERS: [(&str, &str); 8] = [
    ("valkey", "redis"),
    ("valkeys", "rediss"),
    ("unix", "redis+unix"),
    ("redis-socket", "redis+unix"),
    ("sentinel", "redis+sentinel"),
    ("redis-sentinel", "redis+sentinel"),
    ("redis-cluster", "redis+cluster"),
    ("cluster", "redis+cluster"),
];

/// The ports by which servers are known.
const PORTS: [(&str, &str); 3] = [("6379", "redis"), ("26379", "redis+sentinel"), ("2379", "etcd")];

/// How many letters may be wrong.
const TYPOS: usize = 2;

/// Why a URL with this scheme cannot be opened: this build has no such store, or nobody has.
pub(crate) fn no_store(scheme: &str) -> Error {
    let known = SCHEMES.iter().find(|(known, ..)| *known == scheme);
    let message = match (known, nearest(scheme)) {
        (Some((_, feature, _)), _) => {
            format!("this build has no store for {scheme}://; build it with the feature \"{feature}\"")
        }
        (None, Some(near)) => format!("there is no store \"{scheme}://\"; did you mean {near}://?"),
        (None, None) => format!("there is no store \"{scheme}://\"; there are {}", here()),
    };
    Error::new(ErrorKind::Unsupported, message)
}

/// Why a text that has no scheme is no store URL. It may hold a password, so only what cannot is repeated.
pub(super) fn missing(text: &str) -> Error {
    let plain = !text.contains(['@', '?', '=']) && !text.contains(char::is_control);
    let meant = plain.then(|| meant(text)).flatten();
    let hint = meant.map(|url| format!("; did you mean {url}?")).unwrap_or_else(|| {
        format!(", as in file:///var/lib/clinch or redis://localhost; there are {}", here())
    });
    Error::invalid(format!("a store URL has \"://\" after the kind of the store{hint}"))
}

/// The URL that was meant by a path, a host, or a scheme with too little behind it.
fn meant(text: &str) -> Option<String> {
    if text.starts_with('/') {
        return Some(format!("file://{text}"));
    }
    let (first, rest) = text.split_once(':').unwrap_or((text, ""));
    if let Some(scheme) = nearest(first) {
        let rest = rest.trim_start_matches('/');
        return Some(match scheme {
            "file" => format!("file:///{rest}"),
            scheme => {
                format!("{scheme}://{}", if rest.is_empty() && scheme != "memory" { "HOST" } else { rest })
            }
        });
    }
    let port = text.split(['/', ',']).next()?.rsplit_once(':')?.1;
    let (_, scheme) = PORTS.iter().find(|(known, _)| *known == port)?;
    Some(format!("{scheme}://{text}"))
}

/// The scheme that is written nearly like this one, or that others write so.
fn nearest(scheme: &str) -> Option<&'static str> {
    let same = SCHEMES.iter().map(|(known, ..)| (*known, *known));
    let names = same.chain(OTHERS);
    let distance = |name: &str| strsim::damerau_levenshtein(name, scheme);
    // A short word is near to all others.
    let near = |(name, _): &(&str, &str)| distance(name) <= TYPOS.min(scheme.len() / 2);
    names.filter(near).min_by_key(|(name, _)| distance(name)).map(|(_, scheme)| scheme)
}

/// What this build has.
fn here() -> String {
    let here: Vec<&str> = SCHEMES.iter().filter(|(.., here)| *here).map(|(scheme, ..)| *scheme).collect();
    here.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_scheme_is_answered_with_the_one_that_was_meant() {
        for (scheme, meant) in [
            ("redsi", "redis://?"),
            ("rdeis", "redis://?"),
            ("redi", "redis://?"),
            ("redis+sentinal", "redis+sentinel://?"),
            ("valkey", "redis://?"),
            ("redis-sentinel", "redis+sentinel://?"),
            ("ecd", "etcd://?"),
            ("files", "file://?"),
            ("redlok", "redlock://?"),
        ] {
            let error = no_store(scheme).to_string();
            assert!(error.contains(meant), "{scheme}: {error}");
        }
        for far in ["", "s3", "https", "consul", "postgres"] {
            let error = no_store(far).to_string();
            assert!(error.contains("there are "), "{far}: {error}");
        }
        for (scheme, feature, _) in SCHEMES {
            let error = no_store(scheme).to_string();
            assert!(error.contains(&format!("feature \"{feature}\"")), "{error}");
        }
    }

    #[test]
    fn a_path_or_a_host_is_answered_with_its_url() {
        for (text, url) in [
            ("/tmp/locks", "file:///tmp/locks?"),
            ("localhost:6379", "redis://localhost:6379?"),
            ("h1:2379,h2:2379", "etcd://h1:2379,h2:2379?"),
            ("r:6379/2", "redis://r:6379/2?"),
            ("s1:26379,s2:26379/main", "redis+sentinel://s1:26379,s2:26379/main?"),
            ("redis", "redis://HOST?"),
            ("redis:localhost", "redis://localhost?"),
            ("file:/var/lib/x", "file:///var/lib/x?"),
            ("memory", "memory://?"),
        ] {
            let error = missing(text).to_string();
            assert!(error.contains(&format!("did you mean {url}")), "{text}: {error}");
        }
        for text in ["locks", "redis:me:secret@host", "/x?password=secret", "host:1"] {
            let error = missing(text).to_string();
            assert!(!error.contains("secret") && error.contains("file:///var"), "{error}");
        }
    }
}
