//! The one error type.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::loss::LossReason;
use crate::text::visible;

/// The result of everything that can fail here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, where, and with which lock.
///
/// Cheap to clone and one word wide. The message is one line in the order store, operation, name,
/// cause: `redis: renew "orders/42": connection refused`. Control characters and invisible characters in it, which a
/// server may have sent, are shown escaped: `\u{1b}`.
///
/// Contention is not an error: `try_` methods answer `None`. Only running out of `max_wait` is one. A quorum whose vote
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

/// What kind of thing went wrong: what to match on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The store did not answer, or answered that it cannot.
    Unavailable,
    /// Others held the lock for all of `max_wait`.
    TimedOut,
    /// The store could not decide who gets the lock: several clients asked at the same moment, and none was seen to get
    /// it in repeated rounds. A quorum answers so if votes stay split (a holder may still have a majority if one of its
    /// nodes did not answer), and [`Slots`](crate::Slots) if a process died while it tried for several permits.
    Undecided,
    /// The lock was held and is no more.
    Lost,
    /// The store cannot do this.
    Unsupported,
    /// The name is empty, too long or contains NUL.
    InvalidName,
    /// An option is out of its range, or contradicts another.
    InvalidOption,
    /// The surroundings are wrong: a bad URL, a missing feature, no runtime.
    Config,
    /// The keeper has been closed, or its runtime shut down.
    Closed,
}

impl Error {
    /// An error of a kind, with its cause in words: lower case, one line, and what to do where
    /// something can be done. The engine adds store, operation and name.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let message = message.into();
        let (place, name, waited, loss, source) = (None, None, None, None, None);
        Self(Arc::new(Inner { kind, place, name, message, waited, loss, source }))
    }

    /// The error that caused this one. Its text should stand in the message already.
    #[must_use]
    pub fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.0).source = Some(Arc::new(source));
        self
    }

    /// Says where it happened, unless that was said before.
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

    /// Names the store and the operation that failed, unless the error names them already. For operations on no lock in
    /// particular, such as connecting.
    #[must_use]
    pub fn during(mut self, store: &'static str, operation: &'static str) -> Self {
        if self.0.place.is_none() {
            Arc::make_mut(&mut self.0).place = Some((store, operation));
        }
        self
    }

    pub(crate) fn timed_out(waited: Duration) -> Self {
        let message = format!("not acquired within {waited:.1?}: others hold it");
        let mut error = Self::new(ErrorKind::TimedOut, message);
        Arc::make_mut(&mut error.0).waited = Some(waited);
        error
    }

    pub(crate) fn undecided(after: Duration) -> Self {
        let message = format!(
            "undecided after {after:.1?}: several clients asked at the same moment, and none was seen to get the lock; \
             try again"
        );
        Self::new(ErrorKind::Undecided, message)
    }

    pub(crate) fn lost(reason: LossReason) -> Self {
        let mut error = Self::new(ErrorKind::Lost, format!("the lock is lost: {reason}"));
        Arc::make_mut(&mut error.0).loss = Some(reason);
        error
    }

    /// A ticket that could not be adopted. The store has no hold that matches it, and cannot say since when.
    pub(crate) fn no_such_hold() -> Self {
        let message = "the lock is lost: its lease expired, or the ticket is not that of a hold";
        Self::new(ErrorKind::Lost, message)
    }

    pub(crate) fn no_answer(within: Duration) -> Self {
        let message = format!("no answer from the store within {within:.1?}");
        Self::new(ErrorKind::Unavailable, message)
    }

    pub(crate) fn unsupported(what: &str) -> Self {
        Self::new(ErrorKind::Unsupported, format!("this store has no {what}"))
    }

    /// What kind of thing went wrong.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether the same call may succeed later without anything being changed.
    pub fn is_retryable(&self) -> bool {
        let kind = self.0.kind;
        matches!(kind, ErrorKind::Unavailable | ErrorKind::TimedOut | ErrorKind::Undecided)
    }

    /// How long was waited, if the kind is [`ErrorKind::TimedOut`].
    pub fn waited(&self) -> Option<Duration> {
        self.0.waited
    }

    /// Why the lock was lost, if the kind is [`ErrorKind::Lost`]. `None` if a ticket could not be adopted: the store
    /// does not know whether its lease expired or was broken, or whether there ever was such a hold.
    pub fn loss_reason(&self) -> Option<LossReason> {
        self.0.loss
    }

    /// The lock that it was about, where there is one.
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
        // A server's own words may stand in it, and a terminal would obey them.
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
