//! The runtime of `#[locked]`: the functions that its expansion calls. Not a public API.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::blocking_runtime::block_on;
use crate::contract::Mode;
use crate::engine::context::KeeperContext;
use crate::error::{Error, Result};
use crate::locks::guard::Guard;
use crate::locks::handle::LockHandle;
use crate::locks::keeper::Keeper;
use crate::recipes::scope::{self, FRAME, Frame, ScopedGuard};

/// The return type of a `#[locked]` function.
#[diagnostic::on_unimplemented(
    message = "a `#[locked]` function returns a `Result`, not `{Self}`",
    label = "not a `Result`",
    note = "acquiring the lock can fail, and the lock can be lost: both are returned as errors"
)]
pub trait Outcome {
    /// The type of a success.
    type Value;
    /// The type of an error.
    type Error;
    /// Converts to a result.
    fn into_result(self) -> Result<Self::Value, Self::Error>;
    /// Converts from a result.
    fn from_result(result: Result<Self::Value, Self::Error>) -> Self;
}

impl<T, E> Outcome for Result<T, E> {
    type Value = T;
    type Error = E;

    fn into_result(self) -> Self {
        self
    }

    fn from_result(result: Self) -> Self {
        result
    }
}

/// The lock that a function requires.
#[derive(Debug)]
pub struct Wanted {
    lock: LockHandle,
    mode: Mode,
}

impl Wanted {
    /// Creates an exclusive lock.
    pub fn new(keeper: &Keeper, name: impl Into<Arc<str>>) -> Self {
        Self { lock: keeper.lock(name), mode: Mode::Exclusive }
    }

    /// Sets the TTL.
    #[must_use]
    pub fn ttl(mut self, secs: u64, nanos: u32) -> Self {
        self.lock.options.ttl = Duration::new(secs, nanos);
        self
    }

    /// Sets how long to wait for other holders.
    #[must_use]
    pub fn wait(mut self, secs: u64, nanos: u32) -> Self {
        self.lock.options.max_wait = Some(Duration::new(secs, nanos));
        self
    }

    /// Makes the lock shared.
    #[must_use]
    pub fn shared(mut self) -> Self {
        self.mode = Mode::Shared;
        self
    }

    /// Makes the lock one permit of a semaphore with `of` permits.
    #[must_use]
    pub fn permits(mut self, of: u32) -> Self {
        self.mode = Mode::Permits { take: 1, of };
        self
    }
}

/// Runs the body of an async function under its lock.
///
/// The body stays in the function's own future. If it were moved into this one, its memory would be reserved twice, and four
/// times in a function that calls another.
pub async fn run<T: Outcome>(
    wanted: Result<Wanted>,
    body: Pin<&mut Option<impl Future<Output = T>>>,
) -> T
where
    T::Error: From<Error>,
{
    run_in(Frames::default(), wanted, body).await
}

/// Runs the body of a re-entrant async function under its lock.
pub async fn run_reentrant<T: Outcome>(
    wanted: Result<Wanted>,
    body: Pin<&mut Option<impl Future<Output = T>>>,
) -> T
where
    T::Error: From<Error>,
{
    run_in(Frames::enter(), wanted, body).await
}

async fn run_in<T: Outcome>(
    frames: Frames,
    wanted: Result<Wanted>,
    body: Pin<&mut Option<impl Future<Output = T>>>,
) -> T
where
    T::Error: From<Error>,
{
    let acquired = match wanted {
        Ok(wanted) => wanted.acquire(wanted.lock.context.live(), &frames).await,
        Err(error) => Err(error),
    };
    let guard = match acquired {
        Ok(guard) => guard,
        Err(error) => return T::from_result(Err(error.into())),
    };
    let ended = run_body(guard.guard(), frames.inner.as_ref(), body).await;
    guard.release_after_work().await;
    ended.outcome()
}

/// Runs the body of a blocking function under its lock.
pub fn run_blocking<T: Outcome>(wanted: Result<Wanted>, body: impl FnOnce() -> T) -> T
where
    T::Error: From<Error>,
{
    run_blocking_in(&Frames::default(), wanted, body)
}

/// Runs the body of a re-entrant blocking function under its lock.
pub fn run_blocking_reentrant<T: Outcome>(wanted: Result<Wanted>, body: impl FnOnce() -> T) -> T
where
    T::Error: From<Error>,
{
    run_blocking_in(&Frames::enter(), wanted, body)
}

fn run_blocking_in<T: Outcome>(
    frames: &Frames,
    wanted: Result<Wanted>,
    body: impl FnOnce() -> T,
) -> T
where
    T::Error: From<Error>,
{
    let acquired = wanted
        .and_then(|wanted| block_on(wanted.acquire(wanted.lock.context.for_blocking(), frames)));
    let guard = match acquired {
        Ok(guard) => guard,
        Err(error) => return T::from_result(Err(error.into())),
    };
    let body = AssertUnwindSafe(|| within(frames.inner.as_ref(), body));
    let ended = Ended::of(guard.guard(), catch_unwind(body));
    block_on(guard.release_after_work());
    ended.outcome()
}

impl Wanted {
    async fn acquire(&self, context: &Arc<KeeperContext>, frames: &Frames) -> Result<ScopedGuard> {
        let (outer, inner) = (frames.outer.as_deref(), frames.inner.as_deref());
        self.lock.acquire_scoped(context, self.mode, outer, inner).await
    }
}

/// The scope that a re-entrant function is called in, and the inner scope of its body. Calls side by side have different
/// inner scopes, so they exclude each other. Both are `None` outside of a scope, and for a function that is not re-entrant.
#[derive(Default)]
struct Frames {
    outer: Option<Arc<Frame>>,
    inner: Option<Arc<Frame>>,
}

impl Frames {
    fn enter() -> Self {
        let outer = scope::current();
        let inner = outer.clone().map(|outer| Frame::inside(Some(outer)));
        Self { outer, inner }
    }
}

/// How a body ended.
enum Ended<T> {
    /// The body returned. The error is set if the lock was lost before that.
    Returned(T, Result<()>),
    Cancelled(Error),
    Panicked(Box<dyn Any + Send>),
}

impl<T: Outcome> Ended<T> {
    fn of(guard: &Guard, returned: std::thread::Result<T>) -> Self {
        match returned {
            Ok(output) if guard.is_held() => Self::Returned(output, Ok(())),
            Ok(output) => Self::Returned(output, Err(guard.lost_error())),
            Err(panic) => Self::Panicked(panic),
        }
    }

    /// Returns what the caller gets. An error that the body returned is never replaced.
    fn outcome(self) -> T
    where
        T::Error: From<Error>,
    {
        let (output, held) = match self {
            Self::Returned(output, held) => (output.into_result(), held),
            Self::Cancelled(lost) => (Err(lost.into()), Ok(())),
            Self::Panicked(panic) => resume_unwind(panic),
        };
        T::from_result(output.and_then(|value| held.map(|()| value).map_err(Into::into)))
    }
}

/// Runs a body while the lock is held, and drops it. A panic is caught, to be resumed after the release.
async fn run_body<F: Future>(
    guard: &Guard,
    frame: Option<&Arc<Frame>>,
    body: Pin<&mut Option<F>>,
) -> Ended<F::Output> {
    let mut body = Body { frame, body };
    let mut returned = None;
    let work = poll_fn(|cx| {
        let Some(body) = body.body.as_mut().as_pin_mut() else { return Poll::Ready(()) };
        let polled = catch_unwind(AssertUnwindSafe(|| within(frame, || body.poll(cx))));
        returned = Some(match polled {
            Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(output)) => Ok(output),
            Err(panic) => Err(panic),
        });
        Poll::Ready(())
    });
    let held = guard.while_held(work).await;
    drop(body);
    match (returned, held) {
        (Some(Ok(output)), held) => Ended::Returned(output, held),
        (Some(Err(panic)), _) => Ended::Panicked(panic),
        (None, Err(lost)) => Ended::Cancelled(lost),
        (None, Ok(())) => unreachable!("the body exists and has returned"),
    }
}

/// Drops the body before its lock is released, and at once if the lock is lost. This also covers a function whose future is
/// dropped: that future keeps the body for longer than the guard.
struct Body<'a, F> {
    frame: Option<&'a Arc<Frame>>,
    body: Pin<&'a mut Option<F>>,
}

impl<F> Drop for Body<'_, F> {
    fn drop(&mut self) {
        within(self.frame, || self.body.set(None));
    }
}

/// Runs a closure in a frame, if there is one.
fn within<T>(frame: Option<&Arc<Frame>>, work: impl FnOnce() -> T) -> T {
    match frame {
        Some(frame) => FRAME.sync_scope(frame.clone(), work),
        None => work(),
    }
}
