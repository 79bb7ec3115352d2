//! Captured log lines, for tests that check them.
//!
//! ```
//! use lockkeeper_testkit::log::Log;
//!
//! let log = Log::start();
//! tracing::warn!(fence = 7, "the lock is lost");
//! assert_eq!(log.lines(), ["WARN the lock is lost fence=7"]);
//! ```

use std::fmt::{self, Write as _};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::DefaultGuard;
use tracing::{Dispatch, Event, Metadata, Subscriber};

/// Captures everything that `tracing` logs on this thread, for as long as it lives.
///
/// Capturing is per thread, so that concurrent tests do not see each other's lines. A test that checks the log of
/// its tasks must run them on its own thread, as `#[tokio::test]` does.
pub struct Log {
    lines: Lines,
    _subscribed: DefaultGuard,
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl Log {
    /// Starts capturing.
    pub fn start() -> Self {
        // While only one subscriber is registered, `tracing` caches for all threads whether the subscriber of the thread
        // that first reaches a callsite is interested. A thread without a subscriber would disable the callsite. With a
        // second registered subscriber it does not.
        static ANOTHER: OnceLock<Dispatch> = OnceLock::new();
        ANOTHER.get_or_init(|| Dispatch::new(Lines::default()));
        let lines = Lines::default();
        let subscribed = tracing::subscriber::set_default(lines.clone());
        Self { lines, _subscribed: subscribed }
    }

    /// Returns the lines logged so far: level, message, fields.
    pub fn lines(&self) -> Vec<String> {
        self.lines.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns how many lines contain all of these parts.
    pub fn count(&self, parts: &[&str]) -> usize {
        let has_all = |line: &&String| parts.iter().all(|part| line.contains(part));
        self.lines().iter().filter(has_all).count()
    }

    /// Asserts that a line contains all of these parts.
    ///
    /// # Panics
    ///
    /// If none does. The message shows all captured lines.
    #[track_caller]
    pub fn assert_has(&self, parts: &[&str]) {
        assert!(self.count(parts) > 0, "no line with {parts:?} in {:#?}", self.lines());
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.lines()).finish()
    }
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event()
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        let line = format!("{} {}{}", event.metadata().level(), line.message, line.fields);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
