//! The contract between the engine and a store: the traits that a store author implements.
//!
//! A store executes the requests of single claims. The engine decides when to attempt, wait, renew, retry and clean up,
//! once for all stores. `docs/guides/writing-a-backend.md` builds a store step by step.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use crate::background::Background;
use crate::error::Result;
use crate::fence::Fence;
use crate::loss::LossReason;
use crate::name::{Label, Name};
use crate::owner::Owner;

/// A boxed future, so that the contract stays object-safe and readable.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A store that can keep locks.
pub trait Backend: fmt::Debug + Send + Sync + 'static {
    /// Returns the store's name in error messages: `memory`, `redis`, …
    fn name(&self) -> &'static str;

    /// Returns what this store supports. The result never changes.
    fn capabilities(&self) -> Capabilities;

    /// Creates a claim, without I/O.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) for a mode the store does not declare,
    /// [`InvalidName`](crate::ErrorKind::InvalidName) for a name it cannot encode,
    /// [`InvalidOption`](crate::ErrorKind::InvalidOption) for a TTL it cannot keep.
    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>>;

    /// Returns the inspector, or `None` if this store does not support inspection.
    fn inspector(&self) -> Option<&dyn Inspector>;
}

/// One owner's claim on one name, from the first attempt to the release.
///
/// One driver calls these methods one at a time (`&mut self`), so a claim needs no locks.
///
/// **Any of the futures may be dropped before it is ready.** The store may or may not have executed its request. The
/// claim must accept any call after that.
///
/// **Requests of one claim reach the store in the order of the calls, or not at all.** A release that arrived after the
/// next attempt would free the new grant. Before a claim sends on a new connection, it must be certain that no request
/// on the old one can still reach the store.
///
/// Dropping the claim without `release` must free its resources in this process (a connection, an open file). A lease
/// then expires in the store; a session ends with its connection or file.
pub trait Claim: Send + 'static {
    /// Attempts to acquire the lock, once.
    ///
    /// - Never waits for another holder.
    /// - Is idempotent per owner. If this owner already holds the lock (an earlier answer may have been lost), the answer
    ///   is `Granted` with the same fence and a full lease.
    /// - With [`ClaimSpec::queue`], a contended attempt joins the queue or refreshes its entry, which lasts for the TTL.
    ///   Without it, a contended attempt leaves no state in the store.
    /// - Never overtakes a live waiter, if the store is [`fair`](Capabilities::fair).
    /// - Returns `Contended` only if another claim holds or waits. If concurrent attempts refuse each other and none is
    ///   granted, the answer is `Undecided`.
    /// - The fence of a grant is at least `floor`, even if the lock is handed off to this claim later. If the claim already
    ///   holds with a lower fence, that fence is raised to `floor`. `Quorum` uses this to write the highest fence of a
    ///   majority back to a majority. Stores that do not declare [`Fences::Raisable`] ignore `floor`.
    /// - A store refuses a floor that is more than [`Fence::MAX_AHEAD`] ahead of the clock from which it takes its fences,
    ///   unless it has granted such a fence itself and remembers it. A refused attempt changes nothing.
    /// - No fence is granted twice. A store that has no higher fence left returns an error.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) if the floor is refused ([`Fence::refused`]) or no fence is left
    /// ([`Fence::exhausted`]). After any other error it is unknown whether the store granted the lock.
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>>;

    /// Waits for a notification. The engine calls it while the claim waits for the lock and while it holds the lock.
    ///
    /// Notifications may be late, missed or spurious: the engine has its own timers, so they affect latency and not
    /// correctness. A store without notifications returns a future that is never ready. If the future is always ready,
    /// the engine sends up to one request per millisecond.
    fn changed(&mut self) -> BoxFuture<'_, Change>;

    /// Makes the lease last `ttl` from now. Never creates a hold that the store does not have.
    ///
    /// # Errors
    ///
    /// After an error the result is unknown: neither renewed nor lost.
    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>>;

    /// Atomically turns an exclusive hold into a shared one, with a lease of `ttl`. A shared hold stays shared.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) if [`Capabilities::downgrade`] is off. After any other error the
    /// mode is unknown; the lock is still held.
    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>>;

    /// Sets the fence of the hold, if a combinator granted a higher one than the store did. Without I/O.
    ///
    /// From then on, `downgrade` and `release` carry the fence to the store. When they end an exclusive hold, the store
    /// remembers the fence until its clock has passed it: every later exclusive grant has a higher fence, and no other grant
    /// a lower one. The store accepts a fence that is up to a quarter of the TTL ahead of its clock. It must not accept one
    /// that is more than the TTL ahead, which may be that of a forged ticket.
    ///
    /// A store whose grants never have [`fence_is_past`](Grant::fence_is_past) set ignores it.
    fn set_fence(&mut self, fence: Fence);

    /// Releases the hold and the queue entry of this owner, if it has them. Idempotent, allowed in any state, and
    /// without effect on other owners.
    ///
    /// # Errors
    ///
    /// After an error the result is unknown. The engine retries.
    fn release(&mut self) -> BoxFuture<'_, Result<Release>>;
}

/// Inspects the holders and waiters of a store.
pub trait Inspector: Send + Sync {
    /// Returns every name that starts with `prefix` and has a holder or a waiter, sorted by name.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) if `prefix` is not empty and the store does not keep the names
    /// of other processes' locks: an empty list would mean that none of them is held. Exception: a name followed by NUL is
    /// the prefix of the locks that [`Slots`](crate::Slots) derives for the semaphore of that name. Such a store can
    /// compute their names, and must list them.
    fn list(&self, prefix: &str) -> BoxFuture<'_, Result<Vec<LockInfo>>>;

    /// Returns the lock and the semaphore of one name. Omits one that has no holder and no waiter.
    fn show(&self, name: &Name) -> BoxFuture<'_, Result<Vec<LockInfo>>>;

    /// Removes all holds of a name and returns their number. The holders are notified of the loss, and the next waiter is
    /// granted the lock. If possible, the store waits for a bounded time until the old holder has stopped, and grants the
    /// lock after that. Otherwise the next holder may start before the old one stops, as
    /// [`Inspect::break_lock`](crate::Inspect::break_lock) states.
    fn break_lock(&self, name: &Name) -> BoxFuture<'_, Result<usize>>;

    /// Waits until a lock of the store may have changed. A hint, like [`Claim::changed`]: a store without notifications
    /// returns a future that is never ready.
    fn changed(&self) -> BoxFuture<'_, ()>;
}

/// What a store supports. Operations that it does not support fail with [`Unsupported`](crate::ErrorKind::Unsupported).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(clippy::struct_excessive_bools, reason = "the capabilities are independent")]
pub struct Capabilities {
    /// A hold expires in the store when its TTL passes without renewal. On a store without leases a hold ends with its
    /// session, and tickets are not supported.
    pub leases: bool,
    /// Waiters are granted the lock in the order of their first attempts, and no try overtakes them. Exception: a try for
    /// permits of [`Slots`](crate::Slots) may overtake waiters.
    pub fair: bool,
    /// The store notifies the waiter that is next when the lock is free for it. Without `push`, the engine polls with
    /// backoff; a notification then only makes it poll sooner.
    pub push: bool,
    /// [`Mode::Shared`].
    pub shared: bool,
    /// [`Mode::Permits`].
    pub permits: bool,
    /// [`Claim::downgrade`].
    pub downgrade: bool,
    /// Which fencing tokens grants carry.
    pub fences: Fences,
}

/// Which fencing tokens a store's grants carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fences {
    /// None.
    #[default]
    None,
    /// Each exclusive grant of a name has a higher fence than every exclusive grant before it.
    Rising,
    /// The same, and [`Claim::attempt`] honours its `floor`.
    Raisable,
}

/// The parameters of a claim.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ClaimSpec {
    /// The name to lock. Stores that wrap others, such as [`Slots`](crate::Slots), derive longer names that contain NUL. A
    /// store must accept these.
    pub name: Name,
    /// The owner id that the store compares. New for every claim.
    pub owner: Owner,
    /// The human-readable name of the holder or waiter.
    pub label: Label,
    /// The mode.
    pub mode: Mode,
    /// How long a grant, and a queue entry, lasts without renewal.
    pub ttl: Duration,
    /// Whether a contended attempt joins the queue.
    pub queue: bool,
    /// The minimum time since the last event in which the store may have lost its data, such as a restart. Until that time has
    /// passed, the store refuses attempts with [`Unavailable`](crate::ErrorKind::Unavailable). A store that never loses its
    /// data, or cannot detect such events, ignores it. [`Quorum`](crate::Quorum) sets it for its nodes; it is `None` everywhere else.
    pub min_uptime: Option<Duration>,
    /// How long the caller waits for other holders, counted from the first attempt; `None` means without limit. The engine
    /// ends the wait. A server can use this to end the wait of a client that no longer exists.
    pub max_wait: Option<Duration>,
    /// For a hold that is adopted, the fence in its ticket. If the store can compare it with the fence of the hold without
    /// a further request, it returns [`Renewal::Lost`] if the two differ.
    pub ticket: Option<Fence>,
    /// Where a store runs work that outlives a call. [`Keeper::close`](crate::Keeper::close) waits for it.
    pub background: Background,
}

impl ClaimSpec {
    /// Creates an exclusive claim of a new owner, with the default label and without a queue.
    pub fn new(name: Name, ttl: Duration, background: Background) -> Self {
        let (owner, label) = (Owner::random(), Label::default());
        let (mode, queue) = (Mode::Exclusive, false);
        let (min_uptime, max_wait, ticket) = (None, None, None);
        Self { name, owner, label, mode, ttl, queue, min_uptime, max_wait, ticket, background }
    }
}

/// The mode of a claim.
///
/// Exclusive and shared claims of a name exclude each other. Permits are separate: a semaphore and a mutex of the same
/// name are two locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Mode {
    /// Exclusive: a mutex, or a writer.
    Exclusive,
    /// Shared with other shared claims: a reader.
    Shared,
    /// `take` of `of` permits of a semaphore.
    ///
    /// Clients may use different values of `of`. A claim is granted only if all permits in use, including its own, do not
    /// exceed the smallest `of` among the holders and itself. Exception: with [`Slots`](crate::Slots) the limit is the
    /// largest `of`.
    Permits {
        /// The number of permits this claim takes.
        take: u32,
        /// The number of permits of the semaphore, as this claim knows it.
        of: u32,
    },
}

impl Mode {
    /// Returns the kind of lock that the mode belongs to.
    pub fn kind(self) -> Kind {
        match self {
            Mode::Exclusive | Mode::Shared => Kind::Lock,
            Mode::Permits { .. } => Kind::Semaphore,
        }
    }
}

/// The two kinds of locks that a name can have. They do not exclude each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Kind {
    /// A mutex or readers-writer lock.
    Lock,
    /// A semaphore.
    Semaphore,
}

/// The answer to [`Claim::attempt`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attempt {
    /// The claim holds the lock.
    Granted(Grant),
    /// Another claim holds the lock, or waits before this one.
    Contended {
        /// When the engine attempts again.
        retry: Retry,
        /// The holder, if the store knows it. [`Quorum`](crate::Quorum) compares the holders on its nodes: if none has a
        /// majority, the vote was split between concurrent attempts.
        holder: Holder,
    },
    /// Concurrent attempts refused each other: none got a majority, or all permits that it needs. As far as the store
    /// knows, no claim holds the lock. The attempt has left no state in the store. The engine attempts again after a random
    /// pause.
    Undecided,
}

/// When to repeat a contended attempt.
///
/// On a store without [`push`](Capabilities::push) the engine always polls with backoff, and [`After`](Self::After) only
/// makes it poll sooner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Retry {
    /// The store notifies this claim through [`Claim::changed`]. The engine still refreshes the queue entry every third
    /// of the TTL.
    #[default]
    OnNotify,
    /// As `OnNotify`, but the engine attempts again after this time at the latest. Usually the remaining lease of the
    /// holder.
    After(Duration),
    /// The store can neither notify this claim nor name a time: the engine polls with backoff.
    Poll,
}

impl Retry {
    /// Combines two answers: `Poll` if either is `Poll`, otherwise the earlier time.
    #[must_use]
    pub fn sooner(self, other: Self) -> Self {
        match (self, other) {
            (Self::Poll, _) | (_, Self::Poll) => Self::Poll,
            (Self::After(a), Self::After(b)) => Self::After(a.min(b)),
            (Self::OnNotify, retry) | (retry, Self::OnNotify) => retry,
        }
    }
}

/// The holder of a contended lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Holder {
    /// One claim, exclusively.
    Owner(Owner),
    /// One or more shared claims. They do not exclude each other, so a store need not distinguish them.
    Readers,
    /// Not known to the store. `Quorum` treats all such refusals as caused by one holder.
    Unknown,
}

/// A grant of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// The fencing token. The fence of an exclusive grant is higher than that of every earlier exclusive grant of the
    /// name. The fence of a shared grant, or of permits, is not lower than these.
    pub fence: Option<Fence>,
    /// Whether the store takes its fences from a clock in microseconds, and that clock had reached this fence when the store
    /// answered. By the time the lease expires, the clock is then past the fence by at least the TTL, so
    /// [`Quorum`](crate::Quorum) needs one round trip less. `false` if this is not certain.
    pub fence_is_past: bool,
    /// How long the store keeps the hold without renewal, or `None` if the hold lasts as long as its session. With `None`,
    /// the engine learns of a loss only from [`Renewal::Lost`] and [`Change::Lost`]. A store that ends the session of a
    /// silent client must use `Some`: a client that is cut off receives neither.
    pub valid_for: Option<Duration>,
}

/// The result of [`Claim::changed`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Another claim released the lock, and the store handed it off to this one. The engine counts the validity of the
    /// grant from when it sent the last attempt that was answered with `Contended`. So the store must have made the grant
    /// after that answer. If this is not certain, return `LookAgain`.
    Granted(Grant),
    /// The state of the lock may have changed. A waiter attempts again, and a holder renews at once.
    LookAgain,
    /// The hold is lost, for this reason.
    Lost(LossReason),
}

/// The answer to [`Claim::renew`] and [`Claim::downgrade`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewal {
    /// The lease was renewed.
    Renewed {
        /// How long the lease lasts. The engine counts it from before the request was sent.
        valid_for: Duration,
    },
    /// The hold exists, and has no lease to renew.
    Held,
    /// The hold is lost: [`SessionEnded`](LossReason::SessionEnded) if its session has ended,
    /// [`Broken`](LossReason::Broken) if the store has no record of the hold. The engine reports `Expired` instead if
    /// the deadline has passed.
    Lost(LossReason),
}

/// The answer to [`Claim::release`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// This owner held the lock, and no longer does.
    Released,
    /// This owner did not hold the lock. It may have been waiting.
    WasNotHeld,
}

/// The state of one lock or semaphore, as inspection reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct LockInfo {
    /// Its name.
    pub name: Name,
    /// Its kind.
    pub kind: Kind,
    /// The holders, the oldest first.
    pub holders: Vec<Participant>,
    /// The waiters, in the order of the queue.
    pub waiters: Vec<Participant>,
}

/// A holder or a waiter, as inspection reports it. A field that the store does not know is `None`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Participant {
    /// Its owner id.
    pub owner: Option<Owner>,
    /// Its label. `None` if the client set none, or an invalid one.
    pub label: Option<Label>,
    /// The mode of its claim.
    pub mode: Mode,
    /// The fencing token of a holder.
    pub fence: Option<Fence>,
    /// How long it has held or waited.
    pub age: Option<Duration>,
    /// The remaining time of its lease or queue entry.
    pub remaining: Option<Duration>,
}

impl Participant {
    /// Returns the label, or `(unknown)` if there is none.
    pub fn who(&self) -> &str {
        Label::or_unknown(self.label.as_ref())
    }
}
