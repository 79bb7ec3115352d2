//! Owner ids.

use std::cell::RefCell;
use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind};

const HEX_DIGITS: [u8; 16] = *b"0123456789abcdef";

/// The random 128-bit id of a claim, by which a store identifies its holder.
///
/// Every claim has a new one, even of clones of one `Mutex`, so two holds never have the same owner. A client that knows
/// an owner id can renew and release its hold: treat it as a secret, like a ticket.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner(u128);

impl Owner {
    /// Creates an owner from the operating system's random source.
    ///
    /// # Panics
    ///
    /// If the operating system's random source fails. A weaker source could create equal owners, and equal owners hold
    /// one lock at the same time.
    pub fn random() -> Self {
        let drawn = POOL.try_with(|pool| pool.borrow_mut().draw());
        // The pool of a thread that is ending no longer exists.
        drawn.unwrap_or_else(|_| Pool { process: 0, drawn: Vec::new() }.draw())
    }
}

thread_local! {
    static POOL: RefCell<Pool> = const { RefCell::new(Pool { process: 0, drawn: Vec::new() }) };
}

/// Owners drawn in advance, so that not every lock makes a system call.
struct Pool {
    process: u32,
    drawn: Vec<Owner>,
}

impl Pool {
    fn draw(&mut self) -> Owner {
        // A fork copies the pool: parent and child would draw the same owners.
        let process = std::process::id();
        if self.process != process {
            self.process = process;
            self.drawn.clear();
        }
        if let Some(owner) = self.drawn.pop() {
            return owner;
        }
        // From the operating system and not from a seeded generator, whose state could be guessed.
        let mut bytes = [0; 16 * 32];
        getrandom::fill(&mut bytes).expect("the operating system's random source failed");
        let owners = bytes.as_chunks().0.iter().map(|id| Owner(u128::from_ne_bytes(*id)));
        self.drawn.extend(owners);
        self.drawn.pop().expect("just filled")
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Every lock writes its owner, and `{:032x}` takes six times as many instructions.
        let mut digits = [0; 32];
        for (pair, byte) in digits.chunks_exact_mut(2).zip(self.0.to_be_bytes()) {
            pair[0] = HEX_DIGITS[usize::from(byte >> 4)];
            pair[1] = HEX_DIGITS[usize::from(byte & 15)];
        }
        f.write_str(std::str::from_utf8(&digits).map_err(|_| fmt::Error)?)
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owner({self})")
    }
}

impl FromStr for Owner {
    type Err = Error;

    /// Parses the `Display` form: 32 hexadecimal digits.
    fn from_str(text: &str) -> Result<Self, Error> {
        let digits = text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
        match u128::from_str_radix(text, 16) {
            Ok(id) if digits => Ok(Self(id)),
            _ => Err(Error::new(
                ErrorKind::Config,
                "not an owner id: it must have 32 hexadecimal digits",
            )),
        }
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for Owner {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for Owner {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}
