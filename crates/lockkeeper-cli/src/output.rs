//! Formatting of values and tables, as text and as JSON; writing to stdout and stderr.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lockkeeper::text::{is_hidden, visible};
use lockkeeper::{Kind, LockInfo, Mode, Participant};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};

use crate::failure::Failure;

/// Formats a duration in at most two units: `3m 12s`.
pub(crate) fn short_duration(time: Duration) -> String {
    let seconds = time.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match seconds {
        0 => format!("{}ms", time.as_millis()),
        1..60 => format!("{seconds}s"),
        60..3600 => format!("{minutes}m {}s", seconds % 60),
        3600..86_400 => format!("{hours}h {}m", minutes % 60),
        _ => format!("{days}d {}h", hours % 24),
    }
}

/// Returns a duration in milliseconds, as in JSON.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Returns a holder or waiter as JSON.
pub(crate) fn participant(participant: &Participant) -> Value {
    json!({
        "owner": participant.owner,
        "label": participant.label,
        "mode": participant.mode,
        "fence": participant.fence,
        "age_ms": participant.age.map(millis),
        "remaining_ms": participant.remaining.map(millis),
    })
}

/// Returns a lock as JSON.
pub(crate) fn lock(info: &LockInfo) -> Value {
    json!({
        "name": info.name,
        "kind": info.kind,
        "holders": info.holders.iter().map(participant).collect::<Vec<_>>(),
        "waiters": info.waiters.iter().map(participant).collect::<Vec<_>>(),
    })
}

fn mode(mode: Mode) -> String {
    match mode {
        Mode::Exclusive => "exclusive".to_owned(),
        Mode::Shared => "shared".to_owned(),
        Mode::Permits { take: 1, of } => format!("1 permit of {of}"),
        Mode::Permits { take, of } => format!("{take} permits of {of}"),
    }
}

/// Formats the name of a lock for a table: quoted and escaped if it contains spaces, quotes or hidden characters.
pub(crate) fn name(name: &str) -> String {
    let plain = !name.contains(|c: char| is_hidden(c) || c.is_whitespace() || c == '"');
    if plain { name.to_owned() } else { visible(&format!("{name:?}")).into_owned() }
}

/// Makes JSON safe to print on a terminal: hidden characters become escapes such as `\u202e`, which parse to the same
/// text. They occur only inside strings.
pub(crate) fn safe_json(text: String) -> String {
    if !text.contains(is_hidden) {
        return text;
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_hidden(c) {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(shown, "\\u{unit:04x}");
            }
        } else {
            shown.push(c);
        }
    }
    shown
}

/// Returns JSON as one line.
pub(crate) fn json_line(value: &Value) -> String {
    safe_json(value.to_string()) + "\n"
}

/// Colours text if stdout is a terminal that supports it and `NO_COLOR` is not set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Paint(bool);

impl Paint {
    pub(crate) fn stdout() -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|no| no.is_empty());
        let smart = std::env::var_os("TERM").is_some_and(|term| term != "dumb");
        Self(wanted && smart && io::stdout().is_terminal())
    }

    pub(crate) fn paint(self, code: &str, text: &str) -> String {
        if self.0 && !text.is_empty() {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}

pub(crate) const BOLD: &str = "1";
pub(crate) const RED: &str = "31";
pub(crate) const GREEN: &str = "32";
pub(crate) const YELLOW: &str = "33";

/// Formats rows under headings, in aligned columns.
pub(crate) fn table(headings: &[&str], rows: &[Vec<String>], paint: Paint) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([headings[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..headings.len()).map(width).collect();
    let line = |cells: &[String]| {
        let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let headings: Vec<String> = headings.iter().map(ToString::to_string).collect();
    let mut text = paint.paint(BOLD, &line(&headings)) + "\n";
    for row in rows {
        let green = row.iter().any(|cell| cell == "held");
        text += &paint.paint(if green { GREEN } else { YELLOW }, &line(row));
        text.push('\n');
    }
    text
}

/// Formats the table of locks: for each, its holders, then its waiters in queue order.
pub(crate) fn locks(infos: &[LockInfo], paint: Paint) -> String {
    let mut rows = Vec::new();
    for info in infos {
        let holders = info.holders.iter().map(|holder| ("held".to_owned(), holder));
        let waiters = info.waiters.iter().enumerate();
        let waiters = waiters.map(|(place, waiter)| (format!("waiting {}", place + 1), waiter));
        for (state, who) in holders.chain(waiters) {
            rows.push(vec![
                name(&info.name),
                state,
                mode(who.mode),
                visible(who.who()).into_owned(),
                who.age.map_or_else(|| "-".to_owned(), short_duration),
                who.remaining.map_or_else(|| "-".to_owned(), short_duration),
                who.fence.map_or_else(|| "-".to_owned(), |fence| fence.to_string()),
            ]);
        }
    }
    table(&["NAME", "STATE", "MODE", "WHO", "AGE", "LEASE", "FENCE"], &rows, paint)
}

pub(crate) fn kind(kind: Kind) -> &'static str {
    match kind {
        Kind::Lock => "lock",
        Kind::Semaphore => "semaphore",
    }
}

/// Whether the last write to stderr timed out. If so, the next write does not wait.
static STDERR_STALLED: AtomicBool = AtomicBool::new(false);
/// How long to wait until stderr is writable.
const STDERR_TIMEOUT: Duration = Duration::from_secs(1);
/// The largest write that does not block on a pipe that `poll` reports as writable.
const PIPE_BUF: usize = 4096;

/// Writes to stderr. Discards the text if stderr is not writable within [`STDERR_TIMEOUT`]: a blocked reader must not
/// delay a release or the handling of a signal.
pub(crate) fn write_stderr(text: &str) {
    let mut stderr = io::stderr().lock();
    for part in text.as_bytes().chunks(PIPE_BUF) {
        let stalled = STDERR_STALLED.load(Ordering::Relaxed);
        let timeout = if stalled { Duration::ZERO } else { STDERR_TIMEOUT };
        let timeout = Timespec::try_from(timeout).ok();
        let mut fds = [PollFd::new(&stderr, PollFlags::OUT)];
        let writable = matches!(poll(&mut fds, timeout.as_ref()), Ok(1..));
        STDERR_STALLED.store(!writable, Ordering::Relaxed);
        if !writable || stderr.write_all(part).is_err() {
            return;
        }
    }
}

/// Returns whether the reader of stdout has closed it.
pub(crate) fn is_stdout_closed() -> bool {
    let stdout = io::stdout();
    let mut fds = [PollFd::new(&stdout, PollFlags::empty())];
    let no_wait = Timespec::default();
    let ready = matches!(poll(&mut fds, Some(&no_wait)), Ok(1..));
    ready && fds[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
}

/// Writes to stdout. A reader that has closed it, such as `head`, is not a failure.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::output(&error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_shown_in_two_units_at_most() {
        let shown = |seconds| short_duration(Duration::from_secs(seconds));
        assert_eq!(short_duration(Duration::from_millis(250)), "250ms");
        assert_eq!(shown(59), "59s");
        assert_eq!(shown(192), "3m 12s");
        assert_eq!(shown(7320), "2h 2m");
        assert_eq!(shown(100_000), "1d 3h");
    }

    #[test]
    fn names_with_spaces_or_hidden_characters_are_quoted() {
        for plain in ["orders/42", r"a\u{202e}", "日本"] {
            assert_eq!(name(plain), plain);
        }
        assert_eq!(name("a b"), r#""a b""#);
        assert_eq!(name("a\u{202e}"), r#""a\u{202e}""#);
        assert_eq!(name("a\u{fe0f}b"), r#""a\u{fe0f}b""#);
        assert_eq!(name("\\ \x1b"), r#""\\ \u{1b}""#, "a literal backslash is escaped, too");
    }

    #[test]
    fn hidden_characters_in_json_are_escaped_and_parse_to_the_same_text() {
        let value = json!({ "a\u{202e}": "\u{1b}\u{9b}\u{7f}\u{e0041}é\\" });
        let text = json_line(&value);
        assert_eq!(text, "{\"a\\u202e\":\"\\u001b\\u009b\\u007f\\udb40\\udc41é\\\\\"}\n");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }
}
