//! The responses to rejected requests.

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

/// The timeout for reading the holder of a lock, which delays the response.
const INSPECT_TIMEOUT: Duration = Duration::from_millis(500);

/// The headers that describe the body, removed when the body is replaced. A layer between the rejection and a
/// [`ProblemLayer`](crate::ProblemLayer) may have compressed the old body.
const BODY_HEADERS: [HeaderName; 5] =
    [CONTENT_LENGTH, CONTENT_ENCODING, CONTENT_RANGE, TRANSFER_ENCODING, ETAG];

/// An [`Error`] that converts into a response, for handlers that take locks themselves.
///
/// | kind | status |
/// |---|---|
/// | `TimedOut`: another client holds the lock | 409 Conflict, or the status set in a [`ProblemLayer`](crate::ProblemLayer) |
/// | `Unavailable`, `Undecided`, `Closed`, `Lost` | 503 Service Unavailable |
/// | `InvalidName` | 400 Bad Request |
/// | all others | 500 Internal Server Error |
///
/// The body is `application/problem+json` (RFC 9457) with the name of the lock. The error itself goes to the log, not
/// to the client. `Retry-After` requires a request to the store, so only a `ProblemLayer` adds it.
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
    /// Returns the error.
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
        Rejection::from_error(&self.0).into_response()
    }
}

/// Why a request is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    NotAcquired,
    Unavailable,
    Lost,
    BadName,
    StaleFence,
    BadFence,
    /// A mistake in the server or its configuration.
    Internal,
}

impl Reason {
    fn of(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::TimedOut => Self::NotAcquired,
            ErrorKind::Unavailable | ErrorKind::Undecided | ErrorKind::Closed => Self::Unavailable,
            ErrorKind::Lost => Self::Lost,
            ErrorKind::InvalidName => Self::BadName,
            _ => Self::Internal,
        }
    }

    fn status(self) -> StatusCode {
        match self {
            Self::NotAcquired => StatusCode::CONFLICT,
            Self::Unavailable | Self::Lost => StatusCode::SERVICE_UNAVAILABLE,
            Self::BadName | Self::BadFence => StatusCode::BAD_REQUEST,
            Self::StaleFence => StatusCode::PRECONDITION_FAILED,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Returns the members `reason` and `detail` of the response.
    fn text(self) -> (&'static str, &'static str) {
        match self {
            Self::NotAcquired => ("not_acquired", "another client holds the lock: retry later"),
            Self::Unavailable => ("unavailable", "the lock store is unavailable: retry later"),
            Self::Lost => {
                ("lost", "the lock was lost: the request was cancelled and may be partly done")
            }
            Self::BadName => ("bad_name", "the request does not contain a valid lock name"),
            Self::StaleFence => {
                ("stale_fence", "a higher fence was already accepted: acquire the lock again")
            }
            Self::BadFence => {
                ("bad_fence", "send one X-Fence header with a number from 1 to 9223372036854775807")
            }
            Self::Internal => ("internal", "the server is misconfigured: see its log"),
        }
    }
}

/// A rejected request. It is kept in the extensions of the response, so that an outer
/// [`ProblemLayer`](crate::ProblemLayer) can write the response again.
#[derive(Debug, Clone)]
pub(crate) struct Rejection {
    reason: Reason,
    name: Option<String>,
    contention: Option<Contention>,
}

/// The state of the lock, as read from the store.
#[derive(Debug, Clone)]
struct Contention {
    /// The time until the leases of the holders end.
    free_in: Option<Duration>,
    holder: Option<Label>,
}

/// How rejections are written.
#[derive(Debug, Clone)]
pub(crate) struct Format {
    pub(crate) not_acquired: StatusCode,
    pub(crate) show_holder: bool,
}

impl Default for Format {
    fn default() -> Self {
        Self { not_acquired: Reason::NotAcquired.status(), show_holder: false }
    }
}

impl Rejection {
    pub(crate) fn new(reason: Reason, name: Option<String>) -> Self {
        Self { reason, name, contention: None }
    }

    /// Creates a rejection for an error, and logs the error.
    pub(crate) fn from_error(error: &Error) -> Self {
        let reason = Reason::of(error.kind());
        match reason {
            Reason::NotAcquired => tracing::debug!(%error, "request rejected"),
            Reason::Unavailable | Reason::Lost => tracing::warn!(%error, "request rejected"),
            _ => tracing::error!(%error, "request rejected"),
        }
        Self::new(reason, error.name().map(str::to_owned))
    }

    /// Reads the state of a contended lock from the store, unless it has been read. `kind` restricts it to locks or
    /// semaphores. If the store does not answer, the response is written without it.
    pub(crate) async fn inspect(&mut self, keeper: &Keeper, kind: Option<Kind>) {
        let (Reason::NotAcquired, Some(name), None) = (self.reason, &self.name, &self.contention)
        else {
            return;
        };
        let Ok(inspect) = keeper.inspect() else { return };
        match tokio::time::timeout(INSPECT_TIMEOUT, inspect.show(name.as_str())).await {
            Ok(Ok(mut infos)) => {
                infos.retain(|info| kind.is_none_or(|kind| info.kind == kind));
                self.contention = Some(Contention::of(&infos));
            }
            Ok(Err(error)) => tracing::debug!(%error, "cannot read the holder of the lock"),
            Err(_) => tracing::debug!(name, "timed out reading the holder of the lock"),
        }
    }

    /// Writes status and headers into the head of a response, and returns the body.
    pub(crate) fn write(self, head: &mut response::Parts, format: &Format) -> Body {
        let status = match self.reason {
            Reason::NotAcquired => format.not_acquired,
            reason => reason.status(),
        };
        let (reason, detail) = self.reason.text();
        let mut body = Map::new();
        body.insert("title".to_owned(), status.canonical_reason().unwrap_or("Rejected").into());
        body.insert("status".to_owned(), status.as_u16().into());
        body.insert("reason".to_owned(), reason.into());
        body.insert("detail".to_owned(), detail.into());
        body.extend(self.name.clone().map(|name| ("lock".to_owned(), name.into())));
        let contention = self.contention.as_ref();
        if format.show_holder
            && let Some(holder) = contention.and_then(|state| state.holder.as_ref())
        {
            body.insert("holder".to_owned(), holder.as_str().into());
        }
        head.status = status;
        for header in BODY_HEADERS {
            head.headers.remove(header);
        }
        let problem = HeaderValue::from_static("application/problem+json");
        head.headers.insert(CONTENT_TYPE, problem);
        if let Some(free_in) = contention.and_then(|state| state.free_in) {
            head.headers.insert(RETRY_AFTER, whole_seconds(free_in).into());
        }
        head.extensions.insert(self);
        Body::from(Value::Object(body).to_string())
    }
}

impl IntoResponse for Rejection {
    fn into_response(self) -> Response {
        let (mut head, ()) = Response::new(()).into_parts();
        let body = self.write(&mut head, &Format::default());
        Response::from_parts(head, body)
    }
}

/// Rounds up to whole seconds, at least one: a client that retries too early is rejected again.
fn whole_seconds(duration: Duration) -> u64 {
    duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0)).max(1)
}

impl Contention {
    fn of(infos: &[LockInfo]) -> Self {
        // A lock is free when its last reader has released, a semaphore when its first holder has.
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
    fn retry_after_is_rounded_up_to_at_least_one_second() {
        let cases = [(0, 1), (1, 1), (1000, 1), (1001, 2), (29_500, 30)];
        for (millis, seconds) in cases {
            assert_eq!(whole_seconds(Duration::from_millis(millis)), seconds, "{millis}");
        }
        assert_eq!(whole_seconds(Duration::MAX), u64::MAX);
    }
}
