//! Maps the name of a lock to the name of its file.
//!
//! Lower-case letters, digits, `-`, `_` and dots after the first character are kept; every other byte becomes `%` and two
//! hexadecimal digits. Upper-case letters are encoded so that names stay distinct on a case-insensitive file system. A
//! name that is too long for a file name is cut, followed by `~` and the hash of the whole name. An encoded name
//! contains no `~`.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

/// The suffix of lock files.
const SUFFIX: &str = ".lock";
/// The suffix of turnstiles.
const TURNSTILE: &str = ".turn";
/// The longest encoded name that is not cut. File systems allow 255 bytes, encrypting ones fewer.
const MAX_LEN: usize = 128;
/// The length of the readable part of a cut name.
const CUT_LEN: usize = 64;

/// Returns the file name of a lock.
pub(crate) fn file_name(name: &str) -> String {
    let mut file = encode(name);
    if file.len() > MAX_LEN {
        let mut cut = CUT_LEN;
        // Do not cut an escape in two.
        if let Some(escape) = file[..cut].rfind('%').filter(|escape| escape + 3 > cut) {
            cut = escape;
        }
        file.truncate(cut);
        file.push('~');
        for byte in Sha256::digest(name) {
            let _ = write!(file, "{byte:02x}");
        }
    }
    file.push_str(SUFFIX);
    file
}

/// Returns the turnstile of a lock file.
pub(crate) fn turnstile_of(file: &str) -> String {
    format!("{}{TURNSTILE}", file.strip_suffix(SUFFIX).unwrap_or(file))
}

/// Returns whether a file is the turnstile of a lock.
pub(crate) fn is_turnstile(file: &str) -> bool {
    let lock = file.strip_suffix(TURNSTILE).map(|stem| format!("{stem}{SUFFIX}"));
    lock.is_some_and(|lock| parse(&lock) != FileName::Other)
}

/// The meaning of a file name.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FileName {
    /// The file of the lock with this name.
    Lock(String),
    /// The file of a lock whose name was cut and hashed.
    HashedLock,
    /// Not the file of a lock.
    Other,
}

/// Decodes the name of a file.
pub(crate) fn parse(file: &str) -> FileName {
    let Some(stem) = file.strip_suffix(SUFFIX) else { return FileName::Other };
    if let Some((_, hash)) = stem.split_once('~') {
        let is_hash = hash.len() == 64 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
        return if is_hash { FileName::HashedLock } else { FileName::Other };
    }
    match decode(stem).map(String::from_utf8) {
        // A file of another program may look like a lock file.
        Some(Ok(name)) if !name.is_empty() && file_name(&name) == file => FileName::Lock(name),
        _ => FileName::Other,
    }
}

/// Returns whether a lock file has a hashed name.
pub(crate) fn is_hashed(file: &str) -> bool {
    file.contains('~')
}

fn encode(name: &str) -> String {
    let mut encoded = String::with_capacity(name.len() + 16);
    for (i, byte) in name.bytes().enumerate() {
        match byte {
            b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' => encoded.push(byte.into()),
            // A leading dot would hide the file, and `..` is the parent directory.
            b'.' if i > 0 => encoded.push('.'),
            _ => encoded.extend(['%', hex_digit(byte >> 4), hex_digit(byte & 15)]),
        }
    }
    encoded
}

fn hex_digit(value: u8) -> char {
    char::from(b"0123456789ABCDEF"[usize::from(value)])
}

/// Decodes percent signs. Returns `None` if one is not followed by two hexadecimal digits.
pub(crate) fn decode(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || char::from(rest.next()?).to_digit(16);
        let value = digit()? * 16 + digit()?;
        bytes.push(u8::try_from(value).ok()?);
    }
    Some(bytes)
}

/// The prefix of temporary files, which are not locks.
const TEMPORARY: &str = ".tmp-";

/// Returns a new name for a temporary file.
pub(crate) fn temporary() -> String {
    format!("{TEMPORARY}{:016x}", fastrand::u64(..))
}

/// Returns whether a file is a temporary one.
pub(crate) fn is_temporary(file: &str) -> bool {
    file.starts_with(TEMPORARY)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_turnstile_is_distinguished_from_a_lock_and_from_other_files() {
        for name in ["a", "orders/42", &"long".repeat(100)] {
            let file = turnstile_of(&file_name(name));
            assert!(is_turnstile(&file), "{file}");
            assert_eq!(parse(&file), FileName::Other, "{file}");
        }
        for other in ["a.lock", "A.turn", ".turn", "my notes.turn", "a.turn.bak"] {
            assert!(!is_turnstile(other), "{other}");
        }
    }

    /// These must never change: two versions would lock different files.
    #[test]
    fn the_encoding_of_names_is_stable() {
        let golden = [
            ("orders/42", "orders%2F42.lock"),
            ("orders", "orders.lock"),
            ("Orders", "%4Frders.lock"),
            ("a.b-c_d", "a.b-c_d.lock"),
            (".", "%2E.lock"),
            ("..", "%2E..lock"),
            ("../a", "%2E.%2Fa.lock"),
            ("a.lock", "a.lock.lock"),
            ("a~b", "a%7Eb.lock"),
            ("100 %", "100%20%25.lock"),
            ("é", "%C3%A9.lock"),
            ("🔒", "%F0%9F%94%92.lock"),
            ("gpu\0slot\x003", "gpu%00slot%003.lock"),
            ("\n", "%0A.lock"),
        ];
        for (name, file) in golden {
            assert_eq!(file_name(name), file, "{name:?}");
        }
        let long = "a".repeat(129);
        let hash = "c12cb024a2e5551cca0e08fce8f1c5e314555cc3fef6329ee994a3db752166ae";
        assert_eq!(file_name(&long), format!("{}~{hash}.lock", "a".repeat(64)));
        assert_eq!(file_name(&"a".repeat(128)), format!("{}.lock", "a".repeat(128)));
    }

    #[test]
    fn a_cut_name_does_not_end_inside_an_escape() {
        for before in 0..8 {
            let file = file_name(&format!("{}{}", "a".repeat(before), "🔒".repeat(40)));
            let readable = file.split('~').next().unwrap();
            assert!(decode(readable).is_some(), "{file}");
            assert!(readable.len() > CUT_LEN - 3, "{file}");
        }
    }

    #[test]
    fn files_of_other_programs_are_no_locks() {
        let others =
            ["notes.txt", ".lock", "A.lock", "a%2f.lock", "a%.lock", "a%4.lock", "a~1.lock"];
        for file in others {
            assert_eq!(parse(file), FileName::Other, "{file}");
        }
        assert_eq!(parse("%61.lock"), FileName::Other, "the store writes a.lock");
        assert_eq!(parse("%FF.lock"), FileName::Other, "not UTF-8");
    }

    /// Similar names: short ones of few characters, which are likely to collide.
    fn names() -> impl Strategy<Value = String> {
        prop_oneof!["[aA./%~2f\0]{1,6}", "\\PC{1,300}", "[aAé]{120,140}", "(🔒|a){25,60}"]
    }

    proptest! {
        #[test]
        fn a_file_name_is_valid_and_stays_in_its_directory(name in names()) {
            let file = file_name(&name);
            prop_assert!(file.len() <= 143, "{file}");
            prop_assert!(!file.starts_with('.') && !file.contains(['/', '\0']), "{file}");
            prop_assert!(file.bytes().all(|byte| byte.is_ascii_graphic()), "{file}");
        }

        #[test]
        fn two_names_never_share_a_file_on_a_case_insensitive_file_system(a in names(), b in names()) {
            let (x, y) = (file_name(&a).to_lowercase(), file_name(&b).to_lowercase());
            prop_assert_eq!(a == b, x == y);
        }

        #[test]
        fn a_name_is_decoded_from_its_file_unless_it_is_hashed(name in names()) {
            let file = file_name(&name);
            match parse(&file) {
                FileName::Lock(decoded) => prop_assert_eq!(decoded, name),
                FileName::HashedLock => prop_assert!(is_hashed(&file) && encode(&name).len() > MAX_LEN),
                FileName::Other => prop_assert!(false, "{file} is not recognized as a lock"),
            }
        }
    }
}
