//! What is written in a lock file: the last fence, and who had it.
//!
//! Two lines at fixed places, written in turn by whoever holds the lock exclusively, each with a
//! checksum. A write that ends half way, because its process was killed or the disk is full, spoils the
//! older of the two at most. They are text, so that `cat` shows who holds a lock:
//!
//! ```text
//! CHECKSUM FENCE OWNER MICROSECONDS_SINCE_1970 LABEL
//! ```
//!
//! Behind them stands the name of the lock, if the file's own name is too short for it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::time::{SystemTime, UNIX_EPOCH};

use lockkeeper_core::{Fence, Label, Owner};

/// Room for a line.
const LINE: usize = 512;
/// Where a long name stands.
const NAME_AT: u64 = 2 * LINE as u64;

/// The last exclusive holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) fence: Fence,
    pub(crate) owner: Owner,
    /// When it got the lock, in microseconds since 1970.
    pub(crate) since: u64,
    pub(crate) label: Label,
}

/// What a file says, and where the next record goes.
#[derive(Debug)]
pub(crate) struct Records {
    pub(crate) last: Option<Record>,
    /// The line that does not have the last record.
    next: u64,
}

impl Records {
    /// Reads what is there. What is not whole is not there.
    pub(crate) fn read(file: &File) -> io::Result<Self> {
        let mut bytes = [0; 2 * LINE];
        let read = read_at(file, &mut bytes, 0)?;
        let (first, second) = bytes[..read].split_at(LINE.min(read));
        let (first, second) = (parse(first), parse(second));
        let fence = |record: &Option<Record>| record.as_ref().map(|record| record.fence);
        let (last, next) =
            if fence(&second) > fence(&first) { (second, 0) } else { (first, LINE as u64) };
        // Nothing at all: the first line is as good as the second, and keeps the file small.
        let next = if last.is_none() { 0 } else { next };
        Ok(Self { last, next })
    }

    /// A fence that is higher than the last, not below the floor, and higher than that of any file that
    /// stood here before: those were written at an earlier time.
    ///
    /// Fails if there is none, or if the floor is implausible.
    pub(crate) fn next_fence(&self, floor: Option<Fence>) -> io::Result<Fence> {
        self.check_floor(floor)?;
        let last = self.last.as_ref().map_or(0, |last| last.fence.get());
        let floor = floor.map_or(0, Fence::get);
        let fence = Fence::new(now().max(last + 1).max(floor));
        fence.ok_or_else(|| io::Error::other(Fence::MAX.exhausted()))
    }

    /// Refuses a floor that is too far ahead of the clock, unless the last fence was that far ahead, too: the file
    /// would keep it for good.
    pub(crate) fn check_floor(&self, floor: Option<Fence>) -> io::Result<()> {
        let Some(floor) = floor else { return Ok(()) };
        let last = self.last.as_ref().map_or(0, |last| last.fence.get());
        let (clock, ahead) = (now(), Fence::MAX_AHEAD.as_micros());
        if u128::from(floor.get()) > u128::from(clock) + ahead && floor.get() > last + 1 {
            return Err(io::Error::other(floor.refused(clock)));
        }
        Ok(())
    }

    /// Writes a record beside the last one.
    pub(crate) fn write(&self, file: &File, record: &Record) -> io::Result<()> {
        file.write_all_at(line(record).as_bytes(), self.next)
    }
}

/// Microseconds since 1970.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

fn line(record: &Record) -> String {
    let Record { fence, owner, since, label } = record;
    let text = format!("{fence} {owner} {since} {label}");
    format!("{:016x} {text}\n", checksum(text.as_bytes()))
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

/// FNV-1a: it tells a torn line from a whole one, and need not do more.
fn checksum(bytes: &[u8]) -> u64 {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// Writes a long name, unless it is there. Many may do so at the same time: they write the same.
pub(crate) fn write_name(file: &File, length: u64, name: &str) -> io::Result<()> {
    if length == NAME_AT + name.len() as u64 {
        return Ok(());
    }
    file.write_all_at(name.as_bytes(), NAME_AT)
}

/// Reads a long name.
pub(crate) fn read_name(file: &File) -> io::Result<Option<String>> {
    // A user's name has a kilobyte at most; those of combinators are a little longer.
    let mut bytes = vec![0; 4096];
    let read = read_at(file, &mut bytes, NAME_AT)?;
    bytes.truncate(read);
    Ok(String::from_utf8(bytes).ok().filter(|name| !name.is_empty()))
}

/// As much as there is.
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
    fn what_is_written_is_read_back() {
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
            assert_eq!(last(&file), Some(written), "a line is never longer than its room");
        }
    }

    #[test]
    fn a_write_torn_at_any_byte_never_sets_the_fence_back() {
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
                copy.write_all_at(&whole.as_bytes()[..written], records.next).unwrap();
                let fence = last(&copy).map_or(0, |last| last.fence.get());
                let expected = if written == whole.len() { before + 1 } else { before };
                assert_eq!(fence, expected, "after {written} bytes");
                assert!(Records::read(&copy).unwrap().next_fence(None).unwrap().get() > before);
            }
        }
    }

    #[test]
    fn a_record_is_written_beside_the_last_one_and_not_over_it() {
        let file = tempfile::tempfile().unwrap();
        for fence in 1..6 {
            write(&file, &record(fence, "before"));
            let at = Records::read(&file).unwrap().next;
            write(&file, &record(fence + 1, "after"));
            assert_eq!(last(&file).unwrap().fence.get(), fence + 1);
            file.write_all_at(&[0xff; 20], at).unwrap();
            assert_eq!(last(&file).unwrap().fence.get(), fence, "the one before is still there");
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
        // Ahead of the clock, which was set back since: fences go on from there.
        let far = minutes(1_000_000);
        write(&file, &record(far, "ahead"));
        assert_eq!(next(&file, 7).unwrap(), far + 1);
        assert_eq!(next(&file, far + 1).unwrap(), far + 1);
    }

    #[test]
    fn a_floor_far_ahead_of_the_clock_is_refused_and_names_both() {
        let file = tempfile::tempfile().unwrap();
        let records = Records::read(&file).unwrap();
        for floor in [now() + 61 * 60_000_000, 1 << 53, u64::MAX >> 1] {
            let error = records.next_fence(Fence::new(floor)).unwrap_err().to_string();
            assert!(error.contains(&floor.to_string()) && error.contains("ahead of"), "{error}");
        }
    }

    #[test]
    fn after_the_highest_fence_there_is_an_error_and_no_other() {
        let file = tempfile::tempfile().unwrap();
        write(&file, &record(u64::MAX >> 1, "the last"));
        let error = Records::read(&file).unwrap().next_fence(None).unwrap_err();
        assert!(error.to_string().contains("no fence is left"), "{error}");
    }

    #[test]
    fn rubbish_is_no_record() {
        for rubbish in [&b""[..], b"\n", b" \n", b"0 1\n", &[0; 1024], &[b'x'; 1024], b"\xff\n"] {
            let file = tempfile::tempfile().unwrap();
            file.write_all_at(rubbish, 0).unwrap();
            assert_eq!(last(&file), None, "{rubbish:?}");
        }
    }

    #[test]
    fn a_long_name_is_written_once_and_again_if_it_is_not_whole() {
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
