//! From the name of a lock to the name of its file.
//!
//! Small letters, digits, `-`, `_` and inner dots stand as they are; every other byte becomes `%` and two
//! hexadecimal digits. Capital letters, too: two names then differ on a file system that does not
//! tell `a` from `A`. What would be too long for a file name is cut, and a `~` with the hash of the whole
//! name follows: no name that stands as it is has a `~`.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

/// What the name of every lock file ends with.
const SUFFIX: &str = ".lock";
/// What the name of every turnstile ends with.
const TURNSTILE: &str = ".turn";
/// The longest name that is not cut. File systems take 255 bytes, some that encrypt fewer.
const LONGEST: usize = 128;
/// How much of a name that is cut can still be read.
const READABLE: usize = 64;

/// The file of a name.
pub(crate) fn file_name(name: &str) -> String {
    let mut file = encode(name);
    if file.len() > LONGEST {
        let mut cut = READABLE;
        // Not in the middle of an escape.
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

/// The turnstile of a lock file.
pub(crate) fn turnstile_of(file: &str) -> String {
    format!("{}{TURNSTILE}", file.strip_suffix(SUFFIX).unwrap_or(file))
}

/// Whether a file is the turnstile of a lock.
pub(crate) fn is_turnstile(file: &str) -> bool {
    let lock = file.strip_suffix(TURNSTILE).map(|stem| format!("{stem}{SUFFIX}"));
    lock.is_some_and(|lock| told_by(&lock) != Told::Nothing)
}

/// What the name of a file says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// The name of a lock.
    Name(String),
    /// That it is a lock, whose name is too long to be told here.
    Cut,
    /// That it is no lock.
    Nothing,
}

/// The lock that a file is of.
pub(crate) fn told_by(file: &str) -> Told {
    let Some(stem) = file.strip_suffix(SUFFIX) else { return Told::Nothing };
    if let Some((_, hash)) = stem.split_once('~') {
        let is_hash = hash.len() == 64 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
        return if is_hash { Told::Cut } else { Told::Nothing };
    }
    match decode(stem).map(String::from_utf8) {
        // Another program's file may look like one of ours.
        Some(Ok(name)) if !name.is_empty() && file_name(&name) == file => Told::Name(name),
        _ => Told::Nothing,
    }
}

/// Whether a file of this name is of a name that was cut.
pub(crate) fn is_cut(file: &str) -> bool {
    file.contains('~')
}

fn encode(name: &str) -> String {
    let mut encoded = String::with_capacity(name.len() + 16);
    for (i, byte) in name.bytes().enumerate() {
        match byte {
            b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' => encoded.push(byte.into()),
            // A file that begins with a dot is hidden, and two are the directory above.
            b'.' if i > 0 => encoded.push('.'),
            _ => {
                let _ = write!(encoded, "%{byte:02X}");
            }
        }
    }
    encoded
}

/// Undoes percent signs; `None` if one is not followed by two hexadecimal digits.
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
    fn a_turnstile_is_told_from_a_lock_and_from_files_of_others() {
        for name in ["a", "orders/42", &"long".repeat(100)] {
            let file = turnstile_of(&file_name(name));
            assert!(is_turnstile(&file), "{file}");
            assert_eq!(told_by(&file), Told::Nothing, "{file}");
        }
        for other in ["a.lock", "A.turn", ".turn", "my notes.turn", "a.turn.bak"] {
            assert!(!is_turnstile(other), "{other}");
        }
    }

    /// These must never change: another version would lock other files.
    #[test]
    fn names_have_the_files_that_they_always_had() {
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
    fn a_name_that_is_cut_is_not_cut_inside_an_escape() {
        for before in 0..8 {
            let file = file_name(&format!("{}{}", "a".repeat(before), "🔒".repeat(40)));
            let readable = file.split('~').next().unwrap();
            assert!(decode(readable).is_some(), "{file}");
            assert!(readable.len() > READABLE - 3, "{file}");
        }
    }

    #[test]
    fn files_of_other_programs_are_no_locks() {
        let others =
            ["notes.txt", ".lock", "A.lock", "a%2f.lock", "a%.lock", "a%4.lock", "a~1.lock"];
        for file in others {
            assert_eq!(told_by(file), Told::Nothing, "{file}");
        }
        assert_eq!(told_by("%61.lock"), Told::Nothing, "we would have written a.lock");
        assert_eq!(told_by("%FF.lock"), Told::Nothing, "no UTF-8");
    }

    /// Names that are alike: short ones of few characters meet soon, if they can.
    fn names() -> impl Strategy<Value = String> {
        prop_oneof!["[aA./%~2f\0]{1,6}", "\\PC{1,300}", "[aAé]{120,140}", "(🔒|a){25,60}"]
    }

    proptest! {
        #[test]
        fn a_file_stays_in_its_directory_and_can_be_made(name in names()) {
            let file = file_name(&name);
            prop_assert!(file.len() <= 143, "{file}");
            prop_assert!(!file.starts_with('.') && !file.contains(['/', '\0']), "{file}");
            prop_assert!(file.bytes().all(|byte| byte.is_ascii_graphic()), "{file}");
        }

        #[test]
        fn two_names_never_have_one_file_even_if_case_does_not_count(a in names(), b in names()) {
            let (x, y) = (file_name(&a).to_lowercase(), file_name(&b).to_lowercase());
            prop_assert_eq!(a == b, x == y);
        }

        #[test]
        fn a_name_is_read_back_from_its_file_unless_it_was_cut(name in names()) {
            let file = file_name(&name);
            match told_by(&file) {
                Told::Name(told) => prop_assert_eq!(told, name),
                Told::Cut => prop_assert!(is_cut(&file) && encode(&name).len() > LONGEST),
                Told::Nothing => prop_assert!(false, "{file} is not known as a lock"),
            }
        }
    }
}
