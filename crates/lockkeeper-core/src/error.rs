//! The error type of all crates.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::loss::LossReason;
use crate::text::visible;

/// A result with [`Error`] as the default error type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a store, an operation and a lock.
///
/// Cheap to clone, and the size of a pointer. The message is one line in the order store, operation, name, cause:
/// `redis: renew "orders/42": connection refused`. Control characters and invisible characters, which a server may have
/// sent, are escaped: `\u{1b}`.
///
/// Contention is not an error: `try_` methods return `None`. Only the end of `max_wait` is an error. A quorum whose vote
/// stays split has not found contention: that is [`ErrorKind::Undecided`].
#[derive(Clone)]
pub struct Error(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    place: Option<(&'static str, &'static str)>,
    name: Option<Arc<str>>,
    message: String,
    waited: Option<Duration>,
    loss: Option<LossReason>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

/// The kind of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The store did not answer, or cannot serve the request at present.
    Unavailable,
    /// Other clients held the lock for all of `max_wait`.
    TimedOut,
    /// The store could not decide which client gets the lock: several attempted at the same time, and in repeated rounds
    /// none was granted the lock. Returned by a quorum if votes stay split (a holder may still have a majority if one of
    /// its nodes did not answer), and by [`Slots`](crate::Slots) if a process died while it acquired several permits.
    Undecided,
    /// The lock was held, and was lost.
    Lost,
    /// The store does not support the operation.
    Unsupported,
    /// The name is empty, too long or contains NUL.
    InvalidName,
    /// An option is out of range, or contradicts another.
    InvalidOption,
    /// The configuration or the environment is wrong: a bad URL, a missing feature, no runtime.
    Config,
    /// The keeper has been closed, or its runtime has been shut down.
    Closed,
}

impl Error {
    /// Creates an error. The message states the cause and, if possible, the remedy, on one line in lower case. The engine
    /// adds store, operation and name.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let message = message.into();
        let (place, name, waited, loss, source) = (None, None, None, None, None);
        Self(Arc::new(Inner { kind, place, name, message, waited, loss, source }))
    }

    /// Sets the error that caused this one. The message should already contain its text.
    #[must_use]
    pub fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.0).source = Some(Arc::new(source));
        self
    }

    /// Adds the store, the operation and the name, unless the error has them already.
    #[must_use]
    pub(crate) fn at(
        mut self,
        store: &'static str,
        operation: &'static str,
        name: impl Into<Arc<str>>,
    ) -> Self {
        if self.0.place.is_none() {
            let inner = Arc::make_mut(&mut self.0);
            inner.place = Some((store, operation));
            inner.name = Some(name.into());
        }
        self
    }

    /// Adds the store and the operation, unless the error has them already. For operations without a lock, such as
    /// connecting.
    #[must_use]
    pub fn during(mut self, store: &'static str, operation: &'static str) -> Self {
        if self.0.place.is_none() {
            Arc::make_mut(&mut self.0).place = Some((store, operation));
        }
        self
    }

    pub(crate) fn timed_out(waited: Duration) -> Self {
        let message = format!("not acquired within {waited:.1?}: other clients hold it");
        let mut error = Self::new(ErrorKind::TimedOut, message);
        Arc::make_mut(&mut error.0).waited = Some(waited);
        error
    }

    pub(crate) fn undecided(after: Duration) -> Self {
        let message = format!(
            "undecided after {after:.1?}: several clients attempted at the same time, and none was granted the lock; \
             try again"
        );
        Self::new(ErrorKind::Undecided, message)
    }

    pub(crate) fn lost(reason: LossReason) -> Self {
        let mut error = Self::new(ErrorKind::Lost, format!("the lock is lost: {reason}"));
        Arc::make_mut(&mut error.0).loss = Some(reason);
        error
    }

    /// Creates the error of a ticket without a matching hold in the store. The reason is unknown.
    pub(crate) fn no_such_hold() -> Self {
        let message = "the lock is lost: its lease expired, or the ticket does not match a hold";
        Self::new(ErrorKind::Lost, message)
    }

    pub(crate) fn no_answer(within: Duration) -> Self {
        let message = format!("no answer from the store within {within:.1?}");
        Self::new(ErrorKind::Unavailable, message)
    }

    pub(crate) fn unsupported(what: &str) -> Self {
        Self::new(ErrorKind::Unsupported, format!("this store does not support {what}"))
    }

    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns whether the same call may succeed later.
    pub fn is_retryable(&self) -> bool {
        let kind = self.0.kind;
        matches!(kind, ErrorKind::Unavailable | ErrorKind::TimedOut | ErrorKind::Undecided)
    }

    /// Returns how long the acquire waited, if the kind is [`ErrorKind::TimedOut`].
    pub fn waited(&self) -> Option<Duration> {
        self.0.waited
    }

    /// Returns why the lock was lost, if the kind is [`ErrorKind::Lost`]. `None` if a ticket could not be adopted: the
    /// store does not know whether the hold expired, was broken or ever existed.
    pub fn loss_reason(&self) -> Option<LossReason> {
        self.0.loss
    }

    /// Returns the name of the lock, if the error is about one.
    pub fn name(&self) -> Option<&str> {
        self.0.name.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0.place, &self.0.name) {
            (Some((store, operation)), Some(name)) => write!(f, "{store}: {operation} {name:?}: ")?,
            (Some((store, operation)), None) => write!(f, "{store}: {operation}: ")?,
            (None, _) => {}
        }
        // The message may contain text from a server, which a terminal would interpret.
        f.write_str(&visible(&self.0.message))
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({:?})", self.0.kind, self.to_string())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_ref().map(|source| &**source as _)
    }
}
