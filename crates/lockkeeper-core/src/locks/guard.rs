//! Guards of held locks.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::blocking_runtime::block_on;
use crate::clock::{Moment, sleep_until};
use crate::contract::{Backend, Kind, Mode};
use crate::engine::acquire::{ClaimHandle, Releasing, Requesting};
use crate::engine::hold::{Hold, ReleaseOutcome, Request, State};
use crate::engine::outcome::Ending;
use crate::engine::while_held::run_while_held;
use crate::error::{Error, Result};
use crate::fence::Fence;
use crate::futures::{boxed, within};
use crate::locks::ticket::Ticket;
use crate::loss::LossReason;
use crate::name::{Label, Name};
use crate::options::{check_ttl, invalid};
use crate::owner::Owner;
use crate::release::{LEAVE_WITHIN, release_timeout};

/// A held lock: exclusive, shared, or some permits of a semaphore.
///
/// While the guard lives, the lock is renewed in the background. Dropping the guard releases the lock in the background,
/// from any thread. [`release`](Self::release) also releases it, and reports the outcome.
///
/// # What it guarantees
///
/// [`is_held`](Self::is_held) returns false, and [`lost`](Self::lost) completes, *before* the store can grant the lock to
/// another client, even if renewals hang. The guard counts its lease from before the last successful request was sent,
/// and subtracts an allowance for clock drift. Its clock includes the time for which the machine is suspended.
///
/// Exception: FreeBSD has no such clock. After a suspend there, a guard may report `Held` after its lease has expired, for
/// as long as the machine was suspended.
///
/// # What it does not guarantee
///
/// - **Timely notice if the store frees the lock first**: [`break_lock`](crate::Inspect::break_lock), a session that the
///   server terminates, a removed lock file. The guard usually reports the loss within milliseconds, but the next holder
///   may acquire the lock before that.
/// - **Timely notice after a pause that no clock counts.** A virtual machine that is paused or restored from a snapshot
///   does not count the pause on any of its clocks. The guard reports the loss when the machine runs again and the store
///   answers.
/// - **That the lock is still held on the next line** after `is_held` returned true. If two writers can do harm, send
///   the [`fence`](Self::fence) with each write, and let the resource reject a fence that is lower than the highest it
///   has seen.
#[must_use = "dropping the guard releases the lock at once"]
pub struct Guard {
    claim: Arc<ClaimHandle>,
}

impl Guard {
    pub(crate) fn new(claim: Arc<ClaimHandle>) -> Self {
        Self { claim }
    }

    /// Returns the name of the lock.
    pub fn name(&self) -> &str {
        &self.claim.hold.name
    }

    /// Returns the mode of the hold. A [downgrade](Self::downgrade) changes it.
    pub fn mode(&self) -> Mode {
        self.claim.hold.mode()
    }

    /// Returns the id that identifies this hold in the store.
    pub fn owner(&self) -> Owner {
        self.claim.hold.owner
    }

    /// Returns the human-readable name of the holder.
    pub fn label(&self) -> &Label {
        &self.claim.hold.label
    }

    /// Returns the fencing token, or `None` if the store has no fences.
    ///
    /// The token of an exclusive hold is higher than that of every earlier exclusive hold of this name. The token of a
    /// shared hold or of permits is not lower than any of these. `docs/guides/fencing.md` lists the exceptions, such as a
    /// store whose clock was set back.
    pub fn fence(&self) -> Option<Fence> {
        self.claim.hold.fence()
    }

    /// Returns the state of the lock, as far as this process knows, without I/O.
    pub fn state(&self) -> State {
        self.claim.hold.state()
    }

    /// Returns whether the lock is held, as far as this process knows: true for `Held` and `AtRisk`.
    ///
    /// Sends no request to the store. Each call compares the deadline with the clock, so the result is correct even if no
    /// task of this process has run for some time.
    pub fn is_held(&self) -> bool {
        is_held(&self.claim.hold)
    }

    /// Returns [`is_held`](Self::is_held) as a function that does not borrow the guard, for work on another thread. The function
    /// returns false once the guard is released or dropped.
    pub fn is_held_owned(&self) -> impl Fn() -> bool + Clone + Send + Sync + 'static + use<> {
        let hold = self.claim.hold.clone();
        move || is_held(&hold)
    }

    /// Returns why the lock was lost; `None` while it is held and after it is released.
    ///
    /// Each call compares the deadline with the clock, like [`is_held`](Self::is_held).
    pub fn loss_reason(&self) -> Option<LossReason> {
        self.claim.hold.loss_reason()
    }

    /// Returns when the hold will be lost if no renewal succeeds; `None` if the store needs no renewals.
    pub fn expires_at(&self) -> Option<Instant> {
        self.claim.hold.deadline().map(Moment::to_instant)
    }

    /// Returns the time until [`expires_at`](Self::expires_at). It is zero if the lock is not held any more, and `None`
    /// if the store needs no renewals.
    pub fn remaining(&self) -> Option<Duration> {
        if !self.is_held() {
            return Some(Duration::ZERO);
        }
        self.claim.hold.deadline().map(|deadline| deadline.since(Moment::now()))
    }

    /// Returns a future that completes when the lock is lost.
    ///
    /// The future does not borrow the guard. A release is not a loss: after it, the future stays pending.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        self.lost_token().cancelled_owned()
    }

    /// Returns a token that is cancelled when the lock is lost.
    ///
    /// A release does not cancel it: end the work before you release the lock.
    pub fn lost_token(&self) -> CancellationToken {
        // A child token, so that a caller that cancels it does not report a loss to the others.
        self.claim.hold.lost_token().child_token()
    }

    /// Runs a future while the lock is held, and drops it when the lock is lost.
    ///
    /// `Ok` means that the lock was held until the work completed. The work is not polled after the lease has expired,
    /// even if the process was stopped and the loss is not reported yet. Only code that awaits can be stopped: a long
    /// computation continues to its next await.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) if the lock was lost before the work completed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `work`. The guard still holds the lock.
    ///
    /// # Examples
    ///
    /// ```
    /// # use lockkeeper_core as lockkeeper;
    /// # use lockkeeper::{Keeper, Memory};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockkeeper::Result<()> {
    /// # let keeper = Keeper::new(Memory::new());
    /// let guard = keeper.mutex("report").lock().await?;
    /// let answer = guard.while_held(async { 6 * 7 }).await?;
    /// assert_eq!(answer, 42);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn while_held<F: Future>(&self, work: F) -> Result<F::Output> {
        self.while_held_owned(work).await
    }

    /// Runs a future while the lock is held, like [`while_held`](Self::while_held). The returned future does not borrow the
    /// guard.
    ///
    /// Use it for work in its own task, and for work that owns the guard. A release is not a loss: if the guard is
    /// released or dropped first, the work continues without the lock.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) if the lock was lost before the work completed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `work`. The guard still holds the lock.
    ///
    /// # Examples
    ///
    /// ```
    /// # use lockkeeper_core as lockkeeper;
    /// # use lockkeeper::{Keeper, Memory};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let keeper = Keeper::new(Memory::new());
    /// let guard = keeper.mutex("report").lock().await?;
    /// let report = tokio::spawn(guard.while_held_owned(async { 6 * 7 }));
    /// assert_eq!(report.await??, 42);
    /// guard.release().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn while_held_owned<F: Future>(
        &self,
        work: F,
    ) -> impl Future<Output = Result<F::Output>> + use<F> {
        let hold = self.claim.hold.clone();
        async move {
            let lost = hold.lost_token();
            let is_lost = || hold.state() == State::Lost;
            let output = run_while_held(is_lost, lost.cancelled(), work).await;
            output.ok_or_else(|| hold.lost_error("hold"))
        }
    }

    pub(crate) fn lost_error(&self) -> Error {
        self.claim.hold.lost_error("hold")
    }

    /// Changes the TTL: renews the lease for `ttl` from now, and uses it for all later renewals.
    ///
    /// It is not needed to keep the lock held: the guard renews it in the background. On a store without leases, `extend`
    /// only checks that the lock is held.
    ///
    /// # Errors
    ///
    /// - [`Lost`](crate::ErrorKind::Lost) if the lock is lost.
    /// - [`InvalidOption`](crate::ErrorKind::InvalidOption) if the TTL is too short or exceeds `max_hold`.
    /// - [`Unavailable`](crate::ErrorKind::Unavailable) if the store does not answer. The lock stays held, for the shorter
    ///   of the old and the new lease.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the lease may or may not be extended. The guard accounts for both.
    pub async fn extend(&self, ttl: Duration) -> Result<()> {
        let hold = &self.claim.hold;
        check_ttl(ttl).map_err(|error| hold.error("extend", error))?;
        if hold.max_hold_end().is_some_and(|end| Moment::now().add(ttl) > end) {
            let error = invalid("the lease would end after max_hold: extend by less");
            return Err(hold.error("extend", error));
        }
        self.request("extend", |reply| Request::Extend(ttl, reply)).await
    }

    /// Turns a write lock into a read lock, atomically: no other writer can acquire the lock meanwhile. Readers at the
    /// head of the queue acquire it at once. A read lock stays unchanged.
    ///
    /// # Errors
    ///
    /// - [`Unsupported`](crate::ErrorKind::Unsupported) for permits, and if the store has no downgrades.
    /// - [`Lost`](crate::ErrorKind::Lost) if the lock is lost.
    /// - [`Unavailable`](crate::ErrorKind::Unavailable) if the store does not answer. The lock is still held, in one of the
    ///   two modes, and [`mode`](Self::mode) returns `Shared`. Call it again to make sure.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the lock is still held, and may or may not be downgraded. Call it again to make sure.
    pub async fn downgrade(&self) -> Result<()> {
        let hold = &self.claim.hold;
        match hold.requested_mode {
            Mode::Shared => return Ok(()),
            Mode::Exclusive if hold.context.capabilities.downgrade => {}
            Mode::Exclusive | Mode::Permits { .. } => {
                return Err(hold.error("downgrade", Error::unsupported("downgrades of this lock")));
            }
        }
        self.request("downgrade", Request::Downgrade).await
    }

    /// Changes the TTL. The [blocking](crate::blocking) form of [`extend`](Self::extend).
    ///
    /// # Errors
    ///
    /// Same as [`extend`](Self::extend).
    pub fn blocking_extend(&self, ttl: Duration) -> Result<()> {
        let limit = ttl.max(self.claim.hold.ttl());
        self.block_on_request("extend", limit, self.extend(ttl))
    }

    /// Turns a write lock into a read lock. The [blocking](crate::blocking) form of [`downgrade`](Self::downgrade).
    ///
    /// # Errors
    ///
    /// Same as [`downgrade`](Self::downgrade).
    pub fn blocking_downgrade(&self) -> Result<()> {
        self.block_on_request("downgrade", self.claim.hold.ttl(), self.downgrade())
    }

    /// Blocks until a request is answered, for at most twice the TTL, and at most until the hold is lost.
    ///
    /// The engine's own timeouts are shorter, but they are timers of the guard's runtime, whose only thread may be this one.
    fn block_on_request(
        &self,
        operation: &'static str,
        ttl: Duration,
        request: impl Future<Output = Result<()>>,
    ) -> Result<()> {
        let hold = &self.claim.hold;
        let start = Moment::now();
        let limit = start.add(ttl.saturating_mul(2));
        block_on(async {
            let mut request = pin!(request);
            loop {
                let end = hold.deadline().map_or(limit, |deadline| deadline.min(limit));
                tokio::select! {
                    biased;
                    answer = &mut request => return answer,
                    () = sleep_until(Some(end)) => {}
                }
                let now = Moment::now();
                if !self.is_held() {
                    return Err(hold.lost_error(operation));
                }
                if now >= limit {
                    return Err(hold.error(operation, Error::no_answer(now.since(start))));
                }
            }
        })
    }

    async fn request(
        &self,
        operation: &'static str,
        request: impl FnOnce(oneshot::Sender<Result<()>>) -> Request,
    ) -> Result<()> {
        let hold = &self.claim.hold;
        let lost = || Err(hold.lost_error(operation));
        if !self.is_held() {
            return lost();
        }
        let (reply, mut answer) = oneshot::channel();
        hold.request(request(reply));
        // The caller drives the claim, too: this may be the only thread of the runtime of the background task.
        let requesting = Requesting::new(&self.claim);
        let answer = poll_fn(|cx| {
            requesting.drive(cx);
            let answer = Pin::new(&mut answer).poll(cx);
            if answer.is_pending() {
                requesting.repoll_in_background();
            }
            answer
        });
        answer.await.unwrap_or_else(|_| lost())
    }

    /// Turns the guard into a ticket: plain data that identifies the hold. The hold stays in the store until its lease
    /// expires, and is not renewed. Until then, a process that has the ticket can [adopt](crate::Keeper::adopt) it.
    ///
    /// # Errors
    ///
    /// - [`Unsupported`](crate::ErrorKind::Unsupported) on a store without leases, where a hold cannot outlive its process.
    /// - [`Lost`](crate::ErrorKind::Lost) if the lock is lost.
    ///
    /// In both cases the guard is dropped, which releases the lock if it is still held.
    pub fn detach(self) -> Result<Ticket> {
        let hold = &self.claim.hold;
        if !hold.context.capabilities.leases {
            return Err(hold.error("detach", Ticket::unsupported()));
        }
        if !self.is_held() {
            return Err(hold.lost_error("detach"));
        }
        let ticket = Ticket {
            name: hold.name.clone(),
            owner: hold.owner,
            label: hold.label.clone(),
            mode: hold.mode(),
            ttl: hold.ttl(),
            fence: hold.fence(),
        };
        hold.end(Ending::Detach);
        self.claim.request_repoll();
        Ok(ticket)
    }

    /// Releases the lock, and returns whether it was still held.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the store did not confirm the release. It is retried in the
    /// background until the store confirms it or the lease has expired.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the release continues in the background if the future is dropped.
    pub async fn release(self) -> Result<ReleaseOutcome> {
        self.claim.hold.end(Ending::Release);
        if self.claim.hold.is_known_lost() {
            self.claim.request_repoll();
            return Ok(ReleaseOutcome::AlreadyLost);
        }
        Releasing::new(self.claim.clone()).await
    }

    /// Releases the lock, and returns whether it was still held. The [blocking](crate::blocking) form of
    /// [`release`](Self::release).
    ///
    /// # Errors
    ///
    /// Same as [`release`](Self::release).
    pub fn blocking_release(self) -> Result<ReleaseOutcome> {
        block_on(self.release_in_time())
    }

    /// Releases the lock with a timeout that does not depend on the guard's runtime: the thread that waits may be the only
    /// one of that runtime, so its timers do not run.
    pub(crate) async fn release_in_time(self) -> Result<ReleaseOutcome> {
        let hold = self.claim.hold.clone();
        // Longer than the engine's own timeout, so that its outcome takes precedence.
        let timeout = release_timeout(hold.ttl()) + LEAVE_WITHIN;
        let outcome = within(&mut boxed(self.release()), Moment::now().add(timeout)).await;
        outcome.unwrap_or_else(|| Err(hold.error("release", Error::no_answer(timeout))))
    }

    /// Releases the lock after work that is complete. A failure is logged, and is not an error of the work.
    pub(crate) async fn release_after_work(self) {
        if let Err(error) = self.release().await {
            tracing::warn!(%error, "the work is complete, but the release is not confirmed");
        }
    }

    /// Returns whether this guard holds the lock or semaphore of that name in that store.
    pub(crate) fn is_of(&self, store: &Arc<dyn Backend>, name: &Name, kind: Kind) -> bool {
        let hold = &self.claim.hold;
        // Compares the store, not the context: the two contexts of a keeper share the store.
        Arc::ptr_eq(&hold.context.backend, store)
            && hold.requested_mode.kind() == kind
            && hold.name == *name
    }
}

fn is_held(hold: &Hold) -> bool {
    matches!(hold.state(), State::Held | State::AtRisk)
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.claim.hold.end(Ending::Drop) {
            self.claim.poll_once();
        }
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("name", &self.claim.hold.name)
            .field("mode", &self.mode())
            .field("fence", &self.fence())
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}
