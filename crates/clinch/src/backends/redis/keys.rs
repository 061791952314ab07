//! The keys of one lock, all in one hash slot.
//!
//! The lock's own key is the prefix and the name, nothing else, so that it is the key that other clients lock. All other keys
//! begin with a [reserved word](RESERVED), which no lock's key may, and end in the whole key of the lock: by whatever prefix a
//! client spells that key, it finds one queue and one fence. Every side key must share the lock's slot for any name, braces
//! included, so it carries a hash tag of its own: three letters that hash to that slot.

use crate::error::{Error, Result};
use crate::name::LockName;

/// Hash slots of a Redis Cluster.
pub(super) const SLOTS: u16 = 16384;

/// What every key and channel of ours that is no lock begins with.
const RESERVED: &str = "clinch:~{";

/// The one fence of a server that has no slots, in Redlock.
pub(super) const FENCE: &str = "clinch:~{fence}";

/// What the keys begin with where clients of Redlock leave what they know of a server, each group its own.
pub(super) const VOUCHER: &str = "clinch:~{voucher}";

/// What the channels of clients begin with where channels belong to no slot.
pub(super) const INBOXES: &str = "clinch:~{inbox}:";

/// What stands between the tag and the lock's key in the name of a claims key.
const CLAIMS: &str = ":claims:";

/// The keys of one lock.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    pub(super) slot: u16,
    pub(super) lock: String,
    home: Home,
}

impl Keys {
    pub(super) fn of(prefix: &str, name: &LockName) -> Keys {
        let lock = lock_key(prefix, name);
        let slot = slot_of(&lock);
        Keys { slot, lock, home: Home::of(slot) }
    }

    /// All of them, in parts, in the order in which the scripts take them.
    pub(super) fn all(&self) -> [[&[u8]; 3]; 5] {
        let (home, lock) = (self.home.0.as_slice(), self.lock.as_bytes());
        let side = |kind: &'static str| [home, kind.as_bytes(), lock];
        [[lock, b"", b""], side(CLAIMS), side(":queue:"), side(":holders:"), [home, b":fence", b""]]
    }
}

/// The key that is the lock.
pub(super) fn lock_key(prefix: &str, name: &LockName) -> String {
    let mut key = String::with_capacity(prefix.len() + name.as_str().len());
    key.push_str(prefix);
    key.push_str(name.as_str());
    key
}

/// Refuses a lock's key that could be another lock's side key.
pub(super) fn refuse_reserved(key: &str) -> Result<()> {
    if is_reserved(key) {
        return Err(Error::invalid(format!(
            "keys that begin with \"{RESERVED}\" are those of queues and tokens, so no lock can have the key \"{key}\"; use \
             another name or prefix="
        )));
    }
    Ok(())
}

/// Whether a key is no lock's.
pub(super) fn is_reserved(key: &str) -> bool {
    key.starts_with(RESERVED)
}

/// The pattern of the claims keys of locks whose own keys match a pattern.
pub(super) fn claims_pattern(locks: &str) -> String {
    format!("{RESERVED}???}}{CLAIMS}{locks}")
}

/// The lock that a claims key belongs to, by its own key.
pub(super) fn lock_of_claims_key(key: &str) -> Option<&str> {
    let (tag, rest) = key.strip_prefix(RESERVED)?.split_once(CLAIMS)?;
    (tag.len() == 4).then_some(rest)
}

/// What the side keys and channels of a slot begin with.
#[derive(Clone, Debug)]
pub(super) struct Home([u8; RESERVED.len() + 4]);

impl Home {
    pub(super) fn of(slot: u16) -> Home {
        let mut home = *b"clinch:~{...}";
        let [.., one, two, three, _] = &mut home;
        [*one, *two, *three] = tag(slot);
        Home(home)
    }

    /// A key of this slot that is never there: no lock has an empty key.
    pub(super) fn nobodys(&self) -> [&str; 3] {
        self.key(CLAIMS, "")
    }

    /// A key or channel of this slot, in parts.
    pub(super) fn key<'k>(&'k self, kind: &'k str, of: &'k str) -> [&'k str; 3] {
        [self.text(), kind, of]
    }

    fn text(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
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
        /// Side keys and channels share the lock key's slot, whatever braces prefix and name hold; they are no lock's keys, and
        /// the same by whatever prefix the lock's key is spelled.
        #[test]
        fn all_keys_of_a_lock_share_a_slot(prefix in "[{}a:]{0,5}", name in "[{}ab/:]{1,8}") {
            let name = LockName::new(name).unwrap();
            let keys = Keys::of(&prefix, &name);
            let joined = |keys: &Keys| keys.all().map(|parts| String::from_utf8(parts.concat()).unwrap());
            let all = joined(&keys);
            for key in &all {
                prop_assert_eq!(slot_of(key), keys.slot, "{:?}", key);
            }
            prop_assert!(all[1..].iter().all(|key| is_reserved(key)) && !is_reserved(&keys.lock));
            prop_assert_eq!(lock_of_claims_key(&all[1]), Some(keys.lock.as_str()));
            let whole = LockName::new(&keys.lock).unwrap();
            prop_assert_eq!(joined(&Keys::of("", &whole)), all);
        }
    }

    #[test]
    fn no_lock_has_the_key_of_a_side_key() {
        for key in [FENCE, INBOXES, "clinch:~{abc}:queue:clinch:job"] {
            refuse_reserved(key).unwrap_err();
        }
        refuse_reserved("clinch:~job").unwrap();
        assert_eq!(lock_of_claims_key("clinch:~{abc}:queue:a:claims:b"), None);
    }
}
