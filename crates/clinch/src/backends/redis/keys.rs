//! The keys of one lock, all in one hash slot.
//!
//! The lock's own key is the prefix and the name, nothing else, so that it is the key that other clients lock. Every
//! side key must share its slot for any name, braces included, so it carries a hash tag of its own: three letters
//! that hash to that slot. After the tag comes a NUL, which no lock name may hold, so that no lock's key is
//! another's side key.

use crate::name::LockName;

/// Hash slots of a Redis Cluster.
pub(super) const SLOTS: u16 = 16384;

/// The keys of one lock.
#[derive(Clone, Debug)]
pub(super) struct Keys<'a> {
    pub(super) slot: u16,
    pub(super) lock: String,
    home: Home<'a>,
    name: &'a str,
}

impl<'a> Keys<'a> {
    pub(super) fn of(prefix: &'a str, name: &'a LockName) -> Keys<'a> {
        let lock = lock_key(prefix, name);
        let slot = slot_of(&lock);
        Keys { slot, lock, home: Home::of(prefix, slot), name: name.as_str() }
    }

    /// All of them, in parts, in the order in which the scripts take them.
    pub(super) fn all(&self) -> [[&str; 5]; 5] {
        let [before, tag, after, fence, _] = self.home.key("\0fence", "");
        let side = |kind| [before, tag, after, kind, self.name];
        [
            [&self.lock, "", "", "", ""],
            side("\0claims:"),
            side("\0queue:"),
            side("\0holders:"),
            [before, tag, after, fence, ""],
        ]
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
#[derive(Clone, Debug)]
pub(super) struct Home<'a> {
    before: &'a str,
    tag: [u8; 5],
    after: &'a str,
}

impl<'a> Home<'a> {
    pub(super) fn of(prefix: &'a str, slot: u16) -> Home<'a> {
        let [one, two, three] = tag(slot);
        // The first braces decide the slot, so a prefix with a brace of its own stands behind ours.
        let (before, after) = if prefix.contains('{') { ("", prefix) } else { (prefix, "") };
        Home { before, tag: [b'{', one, two, three, b'}'], after }
    }

    /// A key or channel of this slot, in parts.
    pub(super) fn key<'k>(&'k self, kind: &'k str, name: &'k str) -> [&'k str; 5] {
        let tag = std::str::from_utf8(&self.tag).unwrap_or_default();
        [self.before, tag, self.after, kind, name]
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

/// Three letters that hash to slot 0, and what each bit of a slot changes in them.
///
/// The CRC is linear: two texts of one length differ in as much as their CRCs do. The letters H to W, great and small, are
/// all that five bits make of an H, so those of three letters reach every slot; solved for each bit of the slot, that gives
/// these.
const ZERO: u32 = u32::from_be_bytes(*b"\0oQQ");
const BITS: [u32; 14] = [
    0x03_25_02, 0x1f_05_05, 0x27_01_03, 0x00_23_1c, 0x18_19_18, 0x20_20_00, 0x1f_27_03, 0x27_01_07,
    0x3a_3c_1d, 0x22_06_00, 0x02_24_02, 0x1d_07_05, 0x23_05_03, 0x00_22_04,
];

/// Three letters that hash to this slot.
fn tag(slot: u16) -> [u8; 3] {
    let changed = BITS.iter().enumerate().map(|(at, change)| change * u32::from(slot >> at & 1));
    let [_, tag @ ..] = changed.fold(ZERO, |tag, change| tag ^ change).to_be_bytes();
    tag
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
            assert!(tag(slot).iter().all(u8::is_ascii_alphabetic));
        }
    }

    proptest! {
        /// Side keys and channels share the lock key's slot, whatever braces prefix and name hold, and are no lock's key.
        #[test]
        fn all_keys_of_a_lock_share_a_slot(prefix in "[{}a:]{0,5}", name in "[{}ab/]{1,8}") {
            let name = LockName::new(name).unwrap();
            let keys = Keys::of(&prefix, &name);
            let all = keys.all().map(|parts| parts.concat());
            for key in &all {
                prop_assert_eq!(slot_of(key), keys.slot, "{:?}", key);
            }
            for key in &all[1..] {
                prop_assert!(key.contains('\0'));
            }
            prop_assert_eq!(name_in_claims_key(&prefix, &all[1]), Some(name.as_str()));
        }
    }
}
