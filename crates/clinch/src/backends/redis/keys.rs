//! The keys of one lock, all in one hash slot.
//!
//! The lock's own key is the prefix and the name, nothing else, so that it is the key that other clients lock. Every
//! side key must share its slot for any name, braces included, so it carries a hash tag of its own: three letters or
//! digits that hash to that slot. After the tag comes a NUL, which no lock name may hold, so that no lock's key is
//! another's side key.

use crate::name::LockName;

/// Hash slots of a Redis Cluster.
pub(super) const SLOTS: u16 = 16384;

/// The keys of one lock, in the order in which the scripts take them.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    pub(super) slot: u16,
    pub(super) lock: String,
    pub(super) claims: String,
    pub(super) queue: String,
    pub(super) holders: String,
    pub(super) fence: String,
}

impl Keys {
    pub(super) fn of(prefix: &str, name: &LockName) -> Keys {
        let lock = lock_key(prefix, name);
        let slot = slot_of(&lock);
        let home = Home::of(prefix, slot);
        let name = name.as_str();
        Keys {
            slot,
            claims: home.key(&["\0claims:", name]),
            queue: home.key(&["\0queue:", name]),
            holders: home.key(&["\0holders:", name]),
            fence: home.key(&["\0fence"]),
            lock,
        }
    }

    pub(super) fn all(&self) -> [&str; 5] {
        [&self.lock, &self.claims, &self.queue, &self.holders, &self.fence]
    }
}

/// The key that is the lock.
pub(super) fn lock_key(prefix: &str, name: &LockName) -> String {
    [prefix, name.as_str()].concat()
}

/// The lock that a claims key belongs to, if it is one of this prefix.
pub(super) fn name_in_claims_key<'a>(prefix: &str, key: &'a str) -> Option<&'a str> {
    let (head, name) = key.split_once("\0claims:")?;
    let ours = head.strip_prefix(prefix).is_some_and(|tag| tag.starts_with('{') && tag.ends_with('}'));
    (ours || head.ends_with(prefix)).then_some(name)
}

/// What the side keys and channels of a slot begin with.
pub(super) struct Home(String);

impl Home {
    pub(super) fn of(prefix: &str, slot: u16) -> Home {
        let tag = tag(slot);
        let tag = std::str::from_utf8(&tag).unwrap_or_default();
        // The first braces decide the slot, so a prefix with a brace of its own stands behind ours.
        Home(match prefix.contains('{') {
            true => ["{", tag, "}", prefix].concat(),
            false => [prefix, "{", tag, "}"].concat(),
        })
    }

    /// A key or channel of this slot that ends in these parts.
    pub(super) fn key<const N: usize>(&self, parts: &[&str; N]) -> String {
        let length = self.0.len() + parts.iter().map(|part| part.len()).sum::<usize>();
        let mut key = String::with_capacity(length);
        key.push_str(&self.0);
        parts.iter().for_each(|part| key.push_str(part));
        key
    }
}

/// The hash slot of a key: of what stands in its first braces, if anything does, else of all of it (Redis Cluster
/// specification, "Hash tags").
pub(super) fn slot_of(key: &str) -> u16 {
    let tagged = key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map(|(tag, _)| tag);
    let hashed = tagged.filter(|tag| !tag.is_empty()).unwrap_or(key);
    crc16(hashed.bytes()) % SLOTS
}

/// CRC16/XMODEM, as Redis Cluster uses it.
fn crc16(bytes: impl IntoIterator<Item = u8>) -> u16 {
    const TABLE: [u16; 256] = table();
    bytes.into_iter().fold(0, |crc, byte| {
        let at = usize::from((crc >> 8) as u8 ^ byte);
        (crc << 8) ^ TABLE.get(at).copied().unwrap_or(0)
    })
}

/// What eight shifts make of the register for each first byte.
#[allow(clippy::indexing_slicing, reason = "at compile time, in range")]
const fn table() -> [u16; 256] {
    let mut table = [0; 256];
    let mut at = 0;
    while at < table.len() {
        let mut crc = (at as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
            bit += 1;
        }
        table[at] = crc;
        at += 1;
    }
    table
}

/// Sixteen shifts backwards: the register that two bytes of zero turn into `crc`.
fn two_steps_back(crc: u16) -> u16 {
    (0..16).fold(crc, |crc, _| if crc & 1 == 0 { crc >> 1 } else { ((crc ^ 0x1021) >> 1) | 0x8000 })
}

/// Three letters or digits that hash to this slot.
///
/// The CRC can be run backwards, so for any first character there is one pair of bytes that leads to a given CRC; four
/// CRCs share a slot. Some pair among those is made of letters and digits. Running backwards is linear, so it is done
/// for the slot alone.
fn tag(slot: u16) -> [u8; 3] {
    let back = two_steps_back(slot);
    for high in 0..4 {
        let back = back ^ two_steps_back(high * SLOTS);
        for first in b'0'..=b'z' {
            let [second, third] = (back ^ crc16([first])).to_be_bytes();
            let tag = [first, second, third];
            if tag.iter().all(u8::is_ascii_alphanumeric) {
                return tag;
            }
        }
    }
    // Not reached: a test takes the tag of every slot.
    *b"000"
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(crc16(*b"123456789"), 0x31c3);
        assert_eq!(slot_of("foo"), 12182);
        assert_eq!(slot_of("{user1000}.following"), slot_of("{user1000}.followers"));
        assert_eq!(slot_of("foo{}{bar}"), crc16(*b"foo{}{bar}") % SLOTS);
        assert_eq!(slot_of("foo{{bar}}zap"), crc16(*b"{bar") % SLOTS);
    }

    #[test]
    fn every_slot_has_a_tag() {
        for slot in 0..SLOTS {
            assert_eq!(crc16(tag(slot)) % SLOTS, slot);
            assert!(tag(slot).iter().all(u8::is_ascii_alphanumeric));
        }
    }

    proptest! {
        /// Side keys and channels share the lock key's slot, whatever braces prefix and name hold, and are no lock's key.
        #[test]
        fn all_keys_of_a_lock_share_a_slot(prefix in "[{}a:]{0,5}", name in "[{}ab/]{1,8}") {
            let name = LockName::new(name).unwrap();
            let keys = Keys::of(&prefix, &name);
            for key in keys.all() {
                prop_assert_eq!(slot_of(key), keys.slot, "{:?}", key);
            }
            for key in &keys.all()[1..] {
                prop_assert!(key.contains('\0'));
            }
            prop_assert_eq!(name_in_claims_key(&prefix, &keys.claims), Some(name.as_str()));
        }
    }
}
