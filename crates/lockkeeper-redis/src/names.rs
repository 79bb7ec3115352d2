//! Names of locks, and the keys and slots that they map to.

use std::sync::Arc;

use lockkeeper_core::{Kind, Result};

mod template;

pub(crate) use template::KeyTemplate;

/// The keys of one lock or semaphore. On a cluster, all of them are in one slot.
///
/// The holder's key of the lock `orders/42` is `lockkeeper:{orders/42}`, unless a [template](KeyTemplate) sets another.
#[derive(Debug, Clone)]
pub(crate) struct Keys {
    /// The holder's key. Each other key is this one plus a suffix.
    holder: Arc<str>,
}

/// The suffixes of the keys, in the order in which scripts expect the keys.
const SUFFIXES: [&str; 5] = ["", ":r", ":q", ":i", ":f"];
const SEMAPHORE: &str = ":s";

impl Keys {
    /// # Errors
    ///
    /// [`InvalidName`](lockkeeper_core::ErrorKind::InvalidName) if the template cannot have this name.
    pub(crate) fn new(template: &KeyTemplate, kind: Kind, name: &str) -> Result<Self> {
        let mut holder = template.holder(name)?;
        if kind == Kind::Semaphore {
            holder.push_str(SEMAPHORE);
        }
        Ok(Self { holder: holder.into() })
    }

    /// Returns the key of the exclusive holder. It is also the channel for waiters without a queue entry.
    pub(crate) fn holder(&self) -> &str {
        &self.holder
    }

    /// Calls `add` with the keys that have these indices in [`SUFFIXES`], each in two parts.
    pub(crate) fn each<'a>(&'a self, which: &[usize], mut add: impl FnMut([&'a [u8]; 2])) {
        for &which in which {
            add([self.holder.as_bytes(), SUFFIXES[which].as_bytes()]);
        }
    }

    /// The indices of the keys that must not exist when a claim acquires a free lock without a script: queue and fence. Not
    /// the sharers: without a holder key they have lost the lock.
    pub(crate) const QUEUE_AND_FENCE: [usize; 2] = [2, 4];

    #[cfg(test)]
    fn texts(&self) -> Vec<String> {
        let mut texts = Vec::new();
        self.each(&Self::ALL, |key| texts.push(String::from_utf8(key.concat()).unwrap()));
        texts
    }

    /// The indices of the keys that a release uses if nothing waits.
    pub(crate) const HOLDER_AND_QUEUE: [usize; 2] = [0, 2];

    /// The indices of all keys.
    pub(crate) const ALL: [usize; 5] = [0, 1, 2, 3, 4];

    /// Returns the slot of a cluster that has all of these keys.
    pub(crate) fn slot(&self) -> u16 {
        slot(&self.holder)
    }
}

/// Returns the slot of a key: that of the text between the first `{` and the first `}` after it, if there is any.
fn slot(key: &str) -> u16 {
    let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map(|(tag, _)| tag);
    let hashed = tag.filter(|tag| !tag.is_empty()).unwrap_or(key);
    crc16(hashed.as_bytes()) % 16384
}

/// Returns the key of the highest fence of a name, and keys in the same slot. No key of a lock ends like this one, so it
/// collides with none, with any prefix or template.
pub(crate) fn register_key(prefix: &str, name: &str) -> Result<(String, Keys)> {
    let template = KeyTemplate::of_prefix(&format!("{prefix}:fence"));
    let keys = Keys::new(&template, Kind::Lock, name)?;
    Ok((format!("{}{}", keys.holder(), template::REGISTER), keys))
}

/// Computes CRC-16/XMODEM, which a cluster uses.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(prefix: &str, kind: Kind, name: &str) -> Keys {
        Keys::new(&KeyTemplate::of_prefix(prefix), kind, name).unwrap()
    }

    fn holder(name: &str) -> String {
        keys("lockkeeper", Kind::Lock, name).holder().to_owned()
    }

    #[test]
    fn names_stand_in_their_keys_as_they_are_where_they_can() {
        assert_eq!(holder("orders/42"), "lockkeeper:{orders/42}");
        assert_eq!(holder("{a}"), "lockkeeper:{{a%7D}");
        assert_eq!(holder("}a"), "lockkeeper:{%7Da}");
        assert_eq!(holder("%7D"), "lockkeeper:{%257D}");
        assert_eq!(keys("shop", Kind::Semaphore, "gpu").holder(), "shop:{gpu}:s");
    }

    #[test]
    fn a_key_leads_back_to_its_name() {
        let template = KeyTemplate::of_prefix("lockkeeper");
        for name in ["a", "}", "{}", "%", "%7D", "%25", "a}:q", "🔒", "a\nb", "%7D}"] {
            for kind in [Kind::Lock, Kind::Semaphore] {
                let keys = Keys::new(&template, kind, name).unwrap();
                for suffix in SUFFIXES {
                    let key = format!("{}{suffix}", keys.holder());
                    assert_eq!(template.name_of(&key).as_deref(), Some(name), "{key}");
                }
            }
        }
        assert_eq!(template.name_of("lockkeeper:wake:1"), None);
        assert_eq!(template.name_of("other:{a}"), None);
    }

    #[test]
    fn the_register_of_a_name_is_in_the_slot_of_its_lock_and_not_among_its_keys() {
        let (key, register) = register_key("lockkeeper", "orders/42").unwrap();
        assert_eq!(key, "lockkeeper:fence:{orders/42}:highest");
        assert_eq!(register.slot(), keys("lockkeeper", Kind::Lock, "orders/42").slot());
        assert_eq!(KeyTemplate::of_prefix("lockkeeper").name_of(&key), None);
    }

    /// Golden values of CLUSTER KEYSLOT on a real server.
    #[test]
    fn slots_are_those_of_the_server() {
        assert_eq!(crc16(b"123456789"), 0x31C3);
        assert_eq!(keys("a", Kind::Lock, "123456789").slot(), 12739);
        assert_eq!(keys("b", Kind::Semaphore, "123456789").slot(), 12739);
        // Without a tag, the whole key.
        for key in ["123456789", "{123456789}{x}", "x}{123456789}"] {
            assert_eq!(slot(key), 12739, "{key}");
        }
        assert_eq!(slot("{}123456789"), slot_of_all("{}123456789"));
        assert_eq!(slot("{123456789"), slot_of_all("{123456789"));
    }

    fn slot_of_all(key: &str) -> u16 {
        crc16(key.as_bytes()) % 16384
    }
}
