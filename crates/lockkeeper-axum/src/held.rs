//! The lock of a request, as its handler sees it.

use std::convert::Infallible;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use lockkeeper_core::{Error, ErrorKind, Fence, Guard};
use tokio_util::sync::CancellationToken;

use crate::problem::{Reason, Rejection};

/// The lock that a [`LockLayer`](crate::LockLayer) acquired for this request: an extractor for axum handlers, and an
/// extension of the request for other services.
///
/// Send its [`fence`](Self::fence) with each write. The handler need not check whether the lock is still held: its
/// future is dropped when the lock is lost.
///
/// Without a `LockLayer` around the handler, or if the layer does not apply to the request, the extractor rejects the
/// request with 500. `Option<Held>` is `None` then.
///
/// # Examples
///
/// ```
/// use lockkeeper_axum::Held;
///
/// async fn pay(held: Held) -> String {
///     format!("{} is paid under fence {:?}", held.name(), held.fence())
/// }
/// # let _ = pay;
/// ```
#[derive(Clone)]
pub struct Held(Arc<Inner>);

struct Inner {
    name: String,
    fence: Option<Fence>,
    lost: CancellationToken,
    guard: Mutex<Option<Guard>>,
    outer: Option<Held>,
}

impl Held {
    pub(crate) fn new(guard: Guard, outer: Option<Held>) -> Self {
        let (name, fence, lost) = (guard.name().to_owned(), guard.fence(), guard.lost_token());
        Self(Arc::new(Inner { name, fence, lost, guard: Mutex::new(Some(guard)), outer }))
    }

    /// Returns the name of the lock.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the fencing token, or `None` if the store has none.
    pub fn fence(&self) -> Option<Fence> {
        self.0.fence
    }

    /// Returns a token that is cancelled when the lock is lost. Pass it to tasks that the handler spawns: the layer
    /// cancels only the handler.
    pub fn lost_token(&self) -> CancellationToken {
        self.0.lost.child_token()
    }

    /// Takes the guard out of the layer: the lock is then released when the guard is dropped or released, not when the
    /// handler returns. Returns `None` if the guard was already taken, or if the handler has returned.
    ///
    /// Use it for work that outlives the handler, such as a streamed response body, and move the guard into that work.
    /// Until the handler returns, the layer cancels it if the lock is lost. After that, watch [`Guard::lost`].
    pub fn take(&self) -> Option<Guard> {
        self.slot().take()
    }

    /// Returns the lock of the enclosing `LockLayer`, if there is one.
    pub fn outer(&self) -> Option<&Held> {
        self.0.outer.as_ref()
    }

    /// Runs the service while the lock is held, even after [`take`](Self::take). Must be called before the guard is
    /// taken.
    pub(crate) async fn while_held<F: Future>(&self, work: F) -> Result<F::Output, Error> {
        // A separate statement, so that the slot is not locked while the work runs.
        let work = self.slot().as_ref().map(|guard| guard.while_held_owned(work));
        match work {
            Some(work) => work.await,
            None => Err(Error::new(ErrorKind::Lost, "the guard was taken before the service ran")),
        }
    }

    fn slot(&self) -> MutexGuard<'_, Option<Guard>> {
        self.0.guard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Held");
        debug.field("name", &self.0.name).field("fence", &self.0.fence).finish_non_exhaustive()
    }
}

/// Releases the lock when it is dropped: after a disconnect of the client or a panic of the handler. A clone of
/// [`Held`] may outlive the request and does not keep the lock.
pub(crate) struct ReleaseOnDrop(pub(crate) Held);

impl Drop for ReleaseOnDrop {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}

/// The rejection of [`Held`]: no layer acquired a lock for this request.
#[derive(Debug)]
pub struct NotHeld(());

impl fmt::Display for NotHeld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no LockLayer acquired a lock for this request")
    }
}

impl std::error::Error for NotHeld {}

impl IntoResponse for NotHeld {
    fn into_response(self) -> Response {
        tracing::error!("{self}: add one around the handler, or use Option<Held> in the handler");
        Rejection::new(Reason::Internal, None).into_response()
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Held {
    type Rejection = NotHeld;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, NotHeld> {
        parts.extensions.get::<Self>().cloned().ok_or(NotHeld(()))
    }
}

impl<S: Send + Sync> OptionalFromRequestParts<S> for Held {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned())
    }
}
