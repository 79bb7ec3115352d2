//! What `#[locked]` writes calls to. Not for people: it changes with the macro.

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
use crate::recipes::scope::{self, FRAME, Frame};

/// What a `#[locked]` function returns.
#[diagnostic::on_unimplemented(
    message = "a `#[locked]` function returns a `Result`, not `{Self}`",
    label = "not a `Result`",
    note = "the lock may not be acquired, or be lost: the caller is told by an error"
)]
pub trait Outcome {
    /// What it returns if all is well.
    type Value;
    /// What it returns if not.
    type Error;
    /// As a result.
    fn into_result(self) -> Result<Self::Value, Self::Error>;
    /// From a result.
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

/// The lock that a function wants.
#[derive(Debug)]
pub struct Wanted {
    lock: LockHandle,
    mode: Mode,
}

impl Wanted {
    /// An exclusive one.
    pub fn new(keeper: &Keeper, name: impl Into<Arc<str>>) -> Self {
        Self { lock: keeper.lock(name), mode: Mode::Exclusive }
    }

    /// Sets the ttl.
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

    /// Makes it a shared one.
    #[must_use]
    pub fn shared(mut self) -> Self {
        self.mode = Mode::Shared;
        self
    }

    /// Makes it one of so many permits.
    #[must_use]
    pub fn permits(mut self, of: u32) -> Self {
        self.mode = Mode::Permits { take: 1, of };
        self
    }
}

/// Runs the body of an async function under its lock.
///
/// The body stays where the function has it: moved in here it would take its room twice, and a function
/// that calls another, four times.
pub async fn run<T: Outcome>(
    wanted: Result<Wanted>,
    body: Pin<&mut Option<impl Future<Output = T>>>,
) -> T
where
    T::Error: From<Error>,
{
    let acquired = match wanted {
        Ok(Wanted { lock, mode }) => lock.acquire(mode).await,
        Err(error) => Err(error),
    };
    let guard = match acquired {
        Ok(guard) => guard,
        Err(error) => return T::from_result(Err(error.into())),
    };
    let ended = under(&guard, None, body).await;
    guard.give_back().await;
    ended.outcome()
}

/// Runs the body of an async function that is re-entrant.
pub async fn run_reentrant<T: Outcome>(
    wanted: Result<Wanted>,
    body: Pin<&mut Option<impl Future<Output = T>>>,
) -> T
where
    T::Error: From<Error>,
{
    let (scope, inner) = frames();
    let acquired = match wanted {
        Ok(wanted) => {
            let context = wanted.lock.context.live();
            wanted.acquire_scoped(context, scope.as_deref(), inner.as_deref()).await
        }
        Err(error) => Err(error),
    };
    let guard = match acquired {
        Ok(guard) => guard,
        Err(error) => return T::from_result(Err(error.into())),
    };
    let ended = under(guard.guard(), inner.as_ref(), body).await;
    guard.give_back().await;
    ended.outcome()
}

/// Runs the body of a function that is not async under its lock.
pub fn run_blocking<T: Outcome>(wanted: Result<Wanted>, body: impl FnOnce() -> T) -> T
where
    T::Error: From<Error>,
{
    let acquired = wanted.and_then(|Wanted { lock, mode }| lock.blocking_acquire(mode));
    let guard = match acquired {
        Ok(guard) => guard,
        Err(error) => return T::from_result(Err(error.into())),
    };
    let ended = Ended::of(&guard, catch_unwind(AssertUnwindSafe(body)));
    block_on(guard.give_back());
    ended.outcome()
}

/// Runs the body of a function that is not async and re-entrant.
pub fn run_blocking_reentrant<T: Outcome>(wanted: Result<Wanted>, body: impl FnOnce() -> T) -> T
where
    T::Error: From<Error>,
{
    let (scope, inner) = frames();
    let acquired = wanted.and_then(|wanted| {
        let context = wanted.lock.context.for_blocking();
        block_on(wanted.acquire_scoped(context, scope.as_deref(), inner.as_deref()))
    });
    let guard = match acquired {
        Ok(guard) => guard,
        Err(error) => return T::from_result(Err(error.into())),
    };
    let body = AssertUnwindSafe(|| within(inner.as_ref(), body));
    let ended = Ended::of(guard.guard(), catch_unwind(body));
    block_on(guard.give_back());
    ended.outcome()
}

impl Wanted {
    async fn acquire_scoped(
        &self,
        context: &Arc<KeeperContext>,
        scope: Option<&Frame>,
        note: Option<&Frame>,
    ) -> Result<scope::ScopedGuard> {
        self.lock.acquire_scoped(context, self.mode, scope, note).await
    }
}

/// The scope that a function is called in, and the one inside of it that its body gets: so two calls side
/// by side do not know of each other, and exclude each other.
fn frames() -> (Option<Arc<Frame>>, Option<Arc<Frame>>) {
    let scope = scope::current();
    let inner = scope.clone().map(|scope| Frame::inside(Some(scope)));
    (scope, inner)
}

/// How a body ended.
enum Ended<T> {
    /// By itself. The error is that the lock was lost meanwhile.
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

    /// What the caller gets. An error of the body's own is never replaced by another.
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

/// Runs a body for as long as the lock is held, and drops it. A panic is caught, to go on after the
/// release.
async fn under<F: Future>(
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
        (None, Ok(())) => unreachable!("there is a body, and it left what it returned"),
    }
}

/// A body that is gone before its lock is given back, and at once if that was lost: also if the function's
/// future is dropped, which has the body for longer than the guard.
struct Body<'a, F> {
    frame: Option<&'a Arc<Frame>>,
    body: Pin<&'a mut Option<F>>,
}

impl<F> Drop for Body<'_, F> {
    fn drop(&mut self) {
        within(self.frame, || self.body.set(None));
    }
}

/// Runs something in a frame, if there is one.
fn within<T>(frame: Option<&Arc<Frame>>, work: impl FnOnce() -> T) -> T {
    match frame {
        Some(frame) => FRAME.sync_scope(frame.clone(), work),
        None => work(),
    }
}
