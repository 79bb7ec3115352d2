//! The lock that a request holds, for its handler.

use std::convert::Infallible;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use lockkeeper_core::{Error, ErrorKind, Fence, Guard};
use tokio_util::sync::CancellationToken;

use crate::problem::{Reason, Refusal};

/// The lock that a [`LockLayer`](crate::LockLayer) took for this request: an extractor for axum's handlers,
/// and an extension of the request for everybody else.
///
/// Send its [`fence`](Self::fence) along with whatever is written. The handler need not look whether the
/// lock is still held: it is cancelled when it is not.
///
/// Without a layer around the handler, or where the layer lets this request through, it is answered with
/// 500; `Option<Held>` is `None` then.
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

    /// The name of the lock.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The fencing token, or `None` where the store has none.
    pub fn fence(&self) -> Option<Fence> {
        self.0.fence
    }

    /// A token that is cancelled when the lock is lost, to hand to whatever the handler starts: the layer
    /// cancels the handler only.
    pub fn lost_token(&self) -> CancellationToken {
        self.0.lost.child_token()
    }

    /// Takes the guard, and with it the lock: it is given back when the guard is, and no longer when the
    /// handler ends. `None` if it was taken before, or the handler has ended.
    ///
    /// For what goes on after the handler returned, such as a body that is streamed: move the guard into it.
    /// Until the handler returns, it is cancelled if the lock is lost; after that, look at
    /// [`Guard::lost`].
    pub fn take(&self) -> Option<Guard> {
        self.slot().take()
    }

    /// The lock of the layer around this one, if there is one.
    pub fn outer(&self) -> Option<&Held> {
        self.0.outer.as_ref()
    }

    /// Runs the service while the lock is held, also after [`take`](Self::take). Must be called before the guard can be
    /// taken.
    pub(crate) async fn while_held<F: Future>(&self, work: F) -> Result<F::Output, Error> {
        // A statement of its own: the slot is not locked while the work runs.
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

/// Gives the lock back when it is dropped: when the client has gone away, and when the handler panics. Clones
/// of [`Held`] may live on somewhere.
pub(crate) struct Cover(pub(crate) Held);

impl Drop for Cover {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}

/// There is no lock for this request.
#[derive(Debug)]
pub struct NotHeld(());

impl fmt::Display for NotHeld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no LockLayer has taken a lock for this request")
    }
}

impl std::error::Error for NotHeld {}

impl IntoResponse for NotHeld {
    fn into_response(self) -> Response {
        tracing::error!(
            "{self}: put one around the handler, or let the handler take an Option<Held>"
        );
        Refusal::new(Reason::Broken, None).into_response()
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
