//! Durations such as `1h30m`.

use std::time::Duration;

const EXPECTED: &str = "write a duration as 500ms, 1.5s, 30s, 5m, 1h30m or 2d";
const TOO_LONG: &str = "the duration is too long";

/// Parses a duration: numbers with units (`d`, `h`, `m` or `min`, `s`, `ms`), larger units first, each at most once; or `0`.
///
/// # Errors
///
/// Returns a message for the user that shows the expected format.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use lockkeeper_syntax::duration::parse;
///
/// assert_eq!(parse("1h30m"), Ok(Duration::from_secs(5400)));
/// assert!(parse("90").is_err());
/// ```
pub fn parse(text: &str) -> Result<Duration, &'static str> {
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let (mut rest, mut total, mut before) = (text, Duration::ZERO, u64::MAX);
    loop {
        let digits = rest.bytes().take_while(|b| b.is_ascii_digit() || *b == b'.').count();
        let (number, after) = rest.split_at(digits);
        let letters = after.bytes().take_while(u8::is_ascii_alphabetic).count();
        let (unit, after) = after.split_at(letters);
        let unit = match unit {
            "d" => 86_400_000,
            "h" => 3_600_000,
            "m" | "min" => 60_000,
            "s" => 1000,
            "ms" => 1,
            _ => return Err(EXPECTED),
        };
        // "30s1h" is more likely a mistake than intended.
        if unit >= before {
            return Err(EXPECTED);
        }
        total = total.checked_add(part(number, unit)?).ok_or(TOO_LONG)?;
        if after.is_empty() {
            return Ok(total);
        }
        (rest, before) = (after, unit);
    }
}

/// Returns `number` units of `unit_millis` milliseconds each, rounded down to a nanosecond.
fn part(number: &str, unit_millis: u64) -> Result<Duration, &'static str> {
    let (whole, fraction) = match number.split_once('.') {
        Some((whole, fraction)) => (whole, Some(fraction)),
        None => (number, None),
    };
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !is_number(whole) || !fraction.is_none_or(is_number) {
        return Err(EXPECTED);
    }
    let whole: u64 = whole.parse().map_err(|_| TOO_LONG)?;
    let whole = whole.checked_mul(unit_millis).map(Duration::from_millis).ok_or(TOO_LONG)?;
    let (mut nanos, mut place) = (0_u64, unit_millis * 1_000_000);
    for digit in fraction.unwrap_or_default().bytes() {
        place /= 10;
        nanos += u64::from(digit - b'0') * place;
    }
    Ok(whole + Duration::from_nanos(nanos))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_durations_are_parsed() {
        let good = [
            ("0", 0),
            ("0s", 0),
            ("500ms", 500),
            ("30s", 30_000),
            ("1.5s", 1500),
            ("0.1s", 100),
            ("1.25h", 4_500_000),
            ("5m", 300_000),
            ("5min", 300_000),
            ("1h30m", 5_400_000),
            ("2d", 172_800_000),
            ("1m30s250ms", 90_250),
        ];
        for (text, millis) in good {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        assert_eq!(parse("0.000000001s"), Ok(Duration::from_nanos(1)));
        assert_eq!(parse("1.99999999999999999999s"), Ok(Duration::new(1, 999_999_999)));
    }

    #[test]
    fn invalid_durations_are_rejected() {
        let bad = [
            "",
            "5",
            "s",
            "5x",
            "-5s",
            "5 s",
            "30s1h",
            "5s5s",
            ".5s",
            "5.s",
            "1..5s",
            "1.2.3s",
            "∞",
            "1e9s",
            "5s ",
            "5s9",
            "99999999999999999999d",
            "18446744073709551615d",
            "18446744073709551615ms18446744073709551615ms",
        ];
        for text in bad {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }
}
