//! Names of locks, and the keys and slots that they map to.

use std::sync::Arc;

use lockkeeper_core::Kind;

/// The keys of one lock or semaphore. All have the same hash tag, so a cluster keeps them together.
///
/// The holder of the lock `orders/42` is `lockkeeper:{orders/42}`. The name is written as it is, but
/// for `%` and `}`, which become `%25` and `%7D`: a cluster hashes the text between the first `{` and
/// the first `}` after it, and everything if nothing does.
#[derive(Debug, Clone)]
pub(crate) struct Keys {
    /// The holder's key; the others are this and a suffix.
    holder: Arc<str>,
}

/// What is appended to the holder's key, in the order in which scripts expect their keys.
const SUFFIXES: [&str; 6] = ["", ":x", ":r", ":q", ":i", ":f"];
const SEMAPHORE: &str = ":s";

impl Keys {
    pub(crate) fn new(prefix: &str, kind: Kind, name: &str) -> Self {
        let mut holder = String::with_capacity(prefix.len() + name.len() + 5);
        holder.push_str(prefix);
        holder.push_str(":{");
        encode(name, &mut holder);
        holder.push('}');
        if kind == Kind::Semaphore {
            holder.push_str(SEMAPHORE);
        }
        Self { holder: holder.into() }
    }

    /// The key of the exclusive holder, and the channel for waiters without a place in the queue.
    pub(crate) fn holder(&self) -> &str {
        &self.holder
    }

    /// Adds the keys with these numbers to a command.
    pub(crate) fn add_to(&self, command: &mut redis::Cmd, which: &[usize]) {
        let mut key = String::with_capacity(self.holder.len() + 2);
        key.push_str(&self.holder);
        for &which in which {
            key.truncate(self.holder.len());
            key.push_str(SUFFIXES[which]);
            command.arg(&key);
        }
    }

    /// How many keys there are.
    pub(crate) const COUNT: usize = SUFFIXES.len();

    /// Adds all keys to a command.
    pub(crate) fn add_all_to(&self, command: &mut redis::Cmd) {
        self.add_to(command, &[0, 1, 2, 3, 4, 5]);
    }

    /// Adds the number of keys and all keys to the call of a script.
    pub(crate) fn add_all_with_count_to(&self, call: &mut redis::Cmd) {
        call.arg(Self::COUNT);
        self.add_all_to(call);
    }

    /// The slot of a cluster that all of them are in.
    pub(crate) fn slot(&self) -> u16 {
        let start = self.holder.find('{').map_or(0, |at| at + 1);
        let rest = &self.holder[start..];
        let tag = &rest[..rest.find('}').unwrap_or(rest.len())];
        crc16(tag.as_bytes()) % 16384
    }
}

/// Returns the key of the highest fence of a name, and keys in the same slot. No key of a lock ends like this one, so it
/// collides with none, whatever its prefix.
pub(crate) fn register_key(prefix: &str, name: &str) -> (String, Keys) {
    let keys = Keys::new(&format!("{prefix}:fence"), Kind::Lock, name);
    (format!("{}:highest", keys.holder()), keys)
}

fn encode(name: &str, into: &mut String) {
    for part in name.split_inclusive(['%', '}']) {
        match part.as_bytes().last() {
            Some(b'%') => into.extend([&part[..part.len() - 1], "%25"]),
            Some(b'}') => into.extend([&part[..part.len() - 1], "%7D"]),
            _ => into.push_str(part),
        }
    }
}

/// Returns a pattern for SCAN that matches the keys of all names that start with `start`, and more.
pub(crate) fn pattern(prefix: &str, start: &str) -> String {
    let mut encoded = format!("{prefix}:{{");
    encode(start, &mut encoded);
    let mut pattern = String::with_capacity(encoded.len() + 8);
    for character in encoded.chars() {
        if "*?[]\\^".contains(character) {
            pattern.push('\\');
        }
        pattern.push(character);
    }
    pattern.push('*');
    pattern
}

/// Returns the name that a key belongs to, if it is a key of this store.
pub(crate) fn name_of(prefix: &str, key: &str) -> Option<String> {
    let rest = key.strip_prefix(prefix)?.strip_prefix(":{")?;
    let encoded = &rest[..rest.find('}')?];
    Some(encoded.replace("%7D", "}").replace("%25", "%"))
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

    fn holder(name: &str) -> String {
        Keys::new("lockkeeper", Kind::Lock, name).holder().to_owned()
    }

    #[test]
    fn names_stand_in_their_keys_as_they_are_where_they_can() {
        assert_eq!(holder("orders/42"), "lockkeeper:{orders/42}");
        assert_eq!(holder("{a}"), "lockkeeper:{{a%7D}");
        assert_eq!(holder("}a"), "lockkeeper:{%7Da}");
        assert_eq!(holder("%7D"), "lockkeeper:{%257D}");
        let semaphore = Keys::new("shop", Kind::Semaphore, "gpu");
        assert_eq!(semaphore.holder(), "shop:{gpu}:s");
    }

    #[test]
    fn a_key_leads_back_to_its_name() {
        for name in ["a", "}", "{}", "%", "%7D", "%25", "a}:q", "🔒", "a\nb", "%7D}"] {
            for kind in [Kind::Lock, Kind::Semaphore] {
                let keys = Keys::new("lockkeeper", kind, name);
                for suffix in SUFFIXES {
                    let key = format!("{}{suffix}", keys.holder());
                    assert_eq!(name_of("lockkeeper", &key).as_deref(), Some(name), "{key}");
                }
            }
        }
        assert_eq!(name_of("lockkeeper", "lockkeeper:wake:1"), None);
        assert_eq!(name_of("lockkeeper", "other:{a}"), None);
    }

    #[test]
    fn the_register_of_a_name_is_in_the_slot_of_its_lock_and_not_among_its_keys() {
        let (key, keys) = register_key("lockkeeper", "orders/42");
        assert_eq!(key, "lockkeeper:fence:{orders/42}:highest");
        assert_eq!(keys.slot(), Keys::new("lockkeeper", Kind::Lock, "orders/42").slot());
        assert_eq!(name_of("lockkeeper", &key), None);
    }

    /// Golden values of CLUSTER KEYSLOT on a real server.
    #[test]
    fn slots_are_those_of_the_server() {
        assert_eq!(crc16(b"123456789"), 0x31C3);
        assert_eq!(Keys::new("a", Kind::Lock, "123456789").slot(), 12739);
        assert_eq!(Keys::new("b", Kind::Semaphore, "123456789").slot(), 12739);
    }

    #[test]
    fn a_pattern_takes_nothing_in_a_name_for_a_wildcard() {
        assert_eq!(pattern("lk", "a*[b]?"), "lk:{a\\*\\[b\\]\\?*");
    }
}
