//! Guards: what the user has while the lock is held.

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
use crate::engine::acquire::{Releasing, Requesting};
use crate::engine::claim_handle::ClaimHandle;
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
use crate::release::{LEAVE_WITHIN, release_patience};

/// A lock that is held: exclusively, shared, or some permits of a semaphore.
///
/// While it lives, the lock is renewed in the background. Dropping it gives the lock back, in the
/// background, from any thread. [`release`](Self::release) does the same and tells how it went.
///
/// # What it guarantees
///
/// [`is_held`](Self::is_held) turns false, and [`lost`](Self::lost) is told, *before* the store could
/// have given the lock to another, even if renewals hang: both count from before the last successful
/// request was sent, with an allowance for clock drift, on a clock that goes on while the machine sleeps.
///
/// Exception: FreeBSD has no such clock. After a sleep there, a guard may say `Held` for as long as the machine slept
/// after its lease has ended. The same is true of a virtual machine that its host has paused, on every system.
///
/// # What it does not
///
/// The guard is told afterwards, usually within milliseconds, where the store frees the lock first:
/// [`break_lock`](crate::Inspect::break_lock), a session that the server ends, a lock file that is removed. The next holder
/// may enter in between. A virtual machine that is paused or restored from a snapshot does not count the pause on any
/// of its clocks: the guard reports the loss only after the machine runs again, when the store answers.
///
/// Nobody can stop your code between a look at `is_held` and the next line. Where two writers would do
/// harm, pass the [`fence`](Self::fence) along and let the thing you write to refuse the lower one.
#[must_use = "dropping the guard gives the lock back at once"]
pub struct Guard {
    claim: Arc<ClaimHandle>,
}

impl Guard {
    pub(crate) fn new(claim: Arc<ClaimHandle>) -> Self {
        Self { claim }
    }

    /// The name of the lock.
    pub fn name(&self) -> &str {
        &self.claim.hold.name
    }

    /// How it is held. A [downgrade](Self::downgrade) changes it.
    pub fn mode(&self) -> Mode {
        self.claim.hold.mode()
    }

    /// The id that the store knows this hold by.
    pub fn owner(&self) -> Owner {
        self.claim.hold.owner
    }

    /// The fencing token, or `None` where the store has none.
    ///
    /// That of an exclusive hold is higher than the token of any exclusive hold of this name before.
    /// Shared holds and permits have one that is not lower.
    pub fn fence(&self) -> Option<Fence> {
        self.claim.hold.fence()
    }

    /// What this process knows of the lock right now.
    pub fn state(&self) -> State {
        self.claim.hold.state()
    }

    /// Whether the lock is held as far as this process knows: true for `Held` and `AtRisk`.
    ///
    /// A local belief, without a question to the store. It is compared with the deadline at each
    /// call, so it is right even if no task of this process has run for a while.
    pub fn is_held(&self) -> bool {
        matches!(self.state(), State::Held | State::AtRisk)
    }

    /// Returns a function that does what [`is_held`](Self::is_held) does and does not borrow the guard, for work on another
    /// thread. Once the guard is released or dropped it returns false.
    pub fn is_held_owned(&self) -> impl Fn() -> bool + Clone + Send + Sync + 'static + use<> {
        let hold = self.claim.hold.clone();
        move || matches!(hold.state(), State::Held | State::AtRisk)
    }

    /// Why the lock was lost; `None` while it is held, and after it was given back.
    ///
    /// Compared with the deadline at each call, like [`is_held`](Self::is_held).
    pub fn loss_reason(&self) -> Option<LossReason> {
        self.claim.hold.loss_reason()
    }

    /// When the hold will be lost if no renewal succeeds before; `None` if the store needs none.
    pub fn expires_at(&self) -> Option<Instant> {
        self.claim.hold.deadline().map(Moment::to_instant)
    }

    /// How long until [`expires_at`](Self::expires_at); zero once lost, `None` if the store needs no
    /// renewal.
    pub fn remaining(&self) -> Option<Duration> {
        if !self.is_held() {
            return Some(Duration::ZERO);
        }
        self.claim.hold.deadline().map(|deadline| deadline.since(Moment::now()))
    }

    /// Ready when the lock is lost, and never if it is not.
    ///
    /// The future does not borrow the guard. Releasing is not losing: after that it stays pending.
    ///
    /// # Cancel safety
    ///
    /// Dropping it changes nothing.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        self.lost_token().cancelled_owned()
    }

    /// A token that is cancelled when the lock is lost, to hand to whatever should stop then.
    ///
    /// Releasing does not cancel it: end the work before you give the lock back.
    pub fn lost_token(&self) -> CancellationToken {
        // A child, so that nobody can announce a loss by cancelling his token.
        self.claim.hold.lost_token().child_token()
    }

    /// Runs a future for as long as the lock is held, and drops it when the lock is lost.
    ///
    /// `Ok` means that the lock was held until the work was done. No step of the work begins after the
    /// lease has run out, even if the process was stopped and the loss is still to be told. Only code that awaits can be
    /// stopped: a long computation runs on to its next await.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) if the lock was lost before the work was done.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops the work. The guard still holds.
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
        while_held(&self.claim.hold, work).await
    }

    /// Does what [`while_held`](Self::while_held) does, with a future that does not borrow the guard.
    ///
    /// For work in a task of its own, and for work that takes the guard along. Releasing is not losing: if the guard
    /// is released or dropped first, the work runs to its end, without the lock.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) if the lock was lost before the work was done.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops the work. The guard still holds.
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
        async move { while_held(&hold, work).await }
    }

    pub(crate) fn lost_error(&self) -> Error {
        self.claim.hold.lost_error("hold")
    }

    /// Makes the lease last `ttl` from now, and every renewal from now on.
    ///
    /// Needed only to change the ttl: the lock is renewed by itself anyway. On a store without leases
    /// it only checks that the lock is held.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) if the lock is lost; [`InvalidOption`] for a ttl that is
    /// too short, or that goes past `max_hold`; [`Unavailable`] if the store does not answer, in which
    /// case the lock stays held as it was, or for the shorter of the two ttls.
    ///
    /// [`InvalidOption`]: crate::ErrorKind::InvalidOption
    /// [`Unavailable`]: crate::ErrorKind::Unavailable
    ///
    /// # Cancel safety
    ///
    /// If dropped, the lease may or may not be extended. The guard knows which.
    pub async fn extend(&self, ttl: Duration) -> Result<()> {
        let hold = &self.claim.hold;
        check_ttl(ttl).map_err(|error| hold.error("extend", error))?;
        if hold.latest().is_some_and(|latest| Moment::now().add(ttl) > latest) {
            let error = invalid("the lease would go past max_hold");
            return Err(hold.error("extend", error));
        }
        self.ask("extend", |reply| Request::Extend(ttl, reply)).await
    }

    /// Turns a write hold into a read hold, without a moment in which another writer could enter.
    /// Readers that wait next in line enter at once. A read hold stays what it is.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) where the store cannot, and for permits;
    /// [`Lost`](crate::ErrorKind::Lost) if the lock is lost;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the store does not answer: the lock is
    /// still held, in either mode, so [`mode`](Self::mode) says `Shared`; asking again settles it.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the lock is still held, and may or may not be downgraded. Asking again settles it.
    pub async fn downgrade(&self) -> Result<()> {
        let hold = &self.claim.hold;
        match hold.asked_mode {
            Mode::Shared => return Ok(()),
            Mode::Exclusive if hold.context.capabilities.downgrade => {}
            Mode::Exclusive | Mode::Permits { .. } => {
                return Err(hold.error("downgrade", Error::unsupported("downgrade for this")));
            }
        }
        self.ask("downgrade", Request::Downgrade).await
    }

    /// Makes the lease last `ttl` from now, and every renewal from now on. Does what [`extend`](Self::extend) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`extend`](Self::extend).
    pub fn blocking_extend(&self, ttl: Duration) -> Result<()> {
        let limit = ttl.max(self.claim.hold.ttl());
        self.block_on_request("extend", limit, self.extend(ttl))
    }

    /// Turns a write hold into a read hold. Does what [`downgrade`](Self::downgrade) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`downgrade`](Self::downgrade).
    pub fn blocking_downgrade(&self) -> Result<()> {
        self.block_on_request("downgrade", self.claim.hold.ttl(), self.downgrade())
    }

    /// Blocks until a request is answered, for twice the ttl at most, and no longer than the hold lasts.
    ///
    /// The engine's own limits are shorter. But they are timers of the guard's runtime, whose only thread may be this one.
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

    async fn ask(
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
        // The caller drives, not only the background: the runtime of that may have no thread but this one.
        let requesting = Requesting::new(&self.claim);
        let answer = poll_fn(|cx| {
            requesting.drive(cx);
            let answer = Pin::new(&mut answer).poll(cx);
            if answer.is_pending() {
                requesting.share();
            }
            answer
        });
        answer.await.unwrap_or_else(|_| lost())
    }

    /// Takes the hold out of the guard, as data: it stays in the store until its lease ends, and
    /// nobody renews it. Whoever has the ticket can [adopt](crate::Keeper::adopt) it before that, in
    /// another process too.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) on a store without leases, where a hold cannot
    /// outlive its process; [`Lost`](crate::ErrorKind::Lost) if the lock is lost. In both cases the
    /// lock is given back as if the guard was dropped.
    pub fn detach(self) -> Result<Ticket> {
        let hold = &self.claim.hold;
        if !hold.context.capabilities.leases {
            return Err(hold.error("detach", Error::unsupported("leases, and so no tickets")));
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

    /// Gives the lock back and tells whether it was still held.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the store did not confirm it. It is asked
    /// again in the background until it does or the lease has run out.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the lock is given back even if this is dropped: in the background then.
    pub async fn release(self) -> Result<ReleaseOutcome> {
        self.claim.hold.end(Ending::Release);
        if self.claim.hold.is_known_lost() {
            self.claim.request_repoll();
            return Ok(ReleaseOutcome::AlreadyLost);
        }
        Releasing::new(self.claim.clone()).await
    }

    /// Releases the lock and tells whether it was still held. Does what [`release`](Self::release) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`release`](Self::release).
    pub fn blocking_release(self) -> Result<ReleaseOutcome> {
        block_on(self.release_in_time())
    }

    /// Releases, and does not depend on the guard's runtime to end: the thread that waits for this may be the only one of
    /// that runtime, whose timers do not run then.
    pub(crate) async fn release_in_time(self) -> Result<ReleaseOutcome> {
        let hold = self.claim.hold.clone();
        // A little longer than the engine waits: its answer is the one that counts.
        let patience = release_patience(hold.ttl()) + LEAVE_WITHIN;
        let outcome = within(&mut boxed(self.release()), Moment::now().add(patience)).await;
        outcome.unwrap_or_else(|| Err(hold.error("release", Error::no_answer(patience))))
    }

    /// Gives the lock back after work that is done: that the release failed is not its error, and logged.
    pub(crate) async fn give_back(self) {
        if let Err(error) = self.release().await {
            tracing::warn!(%error, "work done, release failed");
        }
    }

    /// Whether this is a hold of that lock, or of that semaphore.
    pub(crate) fn is_of(&self, store: &Arc<dyn Backend>, name: &Name, kind: Kind) -> bool {
        let hold = &self.claim.hold;
        // The store and not the keeper: both contexts of a keeper have the same.
        Arc::ptr_eq(&hold.context.backend, store)
            && hold.asked_mode.kind() == kind
            && hold.name == *name
    }

    /// Who holds, for people.
    pub fn label(&self) -> &Label {
        &self.claim.hold.label
    }
}

async fn while_held<F: Future>(hold: &Hold, work: F) -> Result<F::Output> {
    let lost = hold.lost_token();
    let output = run_while_held(|| hold.state() == State::Lost, lost.cancelled(), work).await;
    output.ok_or_else(|| hold.lost_error("hold"))
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
