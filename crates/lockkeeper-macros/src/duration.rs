//! Durations as people write them: the same as on the command line of `lockkeeper`.

use std::time::Duration;

const WRONG: &str = "write a duration as 500ms, 30s, 5m, 1h30m or 2d";

/// Reads a duration: whole numbers with their units, large ones first.
pub(crate) fn parse(text: &str) -> Result<Duration, &'static str> {
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let (mut rest, mut millis, mut before) = (text, 0_u64, u64::MAX);
    loop {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (number, after) = rest.split_at(digits);
        let letters = after.bytes().take_while(u8::is_ascii_alphabetic).count();
        let (unit, after) = after.split_at(letters);
        let unit = match unit {
            "d" => 86_400_000,
            "h" => 3_600_000,
            "m" | "min" => 60_000,
            "s" => 1000,
            "ms" => 1,
            _ => return Err(WRONG),
        };
        // Each once: "30s1h" is more likely a mistake than a wish.
        if unit >= before {
            return Err(WRONG);
        }
        let number: u64 = number.parse().map_err(|_| WRONG)?;
        let part = number.checked_mul(unit).and_then(|part| millis.checked_add(part));
        millis = part.ok_or("that is longer than can be counted")?;
        if after.is_empty() {
            return Ok(Duration::from_millis(millis));
        }
        (rest, before) = (after, unit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_people_write_them() {
        let good = [
            ("0", 0),
            ("0s", 0),
            ("500ms", 500),
            ("30s", 30_000),
            ("5m", 300_000),
            ("5min", 300_000),
            ("1h30m", 5_400_000),
            ("2d", 172_800_000),
            ("1m30s250ms", 90_250),
        ];
        for (text, millis) in good {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn wrong_durations_are_refused() {
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
            "1.5s",
            "∞",
            "1e9s",
            "5s ",
            "5s9",
            "99999999999999999999d",
            "18446744073709551615d",
        ];
        for text in bad {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }
}
