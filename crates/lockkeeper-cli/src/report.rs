//! What is told while a lock is waited for and held, on stderr.

use std::io::{self, IsTerminal as _};
use std::time::Duration;

use lockkeeper::text::visible;
use lockkeeper::{Guard, Kind, LockInfo, Owner, Participant};
use rustix::termios::{tcgetpgrp, tcgetwinsize};
use serde_json::{Value, json};

use crate::child::Status;
use crate::failure::Failure;
use crate::output::{self, millis, span};
use crate::terminal::own_group;

/// How things are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    /// Only failures.
    Quiet,
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// Tells.
pub(crate) struct Reporter {
    style: Style,
    name: String,
    /// Whether a line is on the terminal that the next one replaces.
    live: bool,
    waited: bool,
}

/// What a waiter sees of the others.
pub(crate) struct Sight {
    holders: Vec<Participant>,
    /// How many wait before us, if the store knows.
    ahead: Option<usize>,
}

impl Sight {
    /// What is to be seen of the locks of one name, for a waiter for one kind of them.
    pub(crate) fn new(infos: Vec<LockInfo>, kind: Kind, us: &[Owner]) -> Self {
        let Some(info) = infos.into_iter().find(|info| info.kind == kind) else {
            return Self { holders: Vec::new(), ahead: None };
        };
        let is_us = |waiter: &Participant| waiter.owner.is_some_and(|owner| us.contains(&owner));
        let ahead = info.waiters.iter().position(is_us);
        Self { holders: info.holders, ahead }
    }

    pub(crate) fn describe(&self) -> String {
        let mut text = match self.holders.as_slice() {
            [] => return "others hold it".to_owned(),
            [one] => format!("held by {}", one.who()),
            [one, rest @ ..] => format!("held by {} and {} more", one.who(), rest.len()),
        };
        if let Some(age) = self.holders.first().and_then(|holder| holder.age) {
            text = format!("{text} for {}", span(age));
        }
        match self.ahead {
            None => text,
            Some(0) => format!("{text}, next in line"),
            Some(ahead) => format!("{text}, {ahead} ahead"),
        }
    }
}

impl Reporter {
    pub(crate) fn new(style: Style, name: &str) -> Self {
        Self { style, name: name.to_owned(), live: false, waited: false }
    }

    /// Whether what is told of waiting changes as time goes by.
    pub(crate) fn is_live(&self) -> bool {
        self.style == Style::Text && may_redraw()
    }

    /// Others hold the lock.
    pub(crate) fn waiting(&mut self, sight: &Sight, waited: Duration) {
        let first = !self.waited;
        self.waited = true;
        match self.style {
            Style::Json if first => {
                let holders: Vec<Value> = sight.holders.iter().map(output::participant).collect();
                self.event("waiting", json!({ "holders": holders, "ahead": sight.ahead }));
            }
            Style::Text if self.is_live() => {
                let text = sight.describe();
                let line = format!("waiting {} for {:?}: {text}", span(waited), self.name);
                let width = tcgetwinsize(io::stderr()).map_or(0, |size| size.ws_col);
                // Some terminals do not know.
                let width = if width == 0 { 80 } else { width };
                let line = cut(&visible(&line), usize::from(width) - 1);
                output::tell(&format!("\r\x1b[K{line}"));
                self.live = true;
            }
            Style::Text if first => {
                say(&format!("waiting for {:?}: {}", self.name, sight.describe()));
            }
            Style::Text | Style::Json | Style::Quiet => {}
        }
    }

    /// The lock is ours.
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
                say(&format!("acquired {:?} after {}", self.name, span(waited)));
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

    /// Something that the user should know, and that does not change the end.
    pub(crate) fn warn(&self, message: &str) {
        match self.style {
            Style::Json => self.event("warning", json!({ "message": message })),
            Style::Text | Style::Quiet => say(message),
        }
    }

    pub(crate) fn failed(&mut self, failure: &Failure) {
        self.clear();
        match self.style {
            Style::Json => {
                let Failure { code, kind, message } = failure;
                self.event("failed", json!({ "code": code, "kind": kind, "message": message }));
            }
            Style::Text | Style::Quiet => say(&failure.to_string()),
        }
    }

    /// Removes the live line.
    pub(crate) fn clear(&mut self) {
        if std::mem::take(&mut self.live) {
            output::tell("\r\x1b[K");
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
        output::tell(&output::json_line(&line));
    }
}

/// Tells people something, in a line of its own. What a terminal would obey, or not show, is escaped.
pub(crate) fn say(message: &str) {
    output::tell(&format!("lockkeeper: {}\n", visible(message)));
}

/// Whether a line on stderr can be replaced: on a terminal that can, in whose foreground we are.
fn may_redraw() -> bool {
    let stderr = io::stderr();
    let smart = std::env::var_os("TERM").is_some_and(|term| !term.is_empty() && term != "dumb");
    smart
        && stderr.is_terminal()
        && tcgetpgrp(&stderr).is_ok_and(|group| own_group() == Some(group))
}

/// As much of a line as fits. What is not ASCII may take two columns.
fn cut(line: &str, width: usize) -> String {
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
    fn a_line_is_cut_to_the_width_of_the_terminal() {
        assert_eq!(cut("abcdef", 6), "abcdef");
        assert_eq!(cut("abcdef", 3), "abc");
        assert_eq!(cut("a🔒b", 3), "a🔒");
        assert_eq!(cut("a🔒b", 2), "a");
    }
}
