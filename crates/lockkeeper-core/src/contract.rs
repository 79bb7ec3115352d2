//! The contract between the engine and a store: all that a store author implements.
//!
//! A store answers questions; it never waits for another holder, renews on its own or cleans up
//! behind the engine's back. Waiting, renewal, loss, cancellation and cleanup are the engine's, once
//! for all stores. `docs/guides/writing-a-backend.md` builds a store step by step.

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
    /// The store's name as it stands in error messages: `memory`, `redis`, …
    fn name(&self) -> &'static str;

    /// What this store can do. Constant for the life of the backend.
    fn capabilities(&self) -> Capabilities;

    /// Prepares a claim, without any I/O.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) for a mode the store does not declare,
    /// [`InvalidName`](crate::ErrorKind::InvalidName) for a name it cannot even encode,
    /// [`InvalidOption`](crate::ErrorKind::InvalidOption) for a ttl it cannot keep.
    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>>;

    /// Looks into the store from outside, if it allows that.
    fn inspector(&self) -> Option<&dyn Inspector>;
}

/// One owner's claim on one name, from the first ask to the release.
///
/// One driver calls these methods one at a time (`&mut self`), so a claim needs no locking of its
/// own. **Any of the futures may be dropped before it is ready**: that is an answer lost. The store may
/// or may not have obeyed, and the claim must stay usable for whatever is called next.
///
/// **Requests of one claim reach the store in the order of the calls, or not at all.** A release that
/// arrived after a later attempt would free what that one got. Where a connection is replaced, what was
/// sent on the old one must be known to be dead.
///
/// Dropping the claim without `release` must free what keeps it alive on this side (a connection, an
/// open file). A lease then ends by itself in the store; a session ends with its connection.
pub trait Claim: Send + 'static {
    /// Asks for the lock, once.
    ///
    /// - Never waits for another holder.
    /// - Is idempotent per owner: asked again while this owner holds (its last answer may have been
    ///   lost), it answers `Granted` with the same fence and a full lease.
    /// - With [`ClaimSpec::queue`] a contended ask joins the queue or refreshes its place, which stays
    ///   for the ttl; without, it leaves no trace in the store.
    /// - Never overtakes a live waiter, where the store is [`fair`](Capabilities::fair).
    /// - Answers `Contended` only if another claim holds or waits. If several claims asked at the same moment and
    ///   the store gave the lock to none of them, the answer is `Undecided`.
    /// - The fence of a grant is at least `floor`, also if it is handed over later. A claim that already holds with a lower fence has it
    ///   raised to `floor`: so `Quorum` writes the highest fence of a majority back to a majority.
    ///   Stores that do not declare [`Fences::Raisable`] ignore `floor`.
    /// - A floor that is more than [`Fence::MAX_AHEAD`] ahead of the clock that the store takes its fences from is
    ///   refused, unless the store itself has granted such a fence and remembers it. Nothing is changed then.
    /// - No fence is granted twice: a store that has none left fails.
    ///
    /// # Errors
    ///
    /// An error means that it is unknown whether the store granted. A refused floor is
    /// [`Config`](crate::ErrorKind::Config) ([`Fence::refused`], [`Fence::exhausted`]).
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>>;

    /// Waits until something may have changed for this claim, waiting or holding.
    ///
    /// May be late, missed or spurious: the engine has its own timers, so this is speed and never
    /// correctness. A store without notices returns a future that is never ready. It must really
    /// wait: a future that is always ready makes the engine ask in a loop.
    fn changed(&mut self) -> BoxFuture<'_, Change>;

    /// Makes the lease last `ttl` from now. Never creates a hold that the store does not have.
    ///
    /// # Errors
    ///
    /// An error means unknown: neither renewed nor lost.
    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>>;

    /// Turns an exclusive hold into a shared one, without a moment in between, with a lease of `ttl`.
    /// A hold that is shared already stays so.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) where [`Capabilities::downgrade`] is off; any
    /// other error means unknown: still held, in either mode.
    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>>;

    /// Gives up whatever this owner has: a hold, a place in the queue, both or neither. Idempotent,
    /// from any state, and never touches another owner's.
    ///
    /// # Errors
    ///
    /// An error means unknown; the engine asks again.
    fn release(&mut self) -> BoxFuture<'_, Result<Release>>;
}

/// A look into a store from outside: who holds, who waits.
pub trait Inspector: Send + Sync {
    /// Every name that starts with `prefix` and has a holder or a waiter, sorted by name.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) if `prefix` is not empty and the store does not keep the names
    /// of other processes' locks: an empty list would say that none of them is held. A prefix of
    /// [`Slots`](crate::Slots), a name and a NUL, asks for the parts of one semaphore, which have names that can
    /// be computed.
    fn list(&self, prefix: &str) -> BoxFuture<'_, Result<Vec<LockInfo>>>;

    /// What is known of one name: nothing, a lock, a semaphore, or one of each.
    fn show(&self, name: &Name) -> BoxFuture<'_, Result<Vec<LockInfo>>>;

    /// Takes a name away from all who hold it, and says how many those were. They are told that they
    /// lost, and the next in the queue enters. A store that can wait for the old holder, for a bounded time, does so;
    /// for others the order of the two is an exception that [`Inspect::break_lock`](crate::Inspect::break_lock) states.
    fn break_lock(&self, name: &Name) -> BoxFuture<'_, Result<usize>>;

    /// Waits until something may have changed. Like [`Claim::changed`], a hint: a store without
    /// notices returns a future that is never ready.
    fn changed(&self) -> BoxFuture<'_, ()>;
}

/// What a store can do. What is off answers [`Unsupported`](crate::ErrorKind::Unsupported).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is an independent yes or no")]
pub struct Capabilities {
    /// A hold ends in the store by itself when its ttl passes without renewal. A store without
    /// leases keeps a hold for as long as a session lives, and knows no tickets.
    pub leases: bool,
    /// Waiters enter in the order in which they asked, and no try overtakes them. (A try for permits
    /// made of [`Slots`](crate::Slots) may.)
    pub fair: bool,
    /// Waiters are told when their turn comes. Without it the engine asks again, with growing pauses.
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
    /// Each exclusive grant of a name has a higher one than any before.
    Rising,
    /// The same, and [`Claim::attempt`] honours its `floor`.
    Raisable,
}

/// What a claim asks for.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ClaimSpec {
    /// The name to lock. Combinators derive names from it, which may then contain NUL and be longer
    /// than a user's name may be: encode, do not refuse.
    pub name: Name,
    /// Who asks: what the store compares. New for every claim.
    pub owner: Owner,
    /// Who that is, for people.
    pub label: Label,
    /// How much of it.
    pub mode: Mode,
    /// How long a grant, and a place in the queue, lasts without renewal.
    pub ttl: Duration,
    /// Whether a contended ask takes a place in the queue.
    pub queue: bool,
    /// Refuse an attempt, with [`Unavailable`](crate::ErrorKind::Unavailable), while the store may have lost its data less
    /// than this long ago. [`Quorum`](crate::Quorum) sets it for its nodes; `None` everywhere else. A store that never
    /// loses its data, or cannot know, ignores it.
    pub min_uptime: Option<Duration>,
    /// How long whoever asks is going to wait for others, from the first ask on; `None` if for ever. The
    /// engine ends the wait: this is for a store that can also do so for a client that is gone.
    pub max_wait: Option<Duration>,
    /// For a hold that is adopted: the fence that its ticket says it has. A store that keeps fences with its holders, and can
    /// compare them without a further request, answers [`Renewal::Lost`] if it has another.
    pub ticket: Option<Fence>,
    /// Where a store may run what must outlive a call; [`Keeper::close`](crate::Keeper::close) waits
    /// for it.
    pub background: Background,
}

impl ClaimSpec {
    /// A claim by a new owner, exclusive, unqueued and unlabelled: a start for tests and combinators.
    pub fn new(name: Name, ttl: Duration, background: Background) -> Self {
        let (owner, label) = (Owner::random(), Label::default());
        let (mode, queue) = (Mode::Exclusive, false);
        let (min_uptime, max_wait, ticket) = (None, None, None);
        Self { name, owner, label, mode, ttl, queue, min_uptime, max_wait, ticket, background }
    }
}

/// How much of a name a claim asks for.
///
/// Exclusive and shared claims of a name meet each other. Permits are a thing of their own: a
/// semaphore and a mutex of the same name never meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Mode {
    /// All of it: a mutex, or a writer.
    Exclusive,
    /// Beside other shared claims: a reader.
    Shared,
    /// `take` of `of` permits of a semaphore.
    ///
    /// Clients may disagree about `of`: a claim enters only if the permits in use, with its own, stay
    /// within the smallest `of` of all who hold and of itself. ([`Slots`](crate::Slots) can promise only
    /// the largest.)
    Permits {
        /// How many this claim takes.
        take: u32,
        /// How many there are, as far as this claim knows.
        of: u32,
    },
}

impl Mode {
    /// Which of a name's two things the mode is for.
    pub fn kind(self) -> Kind {
        match self {
            Mode::Exclusive | Mode::Shared => Kind::Lock,
            Mode::Permits { .. } => Kind::Semaphore,
        }
    }
}

/// The two things that a name can stand for. They never meet.
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
    /// The claim holds.
    Granted(Grant),
    /// Another claim holds, or waits before this one.
    Contended {
        /// When the engine asks again.
        retry: Retry,
        /// Which claim holds, where the store can tell. [`Quorum`](crate::Quorum) needs it to tell a lock that is
        /// taken from a vote that was split between claims that asked at the same moment.
        holder: Holder,
    },
    /// The store could not decide: as far as it knows no claim has the lock, and this one has not got it either, because
    /// several asked at the same moment and none got a majority, or all of its permits. Nothing of this attempt is left
    /// in the store. The engine asks again after a random pause.
    Undecided,
}

/// When to repeat an attempt that was contended.
///
/// On a store without [`push`](Capabilities::push) the engine polls with growing pauses in any case, and takes only
/// [`After`](Self::After) as a hint to poll sooner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Retry {
    /// The store notifies this claim through [`Claim::changed`]. The engine still refreshes the claim's place in the
    /// queue every third of the ttl.
    #[default]
    OnNotify,
    /// As `OnNotify`, and it is worth asking again after this time even without a notice: the remaining lease of the
    /// holder, as far as it matters to this claim.
    After(Duration),
    /// The store cannot notify this claim, and knows no time: the engine polls with growing pauses.
    Poll,
}

impl Retry {
    /// Combines the answers of several stores: polls if one of them needs it, and takes the earliest time.
    #[must_use]
    pub fn sooner(self, other: Self) -> Self {
        match (self, other) {
            (Self::Poll, _) | (_, Self::Poll) => Self::Poll,
            (Self::After(a), Self::After(b)) => Self::After(a.min(b)),
            (Self::OnNotify, retry) | (retry, Self::OnNotify) => retry,
        }
    }
}

/// Who holds what an attempt did not get.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Holder {
    /// One claim, exclusively.
    Owner(Owner),
    /// One or more shared claims. They do not exclude each other, so a store that is asked by a writer
    /// need not tell them apart.
    Readers,
    /// The store cannot tell. `Quorum` takes all such refusals for those of one holder.
    Unknown,
}

/// What the store gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// The fencing token. An exclusive grant's is higher than that of any exclusive grant of the name
    /// before it; any other grant's is not lower.
    pub fence: Option<Fence>,
    /// How long the store keeps it without renewal; `None` if for as long as the session lives. Then
    /// only [`Renewal::Lost`] or [`Change::Lost`] end it: a session that the store may end because this
    /// side has gone silent should say `Some` here, else its holder would never learn of it.
    pub valid_for: Option<Duration>,
}

/// What [`Claim::changed`] saw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Whoever released handed the lock to this claim: no need to ask. The engine counts its validity
    /// from when this claim last sent an attempt that was answered "contended", so this may only be
    /// said of a grant that was made after that answer. If that is not certain, say `LookAgain`.
    Granted(Grant),
    /// Something happened: a waiter asks again, a holder renews at once to find out.
    LookAgain,
    /// The hold is gone, for the reason that the store knows.
    Lost(LossReason),
}

/// The answer to [`Claim::renew`] and [`Claim::downgrade`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewal {
    /// The lease now lasts this long.
    Renewed {
        /// Counted from before the request was sent.
        valid_for: Duration,
    },
    /// Held, without a lease to renew.
    Held,
    /// The hold is gone, for the reason that the store knows: [`SessionEnded`](LossReason::SessionEnded) if its session
    /// is over, [`Broken`](LossReason::Broken) if there is no record of the hold. The engine reports `Expired` instead
    /// if the deadline has passed.
    Lost(LossReason),
}

/// The answer to [`Claim::release`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// This owner held, and no longer does.
    Released,
    /// This owner did not hold (it may have been waiting), and does not.
    WasNotHeld,
}

/// What inspection knows of one lock or semaphore.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct LockInfo {
    /// Its name.
    pub name: Name,
    /// Which of the name's two things.
    pub kind: Kind,
    /// Who holds it, the oldest first.
    pub holders: Vec<Participant>,
    /// Who waits, in the order of the queue.
    pub waiters: Vec<Participant>,
}

/// A holder or a waiter, as inspection sees it. What a store cannot tell is `None`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Participant {
    /// Its owner id.
    pub owner: Option<Owner>,
    /// Who that is, for people. `None` for a client that left no label, or one that cannot be shown.
    pub label: Option<Label>,
    /// How much it holds or asks for.
    pub mode: Mode,
    /// A holder's fencing token.
    pub fence: Option<Fence>,
    /// How long it has held or waited.
    pub age: Option<Duration>,
    /// What is left of its lease or of its place in the queue.
    pub remaining: Option<Duration>,
}

impl Participant {
    /// Returns the label, or `(unknown)` without one.
    pub fn who(&self) -> &str {
        Label::or_unknown(self.label.as_ref())
    }
}
