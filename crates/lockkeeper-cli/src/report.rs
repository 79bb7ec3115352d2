//! Messages and events on stderr while `run` and `acquire` wait for and hold a lock.

use std::io::{self, IsTerminal as _};
use std::time::Duration;

use lockkeeper::text::visible;
use lockkeeper::{Guard, Kind, LockInfo, Owner, Participant};
use rustix::termios::{tcgetpgrp, tcgetwinsize};
use serde_json::{Value, json};

use crate::child::Status;
use crate::failure::Failure;
use crate::output::{self, millis, short_duration};
use crate::terminal::own_group;

/// The format of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    /// Text, without waiting messages.
    Quiet,
    Text,
    /// One JSON object per line.
    Json,
}

/// Prints the messages and events about one lock.
pub(crate) struct Reporter {
    style: Style,
    name: String,
    /// Whether the terminal shows a waiting line, which the next message replaces.
    live: bool,
    /// Whether a wait was reported.
    waited: bool,
}

/// The holders of a lock and the position of this process in its queue.
pub(crate) struct Contention {
    holders: Vec<Participant>,
    /// The number of waiters ahead of this process, if the store knows it.
    ahead: Option<usize>,
}

impl Contention {
    /// Selects the lock of one kind among the locks of one name. `own` are the owners of this process's waiters.
    pub(crate) fn new(infos: Vec<LockInfo>, kind: Kind, own: &[Owner]) -> Self {
        let Some(info) = infos.into_iter().find(|info| info.kind == kind) else {
            return Self { holders: Vec::new(), ahead: None };
        };
        let is_own = |waiter: &Participant| waiter.owner.is_some_and(|owner| own.contains(&owner));
        let ahead = info.waiters.iter().position(is_own);
        Self { holders: info.holders, ahead }
    }

    pub(crate) fn describe(&self) -> String {
        let mut text = match self.holders.as_slice() {
            [] => return "held by another process".to_owned(),
            [one] => format!("held by {}", one.who()),
            [one, rest @ ..] => format!("held by {} and {} more", one.who(), rest.len()),
        };
        if let Some(age) = self.holders.first().and_then(|holder| holder.age) {
            text = format!("{text} for {}", short_duration(age));
        }
        match self.ahead {
            None => text,
            Some(0) => format!("{text}, next in line"),
            Some(1) => format!("{text}, 1 waiter ahead"),
            Some(ahead) => format!("{text}, {ahead} waiters ahead"),
        }
    }
}

impl Reporter {
    pub(crate) fn new(style: Style, name: &str) -> Self {
        Self { style, name: name.to_owned(), live: false, waited: false }
    }

    /// Returns whether a waiting line is redrawn during the wait.
    pub(crate) fn is_live(&self) -> bool {
        self.style == Style::Text && may_redraw()
    }

    /// Reports that the lock is contended. Only the first call prints, unless the waiting line is live.
    pub(crate) fn waiting(&mut self, contention: &Contention, waited: Duration) {
        let first = !self.waited;
        self.waited = true;
        match self.style {
            Style::Json if first => {
                let holders = contention.holders.iter().map(output::participant);
                let details =
                    json!({ "holders": holders.collect::<Vec<_>>(), "ahead": contention.ahead });
                self.event("waiting", details);
            }
            Style::Text if self.is_live() => {
                let text = contention.describe();
                let line =
                    format!("waiting {} for {:?}: {text}", short_duration(waited), self.name);
                let width = tcgetwinsize(io::stderr()).map_or(0, |size| size.ws_col);
                // Some terminals report a width of 0.
                let width = if width == 0 { 80 } else { width };
                let line = truncate(&visible(&line), usize::from(width) - 1);
                output::write_stderr(&format!("\r\x1b[K{line}"));
                self.live = true;
            }
            Style::Text if first => {
                message(&format!("waiting for {:?}: {}", self.name, contention.describe()));
            }
            Style::Text | Style::Json | Style::Quiet => {}
        }
    }

    /// Reports the grant. As text, only after a wait.
    pub(crate) fn acquired(&mut self, guard: &Guard, waited: Duration) {
        self.clear();
        match self.style {
            Style::Json => self.event(
                "acquired",
                json!({
                    "fence": guard.fence(), "owner": guard.owner(), "label": guard.label(),
                    "waited_ms": millis(waited),
                }),
            ),
            Style::Text if self.waited => {
                message(&format!("acquired {:?} after {}", self.name, short_duration(waited)));
            }
            Style::Text | Style::Quiet => {}
        }
    }

    pub(crate) fn started(&self, pid: i32) {
        self.event("started", json!({ "pid": pid }));
    }

    pub(crate) fn exited(&self, status: Status) {
        let (code, signal) = match status {
            Status::Exited(code) => (Some(code), None),
            Status::Killed(signal) | Status::Stopped(signal) => (None, Some(signal)),
        };
        self.event("exited", json!({ "code": code, "signal": signal }));
    }

    pub(crate) fn released(&self) {
        self.event("released", json!({}));
    }

    /// Prints a warning, which does not change the exit code.
    pub(crate) fn warn(&self, text: &str) {
        match self.style {
            Style::Json => self.event("warning", json!({ "message": text })),
            Style::Text | Style::Quiet => message(text),
        }
    }

    pub(crate) fn failed(&mut self, failure: &Failure) {
        self.clear();
        match self.style {
            Style::Json => {
                let Failure { code, kind, message } = failure;
                self.event("failed", json!({ "code": code, "kind": kind, "message": message }));
            }
            Style::Text | Style::Quiet => self::message(&failure.to_string()),
        }
    }

    /// Removes the waiting line from the terminal.
    pub(crate) fn clear(&mut self) {
        if std::mem::take(&mut self.live) {
            output::write_stderr("\r\x1b[K");
        }
    }

    fn event(&self, event: &str, details: Value) {
        if self.style != Style::Json {
            return;
        }
        let mut line = json!({ "event": event, "name": self.name });
        if let (Value::Object(line), Value::Object(details)) = (&mut line, details) {
            line.extend(details);
        }
        output::write_stderr(&output::json_line(&line));
    }
}

/// Prints a line of text on stderr, with control and invisible characters escaped.
pub(crate) fn message(text: &str) {
    output::write_stderr(&format!("lockkeeper: {}\n", visible(text)));
}

/// Returns whether a line on stderr can be redrawn: it is a terminal that supports it, and this process is in its
/// foreground.
fn may_redraw() -> bool {
    let stderr = io::stderr();
    let smart = std::env::var_os("TERM").is_some_and(|term| !term.is_empty() && term != "dumb");
    smart
        && stderr.is_terminal()
        && tcgetpgrp(&stderr).is_ok_and(|group| own_group() == Some(group))
}

/// Truncates a line to a width, counting two columns for each character outside ASCII.
fn truncate(line: &str, width: usize) -> String {
    let mut used = 0;
    let fits = line.chars().take_while(|c| {
        used += if c.is_ascii() { 1 } else { 2 };
        used <= width
    });
    fits.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_truncated_to_the_width_of_the_terminal() {
        assert_eq!(truncate("abcdef", 6), "abcdef");
        assert_eq!(truncate("abcdef", 3), "abc");
        assert_eq!(truncate("a🔒b", 3), "a🔒");
        assert_eq!(truncate("a🔒b", 2), "a");
    }
}
