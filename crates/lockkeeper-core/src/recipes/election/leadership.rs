//! The guard of an elected leader.

use std::fmt;
use std::future::Future;
use std::time::Instant;

use tokio_util::sync::CancellationToken;

use super::election_name;
use crate::engine::hold::ReleaseOutcome;
use crate::error::Result;
use crate::fence::Fence;
use crate::locks::guard::Guard;
use crate::loss::LossReason;
use crate::owner::Owner;

/// The guard of a leader: held until it [resigns](Self::resign), is dropped or [loses](Self::lost) the leadership.
///
/// It wraps a [`Guard`]: the lease is renewed in the background, and released when this is dropped.
#[must_use = "dropping it releases the leadership at once"]
pub struct Leadership {
    pub(super) guard: Guard,
    pub(super) term: Fence,
}

impl Leadership {
    /// Returns the term: the [fence](Guard::fence) of the lock, higher than that of any earlier leader.
    pub fn term(&self) -> Fence {
        self.term
    }

    /// Returns the name of the election.
    pub fn name(&self) -> &str {
        election_name(self.guard.name())
    }

    /// Returns the id that identifies this leader in the store.
    pub fn owner(&self) -> Owner {
        self.guard.owner()
    }

    /// Returns whether this process leads, as far as it knows, without I/O. See [`Guard::is_held`].
    pub fn is_leader(&self) -> bool {
        self.guard.is_held()
    }

    /// Returns why the leadership was lost, or `None` while it is held. See [`Guard::loss_reason`].
    pub fn loss_reason(&self) -> Option<LossReason> {
        self.guard.loss_reason()
    }

    /// Returns when the leadership will be lost if no renewal succeeds; `None` if the store needs no renewals.
    pub fn expires_at(&self) -> Option<Instant> {
        self.guard.expires_at()
    }

    /// Returns a future that completes when the leadership is lost, before another candidate can be elected. The
    /// [exceptions](crate::Guard#what-it-does-not-guarantee) of every lock apply.
    ///
    /// The future does not borrow the leadership. Resigning is not a loss: after it, the future stays pending.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        self.guard.lost()
    }

    /// Returns a token that is cancelled when the leadership is lost.
    pub fn lost_token(&self) -> CancellationToken {
        self.guard.lost_token()
    }

    /// Runs a future while this process leads, and drops it when the leadership is lost. See [`Guard::while_held`].
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) if the leadership was lost before the work completed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `work`. This process still leads.
    pub async fn while_leader<F: Future>(&self, work: F) -> Result<F::Output> {
        self.guard.while_held(work).await
    }

    /// Releases the leadership, and returns whether it was still held. End the leader's work first.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the store did not confirm the release. It is retried in the
    /// background.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the release continues in the background if the future is dropped.
    pub async fn resign(self) -> Result<ReleaseOutcome> {
        self.guard.release().await
    }

    /// Releases the leadership, and returns whether it was still held. The [blocking](crate::blocking) form of
    /// [`resign`](Self::resign).
    ///
    /// # Errors
    ///
    /// Same as [`resign`](Self::resign).
    pub fn blocking_resign(self) -> Result<ReleaseOutcome> {
        self.guard.blocking_release()
    }
}

impl fmt::Debug for Leadership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leadership")
            .field("name", &self.name())
            .field("term", &self.term)
            .field("state", &self.guard.state())
            .finish()
    }
}
