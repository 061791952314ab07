//! Where things are: the keys of one lock, and of one session.
//!
//! A lock's claims stand under `<prefix><name>/`, each under the key `<lease in hex>-<slot>`: Go's `concurrency.Mutex`,
//! the server's lock API and `etcdctl lock` on `<prefix><name>` use `<lease in hex>` there, and they and we order by
//! creation alone. The slot is the least number that no other claim of the lease on that lock has: etcd remembers every key that ever was until
//! it is compacted, and a look at a queue reads past them all, so a lock whose claims each had a key of their own would
//! become slower with every one. Whose a key is, its value says. `/` and `%` in names are percent-encoded, so that lock `a` and lock `a/b` do not touch;
//! hence no lock's keys begin with `<prefix>%`, and what is no lock stands there.

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

/// What the keys of all claims of a lock on this lease begin with.
pub(super) fn claims(queue: &[u8], lease: i64) -> Vec<u8> {
    [queue, format!("{lease:x}-").as_bytes()].concat()
}

/// The key of one of these claims.
pub(super) fn claim(mut start: Vec<u8>, slot: usize) -> Vec<u8> {
    start.extend_from_slice(slot.to_string().as_bytes());
    start
}

/// What a claim's key begins with, and its slot.
pub(super) fn slot(key: &[u8]) -> Option<(&[u8], usize)> {
    let (start, slot) = key.split_at_checked(key.iter().rposition(|byte| *byte == b'-')? + 1)?;
    Some((start, std::str::from_utf8(slot).ok()?.parse().ok()?))
}

/// The key that lives as long as a session's lease does.
pub(super) fn session(prefix: &str, lease: i64) -> Vec<u8> {
    format!("{prefix}%session/{lease:x}").into_bytes()
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
            let key = claim(claims(&queue(&prefix, &first), 7), 5);
            prop_assert_eq!(slot(&key), Some((&claims(&queue(&prefix, &first), 7)[..], 5)));
            prop_assert_eq!(name_of(&prefix, &key), Some(first.clone()));
            prop_assert_eq!(key.starts_with(&queue(&prefix, &second)), first == second);
            prop_assert_eq!(names(&prefix, &one).starts_with(&names(&prefix, &other)), one.starts_with(&other));
            prop_assert!(!session(&prefix, 7).starts_with(&queue(&prefix, &first)));
        }
    }

    #[test]
    fn what_is_no_lock_has_no_name() {
        assert_eq!(name_of("p/", b"p/%session/7"), None);
        assert_eq!(name_of("p/", b"p/a"), None);
    }
}
