//! What is answered when a request is refused.

use std::fmt;
use std::time::Duration;

use axum::body::Body;
use axum::http::header::{
    CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderName, RETRY_AFTER,
    TRANSFER_ENCODING,
};
use axum::http::{HeaderValue, StatusCode, response};
use axum::response::{IntoResponse, Response};
use lockkeeper_core::{Error, ErrorKind, Keeper, Kind, Label, LockInfo};
use serde_json::{Map, Value};

/// How long a look at who holds a lock may take. Whoever was refused is waiting for the answer.
const LOOK_WITHIN: Duration = Duration::from_millis(500);

/// What a response says of the body that it had. A layer between the refusal and a
/// [`ProblemLayer`](crate::ProblemLayer) may have compressed that one: a client that believed it of the new
/// body could not read it.
const OF_THE_OLD_BODY: [HeaderName; 5] =
    [CONTENT_LENGTH, CONTENT_ENCODING, CONTENT_RANGE, TRANSFER_ENCODING, ETAG];

/// An [`Error`] as a response, for handlers that take locks themselves.
///
/// | kind | status |
/// |---|---|
/// | `TimedOut`: others hold the lock | 409 Conflict, or what a [`ProblemLayer`](crate::ProblemLayer) says |
/// | `Unavailable`, `Undecided`, `Closed`, `Lost` | 503 Service Unavailable |
/// | `InvalidName` | 400 Bad Request |
/// | all else | 500 Internal Server Error |
///
/// The body is `application/problem+json` (RFC 9457) with the name of the lock. What went wrong in detail
/// goes to the log, not to the client. `Retry-After` takes a look into the store, so it is the
/// `ProblemLayer` that adds it.
///
/// # Examples
///
/// ```
/// use axum::{Router, extract::State, routing::post};
/// use lockkeeper::{Keeper, Memory};
/// use lockkeeper_axum::{LockError, ProblemLayer};
/// use std::time::Duration;
///
/// async fn report(State(keeper): State<Keeper>) -> Result<String, LockError> {
///     let guard = keeper.mutex("report").max_wait(Duration::ZERO).lock().await?;
///     let report = guard.while_held(async { "all is well".to_owned() }).await?;
///     guard.release().await?;
///     Ok(report)
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let keeper = Keeper::new(Memory::new());
/// let app: Router = Router::new()
///     .route("/report", post(report))
///     .layer(ProblemLayer::new(keeper.clone()))
///     .with_state(keeper);
/// # let _ = app;
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct LockError(Error);

impl LockError {
    /// The error itself.
    pub fn into_inner(self) -> Error {
        self.0
    }
}

impl From<Error> for LockError {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for LockError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.0)
    }
}

impl IntoResponse for LockError {
    fn into_response(self) -> Response {
        Refusal::from_error(&self.0).into_response()
    }
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    NotAcquired,
    Unavailable,
    Lost,
    BadName,
    StaleFence,
    BadFence,
    /// A fault on this side.
    Broken,
}

impl Reason {
    fn of(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::TimedOut => Self::NotAcquired,
            ErrorKind::Unavailable | ErrorKind::Undecided | ErrorKind::Closed => Self::Unavailable,
            ErrorKind::Lost => Self::Lost,
            ErrorKind::InvalidName => Self::BadName,
            _ => Self::Broken,
        }
    }

    fn status(self) -> StatusCode {
        match self {
            Self::NotAcquired => StatusCode::CONFLICT,
            Self::Unavailable | Self::Lost => StatusCode::SERVICE_UNAVAILABLE,
            Self::BadName | Self::BadFence => StatusCode::BAD_REQUEST,
            Self::StaleFence => StatusCode::PRECONDITION_FAILED,
            Self::Broken => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// For programs, and for people.
    fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::NotAcquired => ("not_acquired", "others hold the lock"),
            Self::Unavailable => ("unavailable", "the locks cannot be reached at the moment"),
            Self::Lost => {
                ("lost", "the lock was lost: what was asked for may have been done by halves")
            }
            Self::BadName => ("bad_name", "the path is not one that can be locked"),
            Self::StaleFence => ("stale_fence", "a request with a higher fence came before"),
            Self::BadFence => ("bad_fence", "one X-Fence header is needed: a number from 1 up"),
            Self::Broken => ("internal", "the server is not set up as it should be"),
        }
    }
}

/// A request that is refused, and what is known about it. It travels in the extensions of the response, so
/// that a [`ProblemLayer`](crate::ProblemLayer) further out can word it otherwise.
#[derive(Debug, Clone)]
pub(crate) struct Refusal {
    reason: Reason,
    name: Option<String>,
    sight: Option<Sight>,
}

/// What a look into the store showed.
#[derive(Debug, Clone)]
struct Sight {
    /// When the lock may be free.
    free_in: Option<Duration>,
    holder: Option<Label>,
}

/// How refusals are worded.
#[derive(Debug, Clone)]
pub(crate) struct Wording {
    pub(crate) not_acquired: StatusCode,
    pub(crate) holder: bool,
}

impl Default for Wording {
    fn default() -> Self {
        Self { not_acquired: Reason::NotAcquired.status(), holder: false }
    }
}

impl Refusal {
    pub(crate) fn new(reason: Reason, name: Option<String>) -> Self {
        Self { reason, name, sight: None }
    }

    /// A refusal because of an error, of which the log is told more.
    pub(crate) fn from_error(error: &Error) -> Self {
        let reason = Reason::of(error.kind());
        match reason {
            Reason::NotAcquired => tracing::debug!(%error, "request refused"),
            Reason::Unavailable | Reason::Lost => tracing::warn!(%error, "request refused"),
            _ => tracing::error!(%error, "request refused"),
        }
        Self::new(reason, error.name().map(str::to_owned))
    }

    /// Looks who holds the lock, if that is why and nobody has looked. What cannot be seen is left out, and
    /// what is of another kind than was asked for, if that is known.
    pub(crate) async fn look(&mut self, keeper: &Keeper, kind: Option<Kind>) {
        let (Reason::NotAcquired, Some(name), None) = (self.reason, &self.name, &self.sight) else {
            return;
        };
        let Ok(inspect) = keeper.inspect() else { return };
        match tokio::time::timeout(LOOK_WITHIN, inspect.show(name.as_str())).await {
            Ok(Ok(mut infos)) => {
                infos.retain(|info| kind.is_none_or(|kind| info.kind == kind));
                self.sight = Some(Sight::of(&infos));
            }
            Ok(Err(error)) => tracing::debug!(%error, "who holds the lock is not known"),
            Err(_) => tracing::debug!(name, "who holds the lock is not known in time"),
        }
    }

    /// Puts itself in the place of what a response said.
    pub(crate) fn write(self, head: &mut response::Parts, wording: &Wording) -> Body {
        let status = match self.reason {
            Reason::NotAcquired => wording.not_acquired,
            reason => reason.status(),
        };
        let (reason, detail) = self.reason.words();
        let mut body = Map::new();
        body.insert("title".to_owned(), status.canonical_reason().unwrap_or("Refused").into());
        body.insert("status".to_owned(), status.as_u16().into());
        body.insert("reason".to_owned(), reason.into());
        body.insert("detail".to_owned(), detail.into());
        body.extend(self.name.clone().map(|name| ("lock".to_owned(), name.into())));
        let sight = self.sight.as_ref();
        if wording.holder
            && let Some(holder) = sight.and_then(|sight| sight.holder.as_ref())
        {
            body.insert("holder".to_owned(), holder.as_str().into());
        }
        head.status = status;
        for header in OF_THE_OLD_BODY {
            head.headers.remove(header);
        }
        let problem = HeaderValue::from_static("application/problem+json");
        head.headers.insert(CONTENT_TYPE, problem);
        if let Some(free_in) = sight.and_then(|sight| sight.free_in) {
            head.headers.insert(RETRY_AFTER, whole_seconds(free_in).into());
        }
        head.extensions.insert(self);
        Body::from(Value::Object(body).to_string())
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let (mut head, ()) = Response::new(()).into_parts();
        let body = self.write(&mut head, &Wording::default());
        Response::from_parts(head, body)
    }
}

/// Rounded up: whoever comes back a moment too early is refused again.
fn whole_seconds(duration: Duration) -> u64 {
    duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0)).max(1)
}

impl Sight {
    fn of(infos: &[LockInfo]) -> Self {
        // A lock is free when the last of its readers is gone, a semaphore when the first is.
        let ends = infos.iter().filter_map(|info| {
            let ends = info.holders.iter().filter_map(|holder| holder.remaining);
            match info.kind {
                Kind::Lock => ends.max(),
                Kind::Semaphore => ends.min(),
            }
        });
        let mut holders = infos.iter().flat_map(|info| &info.holders);
        Self { free_in: ends.max(), holder: holders.next().and_then(|holder| holder.label.clone()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_told_in_whole_seconds_and_never_as_none() {
        let cases = [(0, 1), (1, 1), (1000, 1), (1001, 2), (29_500, 30)];
        for (millis, seconds) in cases {
            assert_eq!(whole_seconds(Duration::from_millis(millis)), seconds, "{millis}");
        }
        assert_eq!(whole_seconds(Duration::MAX), u64::MAX);
    }
}
