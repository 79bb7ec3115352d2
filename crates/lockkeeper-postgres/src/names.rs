//! Advisory keys: one number, or a pair of numbers.

use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};

/// The key of an advisory lock in PostgreSQL.
///
/// [`AdvisoryKey::of`] derives the key of a name. To share locks with programs that choose their own keys, lock the key
/// itself: with `foreign_keys=on` in the URL, or [`Postgres::with_foreign_keys`](crate::Postgres::with_foreign_keys), the
/// store accepts an `AdvisoryKey` as a name. Other stores refuse it, so that a name from a user never locks the key of
/// another program.
///
/// Keys of one number and keys of two numbers never conflict.
///
/// # Examples
///
/// ```
/// use lockkeeper_postgres::AdvisoryKey;
///
/// assert_eq!(AdvisoryKey::from_i64(42).to_string(), "pg:42");
/// assert_ne!(AdvisoryKey::of("pg:42"), AdvisoryKey::from_i64(42)); // a name is always hashed
/// assert_eq!(AdvisoryKey::of("orders/42").as_i64(), Some(-5_170_164_510_040_806_565));
/// assert_eq!(AdvisoryKey::from_pair(7, 42).as_pair(), Some((7, 42)));
/// // let keeper = Keeper::new(Postgres::new(url)?.with_foreign_keys());
/// // let guard = keeper.mutex(AdvisoryKey::from_pair(7, 42)).lock().await?;
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdvisoryKey(pub(crate) Form);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Form {
    One(i64),
    Two(i32, i32),
}

/// The prefix of every hashed name. Another derivation of keys would need another number. Locks of the two would not exclude
/// each other.
const VERSION: &str = "lockkeeper/1\0";
/// A key that is never locked, for sessions that only send queries.
pub(crate) const NO_KEY: AdvisoryKey = AdvisoryKey(Form::Two(i32::MIN, i32::MIN));
/// The first number of the keys by which the sessions of this store agree on their fences.
pub(crate) const RESERVED_CLASS: i32 = i32::MIN;
const PREFIX: &str = "pg:";

impl AdvisoryKey {
    /// Returns the key that `pg_advisory_lock(bigint)` takes.
    pub fn from_i64(key: i64) -> Self {
        Self(Form::One(key))
    }

    /// Returns the key that `pg_advisory_lock(int, int)` takes.
    pub fn from_pair(first: i32, second: i32) -> Self {
        Self(Form::Two(first, second))
    }

    /// Returns the key of a name: the first 8 bytes, big-endian, of the SHA-256 of `lockkeeper/1`, a NUL and the
    /// name. This never changes.
    ///
    /// Two names have the same key with a probability of 2⁻⁶⁴. With a million names in use, the probability that any two
    /// collide is about 1 in 37 million.
    pub fn of(name: &str) -> Self {
        let digest = Sha256::new().chain_update(VERSION).chain_update(name).finalize();
        Self(Form::One(i64::from_be_bytes(first_8(&digest))))
    }

    /// Returns the number that `pg_advisory_lock(bigint)` takes, or `None` if the key is a pair. The key of a name is always
    /// one number.
    pub fn as_i64(self) -> Option<i64> {
        match self.0 {
            Form::One(key) => Some(key),
            Form::Two(..) => None,
        }
    }

    /// Returns the numbers that `pg_advisory_lock(int, int)` takes, or `None` if the key is one number.
    pub fn as_pair(self) -> Option<(i32, i32)> {
        match self.0 {
            Form::One(_) => None,
            Form::Two(first, second) => Some((first, second)),
        }
    }

    /// Parses a key as [`Display`](fmt::Display) writes it. Returns `None` for any other text.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let numbers = text.strip_prefix(PREFIX)?;
        let key = match numbers.split_once(',') {
            Some((first, second)) => Self::from_pair(first.parse().ok()?, second.parse().ok()?),
            None => Self::from_i64(numbers.parse().ok()?),
        };
        // `pg:042` is a plain name: each key has one text.
        (key.to_string() == text).then_some(key)
    }

    /// Returns the key that the .NET library `DistributedLock` (Postgres, with hashing allowed) uses for a name.
    ///
    /// Up to 9 ASCII characters are packed into a pair. 16 hexadecimal digits are one number; 8 and 8, separated by a comma,
    /// are a pair. Any other name is hashed with SHA-1.
    pub fn dotnet(name: &str) -> Self {
        const MAX_PACKED: usize = 9;
        if name.len() <= MAX_PACKED && name.is_ascii() {
            // Seven bits per character, then a zero, then ones.
            let packed = name.bytes().fold(0, |bits, byte| bits << 7 | u64::from(byte)) << 1;
            let ones = 7 * (MAX_PACKED - name.len());
            return pair_of(packed << ones | ((1 << ones) - 1));
        }
        let hex = |digits: &str| {
            let digits_only = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
            u64::from_str_radix(digits, 16).ok().filter(|_| digits_only)
        };
        match name.split_once(',') {
            None if name.len() == 16 => {
                if let Some(key) = hex(name) {
                    return Self::from_i64(key.cast_signed());
                }
            }
            Some((first, second)) if first.len() == 8 && second.len() == 8 => {
                if let (Some(first), Some(second)) = (hex(first), hex(second)) {
                    return pair_of(first << 32 | second);
                }
            }
            _ => {}
        }
        let digest = sha1_smol::Sha1::from(name).digest().bytes();
        Self::from_i64(i64::from_le_bytes(first_8(&digest)))
    }

    /// Returns the key as `pg_locks` shows it: classid, objid, objsubid.
    pub(crate) fn in_pg_locks(self) -> (u32, u32, i16) {
        match self.0 {
            Form::One(key) => {
                let key = key.cast_unsigned();
                let (high, low) = halves(key);
                (high, low, 1)
            }
            Form::Two(first, second) => (first.cast_unsigned(), second.cast_unsigned(), 2),
        }
    }

    /// Returns whether a store locks this key for a name: the key of the name, or the key that the name spells.
    pub(crate) fn is_locked_for(self, name: &str) -> bool {
        Self::parse(name).unwrap_or_else(|| Self::of(name)) == self
    }

    /// Returns the key that `pg_locks` shows with these columns.
    pub(crate) fn from_pg_locks(classid: u32, objid: u32, objsubid: i16) -> Self {
        let key = u64::from(classid) << 32 | u64::from(objid);
        if objsubid == 1 { Self::from_i64(key.cast_signed()) } else { pair_of(key) }
    }
}

fn first_8(digest: &[u8]) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&digest[..8]);
    bytes
}

#[expect(clippy::cast_possible_truncation, reason = "it splits the number")]
fn halves(key: u64) -> (u32, u32) {
    ((key >> 32) as u32, key as u32)
}

fn pair_of(key: u64) -> AdvisoryKey {
    let (first, second) = halves(key);
    AdvisoryKey::from_pair(first.cast_signed(), second.cast_signed())
}

/// Writes `pg:42` or `pg:7,42`, the name of the key on a store with foreign keys.
impl fmt::Display for AdvisoryKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Form::One(key) => write!(f, "{PREFIX}{key}"),
            Form::Two(first, second) => write!(f, "{PREFIX}{first},{second}"),
        }
    }
}

impl From<AdvisoryKey> for Arc<str> {
    fn from(key: AdvisoryKey) -> Self {
        key.to_string().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Golden values. If they changed, locks of two versions of this crate would not exclude each other.
    #[test]
    fn the_key_of_a_name_never_changes() {
        let golden = [
            ("orders/42", -5_170_164_510_040_806_565),
            ("", 2_199_500_859_623_720_851),
            ("🔒", -53_930_216_945_863_388),
            ("pg:042", 4_021_226_179_524_443_630),
            ("pg:42", -626_045_652_829_530_930),
            ("a\0slot\0\u{31}", 5_328_080_709_423_127_060),
        ];
        for (name, key) in golden {
            assert_eq!(AdvisoryKey::of(name), AdvisoryKey::from_i64(key), "{name:?}");
        }
    }

    #[test]
    fn only_the_exact_text_of_a_key_is_parsed_as_a_key() {
        let keys = [
            AdvisoryKey::from_i64(0),
            AdvisoryKey::from_i64(i64::MIN),
            AdvisoryKey::from_i64(i64::MAX),
            AdvisoryKey::from_pair(0, 0),
            AdvisoryKey::from_pair(i32::MIN, i32::MAX),
            AdvisoryKey::from_pair(-1, 1),
        ];
        for key in keys {
            assert_eq!(AdvisoryKey::parse(&key.to_string()), Some(key));
            let (number, pair) = (key.as_i64(), key.as_pair());
            let of_number = number.map(AdvisoryKey::from_i64);
            let of_pair = pair.map(|(first, second)| AdvisoryKey::from_pair(first, second));
            assert_eq!(
                [of_number, of_pair].map(|own| own.is_some_and(|own| own == key)),
                [number.is_some(), pair.is_some()]
            );
            assert_ne!(number.is_some(), pair.is_some(), "a key has one form");
            assert_ne!(
                AdvisoryKey::of(&key.to_string()),
                key,
                "a hashed name is not the key that it spells"
            );
            let (classid, objid, objsubid) = key.in_pg_locks();
            assert_eq!(AdvisoryKey::from_pg_locks(classid, objid, objsubid), key);
        }
        for name in ["pg:", "pg:+1", "pg:01", "pg:1,", "pg:1,2,3", "pg:9223372036854775808", "PG:1"]
        {
            assert_eq!(AdvisoryKey::parse(name), None, "{name:?}");
        }
        assert_ne!(
            AdvisoryKey::parse("pg:1"),
            AdvisoryKey::parse("pg:0,1"),
            "one number and a pair conflict"
        );
    }

    /// Expected values worked out by hand from the rules of the .NET library.
    #[test]
    fn a_dotnet_name_has_the_key_of_the_dotnet_library() {
        // No character, a zero, 63 ones.
        assert_eq!(AdvisoryKey::dotnet(""), pair_of(0x7fff_ffff_ffff_ffff));
        // 'a' is 1100001; a zero; 56 ones.
        assert_eq!(AdvisoryKey::dotnet("a"), pair_of((0b1100_0010 << 56) | ((1 << 56) - 1)));
        let nine = "123456789".bytes().fold(0_u64, |bits, byte| bits << 7 | u64::from(byte));
        assert_eq!(AdvisoryKey::dotnet("123456789"), pair_of(nine << 1));
        assert_eq!(AdvisoryKey::dotnet("00000000000000ff"), AdvisoryKey::from_i64(255));
        assert_eq!(AdvisoryKey::dotnet("FFFFFFFFFFFFFFFE"), AdvisoryKey::from_i64(-2));
        assert_eq!(AdvisoryKey::dotnet("00000001,ffffffff"), AdvisoryKey::from_pair(1, -1));
        // SHA-1 of "0123456789" is 87acec17cd9dcd20 a716cc2cf67417b71c8a7016; the first eight bytes,
        // the lowest first.
        assert_eq!(AdvisoryKey::dotnet("0123456789"), AdvisoryKey::from_i64(0x20cd_9dcd_17ec_ac87));
        for hashed in ["+0000000000000ff", "0000001,00000002", "äöü", "00000000000000fg"] {
            let digest = sha1_smol::Sha1::from(hashed).digest().bytes();
            let key = i64::from_le_bytes(first_8(&digest));
            assert_eq!(AdvisoryKey::dotnet(hashed), AdvisoryKey::from_i64(key), "{hashed:?}");
        }
    }
}
