//! Where things are: the keys of one lock, and of one session.
//!
//! A lock's claims stand under `<prefix><name>/`, each under the key `<lease in hex>-<claim id>`: Go's
//! `concurrency.Mutex`, the server's lock API and `etcdctl lock` on `<prefix><name>` use `<lease in hex>` there, and they
//! and we order by creation alone. `/` and `%` in names are percent-encoded, so that lock `a` and lock `a/b` do not touch;
//! hence no lock's keys begin with `<prefix>%`, and what is no lock stands there.

use crate::claim::ClaimId;
use crate::name::LockName;

/// The keys under which a lock's claims stand begin with this.
pub(super) fn queue(prefix: &str, name: &LockName) -> Vec<u8> {
    let mut key = names(prefix, name.as_str());
    key.push(b'/');
    key
}

/// What the keys of all locks whose name begins with `start` begin with.
pub(super) fn names(prefix: &str, start: &str) -> Vec<u8> {
    let mut key = Vec::with_capacity(prefix.len() + start.len() + 1);
    key.extend_from_slice(prefix.as_bytes());
    for byte in start.bytes() {
        match byte {
            b'/' => key.extend_from_slice(b"%2F"),
            b'%' => key.extend_from_slice(b"%25"),
            plain => key.push(plain),
        }
    }
    key
}

/// The key of one claim.
pub(super) fn claim(queue: &[u8], lease: i64, id: ClaimId) -> Vec<u8> {
    [queue, format!("{lease:x}-{id}").as_bytes()].concat()
}

/// The key that lives as long as a session's lease does.
pub(super) fn session(prefix: &str, lease: i64) -> Vec<u8> {
    format!("{prefix}%session/{lease:x}").into_bytes()
}

/// The claim id that ends a key, if it is one of ours.
pub(super) fn claim_of(key: &[u8]) -> Option<ClaimId> {
    let tail = key.rsplit(|byte| *byte == b'/').next()?;
    let (lease, id) = std::str::from_utf8(tail).ok()?.split_once('-')?;
    i64::from_str_radix(lease, 16).ok()?;
    id.parse().ok()
}

/// The lock that a key belongs to.
pub(super) fn name_of(prefix: &str, key: &[u8]) -> Option<LockName> {
    let rest = std::str::from_utf8(key.strip_prefix(prefix.as_bytes())?).ok()?;
    let (name, _) = rest.split_once('/')?;
    let mut decoded = String::with_capacity(name.len());
    let mut parts = name.split('%');
    decoded.push_str(parts.next()?);
    for part in parts {
        // Anything else is not how a name is written here.
        decoded.push(match part.get(..2)? {
            "2F" => '/',
            "25" => '%',
            _ => return None,
        });
        decoded.push_str(part.get(2..)?);
    }
    LockName::new(decoded).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn names_read_back_and_do_not_touch(one in "[a/%é]{1,6}", other in "[a/%é]{1,6}", prefix in "[a/%]{0,3}") {
            let [first, second] = [&one, &other].map(|name| LockName::new(name).unwrap());
            let key = claim(&queue(&prefix, &first), 7, ClaimId::from_bits(5));
            prop_assert_eq!(name_of(&prefix, &key), Some(first.clone()));
            prop_assert_eq!(claim_of(&key), Some(ClaimId::from_bits(5)));
            prop_assert_eq!(key.starts_with(&queue(&prefix, &second)), first == second);
            prop_assert_eq!(names(&prefix, &one).starts_with(&names(&prefix, &other)), one.starts_with(&other));
            prop_assert!(!session(&prefix, 7).starts_with(&queue(&prefix, &first)));
        }
    }

    #[test]
    fn foreign_keys_are_no_claims_of_ours() {
        for foreign in ["p/694d81/", "p/694d81", "p/694d81-x", "p/", "p/x-000102030405060708090a0b0c0d0e0f"] {
            assert_eq!(claim_of(foreign.as_bytes()), None, "{foreign}");
        }
        assert_eq!(name_of("p/", b"p/%session/7"), None);
        assert_eq!(name_of("p/", b"p/a"), None);
    }
}
