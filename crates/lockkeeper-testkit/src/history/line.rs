//! The text form of a hold: one line.

use std::fmt::{self, Write as _};
use std::str::FromStr;

use lockkeeper_core::{Fence, Mode};

use super::Hold;

impl fmt::Display for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ", escape(&self.name), escape(&self.owner))?;
        match self.mode {
            Mode::Exclusive => f.write_str("exclusive")?,
            Mode::Shared => f.write_str("shared")?,
            Mode::Permits { take, of } => write!(f, "permits:{take}/{of}")?,
        }
        let or_dash = |number: Option<u64>| number.map_or("-".to_owned(), |n| n.to_string());
        write!(f, " {} {} {}", or_dash(self.fence.map(Fence::get)), self.start, or_dash(self.end))
    }
}

impl FromStr for Hold {
    type Err = ParseHoldError;

    /// Parses the output of `Display`.
    fn from_str(line: &str) -> Result<Self, ParseHoldError> {
        parse(line).ok_or_else(|| ParseHoldError(line.to_owned()))
    }
}

fn parse(line: &str) -> Option<Hold> {
    let fields: Vec<&str> = line.split(' ').collect();
    let [name, owner, mode, fence, start, end] = fields[..] else { return None };
    let unless_dash = |text: &str| match text {
        "-" => Some(None),
        number => number.parse::<u64>().ok().map(Some),
    };
    let mode = match mode {
        "exclusive" => Mode::Exclusive,
        "shared" => Mode::Shared,
        permits => {
            let (take, of) = permits.strip_prefix("permits:")?.split_once('/')?;
            Mode::Permits { take: take.parse().ok()?, of: of.parse().ok()? }
        }
    };
    let fence = match unless_dash(fence)? {
        Some(number) => Some(Fence::new(number)?),
        None => None,
    };
    let (start, end) = (start.parse().ok()?, unless_dash(end)?);
    Some(Hold { name: unescape(name)?, owner: unescape(owner)?, mode, fence, start, end })
}

/// Escapes separators as `%` and two hexadecimal digits.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if c == ' ' || c == '%' || c.is_ascii_control() {
            let _ = write!(escaped, "%{:02x}", u32::from(c));
        } else {
            escaped.push(c);
        }
    }
    escaped
}

fn unescape(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut plain = parts.next()?.to_owned();
    for part in parts {
        let (digits, rest) = part.split_at_checked(2)?;
        let byte = u8::from_str_radix(digits, 16).ok().filter(u8::is_ascii)?;
        plain.push(char::from(byte));
        plain += rest;
    }
    Some(plain)
}

/// A line that is not a [`Hold`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseHoldError(String);

impl fmt::Display for ParseHoldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not a hold (name owner mode fence start end): {:?}", self.0)
    }
}

impl std::error::Error for ParseHoldError {}
