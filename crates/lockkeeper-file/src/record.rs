//! The content of a lock file: the last fence and its holder.
//!
//! Exclusive holders write two lines at fixed offsets alternately, each with a
//! checksum. A torn write, because the process was killed or the disk is full, destroys only
//! the older line. The lines are text, so that `cat` shows the holder:
//!
//! ```text
//! CHECKSUM FENCE OWNER MICROSECONDS_SINCE_1970 LABEL
//! ```
//!
//! The name of the lock follows if the name of the file is a hash of it.

use std::cmp::Reverse;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::time::{SystemTime, UNIX_EPOCH};

use lockkeeper_core::{Fence, Label, Owner};

/// The space for a line.
const LINE: usize = 512;
/// The offset of the text in a line, behind the checksum.
const TEXT_AT: usize = 17;
/// The offset of a long name.
const NAME_AT: u64 = 2 * LINE as u64;

/// The last exclusive holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) fence: Fence,
    pub(crate) owner: Owner,
    /// When it acquired the lock, in microseconds since 1970.
    pub(crate) since: u64,
    pub(crate) label: Label,
}

/// The last record of a file, and the offset for the next one.
#[derive(Debug)]
pub(crate) struct Records {
    pub(crate) last: Option<Record>,
    /// The offset of the line without the last record.
    next: u64,
}

impl Records {
    /// Reads the last record. Ignores lines with a wrong checksum.
    pub(crate) fn read(file: &File) -> io::Result<Self> {
        let mut bytes = [0; 2 * LINE];
        let read = read_at(file, &mut bytes, 0)?;
        let (first, second) = bytes[..read].split_at(LINE.min(read));
        let mut lines = [(first, LINE as u64), (second, 0)];
        // The line with the lower fence matters only if the other one is torn.
        lines.sort_by_key(|(line, _)| Reverse(unverified_fence(line)));
        let last = lines.into_iter().find_map(|(line, other)| Some((parse(line)?, other)));
        let (last, next) = last.map_or((None, 0), |(last, other)| (Some(last), other));
        Ok(Self { last, next })
    }

    /// Returns a fence that is above the last one and not below the floor. It is at least the current time, so it is also above
    /// the fences of any earlier file at this path.
    ///
    /// Fails if no fence is left, or if the floor is too far ahead of the clock.
    pub(crate) fn next_fence(&self, floor: Option<Fence>) -> io::Result<Fence> {
        self.check_floor(floor)?;
        let last = self.last.as_ref().map_or(0, |last| last.fence.get());
        let floor = floor.map_or(0, Fence::get);
        let fence = Fence::new(now().max(last + 1).max(floor));
        fence.ok_or_else(|| io::Error::other(Fence::MAX.exhausted()))
    }

    /// Rejects a floor that is too far ahead of the clock, because the file would keep it. Accepts it if the last fence
    /// is as far ahead.
    pub(crate) fn check_floor(&self, floor: Option<Fence>) -> io::Result<()> {
        let Some(floor) = floor else { return Ok(()) };
        let last = self.last.as_ref().map_or(0, |last| last.fence.get());
        let (clock, ahead) = (now(), Fence::MAX_AHEAD.as_micros());
        if u128::from(floor.get()) > u128::from(clock) + ahead && floor.get() > last + 1 {
            return Err(io::Error::other(floor.refused(clock)));
        }
        Ok(())
    }

    /// Writes a record without overwriting the last one.
    pub(crate) fn write(&self, file: &File, record: &Record) -> io::Result<()> {
        file.write_all_at(&line(record), self.next)
    }
}

/// Returns the time in microseconds since 1970.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

fn line(record: &Record) -> Vec<u8> {
    let Record { fence, owner, since, label } = record;
    let mut line = Vec::with_capacity(LINE);
    let _ = write!(line, "{:016x} {fence} {owner} {since} {label}", 0);
    let sum = checksum(&line[TEXT_AT..]);
    let _ = write!(&mut line[..], "{sum:016x}");
    line.push(b'\n');
    line
}

/// Returns the fence of a line whose checksum was not verified.
fn unverified_fence(line: &[u8]) -> Option<u64> {
    let digits = line.get(TEXT_AT..)?.iter().take_while(|byte| byte.is_ascii_digit());
    digits
        .copied()
        .try_fold(0_u64, |fence, digit| fence.checked_mul(10)?.checked_add(u64::from(digit - b'0')))
}

fn parse(bytes: &[u8]) -> Option<Record> {
    let end = bytes.iter().position(|byte| *byte == b'\n')?;
    let (sum, text) = std::str::from_utf8(&bytes[..end]).ok()?.split_once(' ')?;
    if u64::from_str_radix(sum, 16) != Ok(checksum(text.as_bytes())) {
        return None;
    }
    let mut parts = text.splitn(4, ' ');
    let mut part = || parts.next();
    Some(Record {
        fence: Fence::new(part()?.parse().ok()?)?,
        owner: part()?.parse().ok()?,
        since: part()?.parse().ok()?,
        label: Label::new(part()?).ok()?,
    })
}

/// Returns the FNV-1a hash, which detects torn lines.
fn checksum(bytes: &[u8]) -> u64 {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// Writes a long name, unless it is complete. Concurrent writers write the same bytes.
pub(crate) fn write_name(file: &File, length: u64, name: &str) -> io::Result<()> {
    if length == NAME_AT + name.len() as u64 {
        return Ok(());
    }
    file.write_all_at(name.as_bytes(), NAME_AT)
}

/// Reads a long name.
pub(crate) fn read_name(file: &File) -> io::Result<Option<String>> {
    // The names of users have at most a kilobyte. Those of combinators are a little longer.
    let mut bytes = vec![0; 4096];
    let read = read_at(file, &mut bytes, NAME_AT)?;
    bytes.truncate(read);
    Ok(String::from_utf8(bytes).ok().filter(|name| !name.is_empty()))
}

/// Reads until the buffer is full or the file ends. Returns the number of bytes.
fn read_at(file: &File, bytes: &mut [u8], at: u64) -> io::Result<usize> {
    let mut read = 0;
    while read < bytes.len() {
        match file.read_at(&mut bytes[read..], at + read as u64) {
            Ok(0) => break,
            Ok(count) => read += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(fence: u64, label: &str) -> Record {
        let (fence, owner) = (Fence::new(fence).unwrap(), Owner::random());
        Record { fence, owner, since: now(), label: Label::new(label).unwrap() }
    }

    fn last(file: &File) -> Option<Record> {
        Records::read(file).unwrap().last
    }

    fn write(file: &File, record: &Record) {
        Records::read(file).unwrap().write(file, record).unwrap();
    }

    #[test]
    fn a_written_record_is_read_back() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(last(&file), None);
        for (fence, label) in [(1, ""), (2, "web-1:42:a b "), (u64::MAX >> 1, "é"), (4, "late")] {
            let written = record(fence, label);
            write(&file, &written);
            let highest = last(&file).unwrap();
            assert!(highest == written || highest.fence > written.fence);
        }
        let longest = "x".repeat(Label::MAX_LEN);
        let file = tempfile::tempfile().unwrap();
        for fence in [u64::MAX / 2 - 1, u64::MAX / 2] {
            let written = record(fence, &longest);
            write(&file, &written);
            assert_eq!(last(&file), Some(written), "a line fits into its space");
        }
    }

    #[test]
    fn a_write_torn_at_any_byte_never_lowers_the_fence() {
        for before in 1..4 {
            let file = tempfile::tempfile().unwrap();
            for fence in 1..=before {
                write(&file, &record(fence, "a rather long label, and then a short one"));
            }
            let next = record(before + 1, "short");
            let whole = line(&next);
            for written in 0..=whole.len() {
                let copy = tempfile::tempfile().unwrap();
                let mut bytes = [0; 2 * LINE];
                let length = read_at(&file, &mut bytes, 0).unwrap();
                copy.write_all_at(&bytes[..length], 0).unwrap();
                let records = Records::read(&copy).unwrap();
                copy.write_all_at(&whole[..written], records.next).unwrap();
                let fence = last(&copy).map_or(0, |last| last.fence.get());
                let expected = if written == whole.len() { before + 1 } else { before };
                assert_eq!(fence, expected, "after {written} bytes");
                assert!(Records::read(&copy).unwrap().next_fence(None).unwrap().get() > before);
            }
        }
    }

    #[test]
    fn a_record_does_not_overwrite_the_last_one() {
        let file = tempfile::tempfile().unwrap();
        for fence in 1..6 {
            write(&file, &record(fence, "before"));
            let at = Records::read(&file).unwrap().next;
            write(&file, &record(fence + 1, "after"));
            assert_eq!(last(&file).unwrap().fence.get(), fence + 1);
            file.write_all_at(&[0xff; 20], at).unwrap();
            assert_eq!(last(&file).unwrap().fence.get(), fence, "the record before is intact");
        }
    }

    #[test]
    fn a_fence_is_above_the_last_the_floor_and_the_clock() {
        let file = tempfile::tempfile().unwrap();
        let next = |file: &File, floor| {
            Records::read(file).unwrap().next_fence(Fence::new(floor)).map(Fence::get)
        };
        let minutes = |minutes: u64| now() + minutes * 60_000_000;
        let clock = now();
        assert!(next(&file, 0).unwrap() >= clock);
        let half_an_hour = minutes(30);
        assert_eq!(next(&file, half_an_hour).unwrap(), half_an_hour);
        // The clock was set back: fences continue from the last one.
        let far = minutes(1_000_000);
        write(&file, &record(far, "ahead"));
        assert_eq!(next(&file, 7).unwrap(), far + 1);
        assert_eq!(next(&file, far + 1).unwrap(), far + 1);
    }

    #[test]
    fn a_floor_far_ahead_of_the_clock_is_rejected_with_an_error_that_names_both() {
        let file = tempfile::tempfile().unwrap();
        let records = Records::read(&file).unwrap();
        for floor in [now() + 61 * 60_000_000, 1 << 53, u64::MAX >> 1] {
            let error = records.next_fence(Fence::new(floor)).unwrap_err().to_string();
            assert!(error.contains(&floor.to_string()) && error.contains("ahead of"), "{error}");
        }
    }

    #[test]
    fn the_highest_fence_is_followed_by_an_error() {
        let file = tempfile::tempfile().unwrap();
        write(&file, &record(u64::MAX >> 1, "the last"));
        let error = Records::read(&file).unwrap().next_fence(None).unwrap_err();
        assert!(error.to_string().contains("no fence is left"), "{error}");
    }

    #[test]
    fn invalid_content_is_no_record() {
        for content in [&b""[..], b"\n", b" \n", b"0 1\n", &[0; 1024], &[b'x'; 1024], b"\xff\n"] {
            let file = tempfile::tempfile().unwrap();
            file.write_all_at(content, 0).unwrap();
            assert_eq!(last(&file), None, "{content:?}");
        }
    }

    #[test]
    fn an_incomplete_long_name_is_written_again() {
        let file = tempfile::tempfile().unwrap();
        let length = |file: &File| file.metadata().unwrap().len();
        assert_eq!(read_name(&file).unwrap(), None);
        file.write_all_at(b"orde", NAME_AT).unwrap();
        write_name(&file, length(&file), "orders").unwrap();
        assert_eq!(read_name(&file).unwrap().as_deref(), Some("orders"));
        write_name(&file, length(&file), "orders").unwrap();
        write(&file, &record(1, "a"));
        assert_eq!(read_name(&file).unwrap().as_deref(), Some("orders"));
    }
}
