//! Elections: one leader at a time, with terms that only grow.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::backoff::Backoff;
use crate::blocking_runtime::block_on;
use crate::contract::{Fences, Kind, Mode, Participant};
use crate::engine::context::KeeperContext;
use crate::engine::hold::ReleaseOutcome;
use crate::error::{Error, ErrorKind, Result};
use crate::fence::Fence;
use crate::locks::guard::Guard;
use crate::locks::handle::LockHandle;
use crate::locks::inspect::Inspect;
use crate::locks::keeper::Keeper;
use crate::loss::LossReason;
use crate::name::Label;
use crate::options::option_setters;
use crate::owner::Owner;

/// What stands before an election's name in the store.
pub(crate) const PREFIX: &str = "election/";

/// The first pause, and the longest, before a campaign that failed is begun anew.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// An election: of all who campaign, one leads at a time. From [`Keeper::election`].
///
/// # What it guarantees
///
/// What a [`Mutex`](crate::Mutex) does, since it is one: a leader knows that it leads no more *before* another can be
/// elected, and each leader has a higher [term](Leadership::term) than the one before. Where the store is
/// [fair](crate::Capabilities::fair), who campaigned first is next. The exceptions are those of a
/// [`Guard`](crate::Guard#what-it-does-not): a leader that is deposed by [`break_lock`](crate::Inspect::break_lock), or whose session the
/// server ends, is told some milliseconds after the store has freed the lock.
///
/// # What it does not
///
/// A process may be paused between a look and the next line, for longer than its lease, and then act as
/// a leader that it no longer is. Where that does harm, send the term along with whatever the leader does,
/// and let the other side refuse a lower one than it has seen.
///
/// # Names
///
/// In the store the election `service` is the lock `election/service`. So an election and a mutex of
/// the same name do not meet, `lockkeeper ls election/` lists all leaders (not on
/// PostgreSQL, which keeps hashes of names: `lockkeeper show election/NAME` works there), and `lockkeeper break
/// election/service` deposes one. The prefix counts against the 1 KiB of a name.
///
/// # Examples
///
/// ```
/// # use lockkeeper_core as lockkeeper;
/// use lockkeeper::{Keeper, Memory};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// let keeper = Keeper::new(Memory::new()).label("node-1");
/// let election = keeper.election("service");
///
/// let leadership = election.campaign().await?; // waits until elected
/// assert_eq!(election.leader().await?.unwrap().who(), "node-1");
/// let term = leadership.term();
/// leadership.resign().await?;
///
/// assert!(election.campaign().await?.term() > term);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Election {
    keeper: Keeper,
    lock: LockHandle,
}

impl Keeper {
    /// Returns an election, in which one of all candidates leads at a time.
    pub fn election(&self, name: impl AsRef<str>) -> Election {
        Election::new(self.clone(), self.lock(lock_name(name.as_ref())))
    }
}

impl Election {
    fn new(keeper: Keeper, lock: LockHandle) -> Self {
        Self { keeper, lock }
    }

    option_setters!(lock.options);

    /// Waits until elected, for at most `max_wait`.
    ///
    /// # Errors
    ///
    /// Those of [`Mutex::lock`](crate::Mutex::lock), among them [`TimedOut`](ErrorKind::TimedOut) past `max_wait` and
    /// [`Unavailable`](ErrorKind::Unavailable) if the store does not answer: it is not asked again.
    /// [`Unsupported`](ErrorKind::Unsupported) if the store has no fences, or was told to make none: there
    /// would be no terms.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the place in the queue is given up, and so is a leadership that was just granted.
    pub async fn campaign(&self) -> Result<Leadership> {
        self.campaign_on(self.lock.context.live()).await
    }

    /// Blocks until elected, for at most `max_wait`. Does what [`campaign`](Self::campaign) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`campaign`](Self::campaign).
    ///
    /// # Examples
    ///
    /// ```
    /// # use lockkeeper_core as lockkeeper;
    /// use lockkeeper::{Keeper, Memory};
    ///
    /// # fn main() -> lockkeeper::Result<()> {
    /// let election = Keeper::new(Memory::new()).election("service");
    /// let leadership = election.blocking_campaign()?;
    /// while leadership.is_leader() {
    ///     println!("leading in term {}", leadership.term());
    /// #   break;
    /// }
    /// leadership.blocking_resign()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn blocking_campaign(&self) -> Result<Leadership> {
        block_on(self.campaign_on(self.lock.context.for_blocking()))
    }

    async fn campaign_on(&self, context: &Arc<KeeperContext>) -> Result<Leadership> {
        let no_terms = || self.lock.error(Error::unsupported("fences, and so no terms"));
        // Asked before anything is taken.
        if context.capabilities.fences == Fences::None {
            return Err(no_terms());
        }
        let guard = self.lock.acquire_on(context, Mode::Exclusive).await?;
        let term = guard.fence().ok_or_else(no_terms)?;
        tracing::info!(election = self.name(), %term, "elected");
        Ok(Leadership { guard, term })
    }

    /// Campaigns, runs the work that `work` makes while this process leads, and campaigns again when the
    /// leadership is lost; with the output of the first work that ends by itself, it resigns and returns.
    ///
    /// - **The work stops first.** It is dropped when the leadership is lost, before another can be
    ///   elected; when it ended by itself, before resigning; and when this future is dropped, before the
    ///   leadership is given up. Only code that awaits can be stopped: a long computation runs on to
    ///   its next await.
    /// - **It outlives an outage.** While the store does not answer it asks again, with growing
    ///   pauses of up to five seconds, and says so by `tracing`. A leader whose store is down leads until its
    ///   lease ends, not longer.
    /// - Work that ends just as the leadership is lost counts as stopped: its output is dropped, and
    ///   the next term does it again.
    ///
    /// # Errors
    ///
    /// Those of [`campaign`](Self::campaign) that trying again does not mend: a bad name or option,
    /// a store without fences, a keeper that was closed.
    ///
    /// # Panics
    ///
    /// If the work does. The leadership is given up, in the background.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops the work first, then gives up the leadership in the background;
    /// [`Keeper::close`] waits for that.
    ///
    /// # Examples
    ///
    /// ```
    /// # use lockkeeper_core as lockkeeper;
    /// use lockkeeper::{Keeper, Memory};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockkeeper::Result<()> {
    /// let keeper = Keeper::new(Memory::new());
    /// let work = |term| async move {
    ///     println!("leading in term {term}");
    ///     // … until there is nothing left to do
    /// };
    /// keeper.election("service").run_while_leader(work).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn run_while_leader<F: Future>(
        &self,
        // Not `AsyncFnMut`: what it makes cannot be spawned, as of Rust 1.95 (its futures borrow).
        mut work: impl FnMut(Fence) -> F,
    ) -> Result<F::Output> {
        loop {
            let leadership = self.campaign_until_elected(self.lock.context.live()).await?;
            let term = leadership.term();
            // The work is a temporary of this statement: however it ends, it is gone before the
            // leadership is. It is created inside, so that none of it runs after the deadline.
            match leadership.while_leader(async { work(term).await }).await {
                Ok(output) => {
                    leadership.resign_after_work().await;
                    return Ok(output);
                }
                Err(error) => {
                    tracing::warn!(%error, %term, "leadership lost: the work is stopped");
                }
            }
        }
    }

    /// Campaigns, runs `work` on this thread while this process leads, and campaigns again if the leadership was lost
    /// before the work was done. With the output of the first work during which it was not, resigns and returns.
    ///
    /// For [blocking code](crate::blocking). Like [`run_while_leader`](Self::run_while_leader) it outlives an outage of the
    /// store. Unlike there, **the work cannot be stopped**: when the leadership is lost, the work runs on until it
    /// returns, while another process may lead. It has the [`Leadership`] to ask, at each step:
    /// [`is_leader`](Leadership::is_leader). Where a step too many does harm, send the [term](Leadership::term) along and let
    /// the other side refuse a lower one.
    ///
    /// # Errors
    ///
    /// As [`run_while_leader`](Self::run_while_leader).
    ///
    /// # Panics
    ///
    /// If the work does. The leadership is given up, in the background.
    ///
    /// # Examples
    ///
    /// ```
    /// # use lockkeeper_core as lockkeeper;
    /// use lockkeeper::{Keeper, Memory};
    ///
    /// # fn main() -> lockkeeper::Result<()> {
    /// let election = Keeper::new(Memory::new()).election("service");
    /// # let mut steps = 0;
    /// election.blocking_run_while_leader(|leadership| {
    ///     while leadership.is_leader() {
    ///         println!("one step in term {}", leadership.term());
    /// #       steps += 1;
    /// #       if steps == 3 { break }
    ///     }
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn blocking_run_while_leader<T>(
        &self,
        mut work: impl FnMut(&Leadership) -> T,
    ) -> Result<T> {
        loop {
            let context = self.lock.context.for_blocking();
            let leadership = block_on(self.campaign_until_elected(context))?;
            let output = work(&leadership);
            if leadership.is_leader() {
                block_on(leadership.resign_after_work());
                return Ok(output);
            }
            let (term, error) = (leadership.term(), leadership.guard.lost_error());
            tracing::warn!(%error, %term, "leadership lost during the work: campaigning again");
        }
    }

    /// Campaigns, however often the store fails to answer.
    async fn campaign_until_elected(&self, context: &Arc<KeeperContext>) -> Result<Leadership> {
        let mut backoff = Backoff::new(FIRST_PAUSE, MAX_PAUSE);
        let mut failures = 0_u32;
        loop {
            match self.campaign_on(context).await {
                Ok(leadership) => {
                    if failures > 0 {
                        tracing::info!(election = self.name(), failures, "the store answers again");
                    }
                    return Ok(leadership);
                }
                // Nobody is to be alarmed by an election that goes on.
                Err(error) if error.kind() == ErrorKind::TimedOut => {
                    tracing::debug!(%error, "not elected, campaigning again");
                }
                Err(error) if error.is_retryable() => {
                    failures += 1;
                    tracing::warn!(%error, failures, "the campaign failed, trying again");
                }
                Err(error) => return Err(error),
            }
            // Also after a time-out: with a max_wait of zero this would go round and round.
            tokio::time::sleep(backoff.next()).await;
        }
    }

    /// Looks who leads; `None` if nobody does.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](ErrorKind::Unsupported) if the store cannot be looked into,
    /// [`Unavailable`](ErrorKind::Unavailable) if it does not answer.
    pub async fn leader(&self) -> Result<Option<Leader>> {
        self.look(&self.keeper.inspect()?).await
    }

    /// Returns who leads; `None` if no process does. Does what [`leader`](Self::leader) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`leader`](Self::leader).
    pub fn blocking_leader(&self) -> Result<Option<Leader>> {
        block_on(self.leader())
    }

    async fn look(&self, inspect: &Inspect) -> Result<Option<Leader>> {
        let shown = inspect.show_name(self.lock.name.as_ref().map_err(Error::clone)?).await?;
        let locks = shown.into_iter().filter(|info| info.kind == Kind::Lock);
        Ok(locks.flat_map(|info| info.holders).next().map(Leader::new))
    }

    /// Watches who leads: [`next`](Observe::next) tells it at once, and then at each change.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](ErrorKind::Unsupported) if the store cannot be looked into.
    ///
    /// # Examples
    ///
    /// ```
    /// # use lockkeeper_core as lockkeeper;
    /// # use lockkeeper::{Keeper, Memory};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockkeeper::Result<()> {
    /// # let keeper = Keeper::new(Memory::new());
    /// let election = keeper.election("service");
    /// let mut observe = election.observe()?;
    /// assert_eq!(observe.next().await?, None);
    ///
    /// let leadership = election.campaign().await?;
    /// let leader = observe.next().await?.unwrap();
    /// assert_eq!(leader.term, Some(leadership.term()));
    /// # Ok(())
    /// # }
    /// ```
    pub fn observe(&self) -> Result<Observe> {
        Ok(Observe {
            election: self.clone(),
            inspect: self.keeper.inspect()?,
            begun: false,
            told: None,
        })
    }

    /// The name that the election was given.
    pub fn name(&self) -> &str {
        self.lock.name.as_deref().map_or("", short)
    }
}

/// The election's own part of a lock's name.
fn short(name: &str) -> &str {
    name.strip_prefix(PREFIX).unwrap_or(name)
}

/// The name of the lock that an election is.
fn lock_name(name: &str) -> Arc<str> {
    // An empty name stays one, and is refused like any other.
    if name.is_empty() { "".into() } else { format!("{PREFIX}{name}").into() }
}

/// Being the leader, until it [resigns](Self::resign), is dropped or [loses](Self::lost) it.
///
/// A [`Guard`] in other words: renewed in the background, given up when dropped.
#[must_use = "dropping it gives up the leadership at once"]
pub struct Leadership {
    guard: Guard,
    term: Fence,
}

impl Leadership {
    /// The term: the lock's [fence](Guard::fence), higher than that of any leader before.
    pub fn term(&self) -> Fence {
        self.term
    }

    /// The name of the election.
    pub fn name(&self) -> &str {
        short(self.guard.name())
    }

    /// The id that the store knows this leader by.
    pub fn owner(&self) -> Owner {
        self.guard.owner()
    }

    /// Whether this process leads, as far as it knows: a local belief, without a question to the store.
    pub fn is_leader(&self) -> bool {
        self.guard.is_held()
    }

    /// Why the leadership was lost; `None` while it is held. As [`Guard::loss_reason`](crate::Guard::loss_reason).
    pub fn loss_reason(&self) -> Option<LossReason> {
        self.guard.loss_reason()
    }

    /// When the leadership will be lost if no renewal succeeds before; `None` if the store needs none.
    pub fn expires_at(&self) -> Option<Instant> {
        self.guard.expires_at()
    }

    /// Ready when the leadership is lost, before another can be elected (with the [exceptions](Election#what-it-guarantees)
    /// of every lock); never if it is not.
    ///
    /// The future does not borrow the leadership. Resigning is not losing: after that it stays pending.
    ///
    /// # Cancel safety
    ///
    /// Dropping it changes nothing.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        self.guard.lost()
    }

    /// A token that is cancelled when the leadership is lost.
    pub fn lost_token(&self) -> CancellationToken {
        self.guard.lost_token()
    }

    /// Runs a future for as long as this process leads, and drops it when the leadership is lost. As
    /// [`Guard::while_held`].
    ///
    /// # Errors
    ///
    /// [`Lost`](ErrorKind::Lost) if it was lost before the work was done.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops the work, and this process still leads.
    pub async fn while_leader<F: Future>(&self, work: F) -> Result<F::Output> {
        self.guard.while_held(work).await
    }

    /// Gives up the leadership, and tells whether it was still held. End the leader's work before.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](ErrorKind::Unavailable) if the store did not confirm it. It is asked again in
    /// the background.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the leadership is given up even if this is dropped.
    pub async fn resign(self) -> Result<ReleaseOutcome> {
        self.guard.release().await
    }

    /// Gives up the leadership, and tells whether it was still held. Does what [`resign`](Self::resign) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`resign`](Self::resign).
    pub fn blocking_resign(self) -> Result<ReleaseOutcome> {
        self.guard.blocking_release()
    }

    /// Resigns when the work is done: a failure to confirm it is logged, and is not the work's.
    async fn resign_after_work(self) {
        if let Err(error) = self.resign().await {
            tracing::warn!(%error, "work done, resignation not confirmed");
        }
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

/// Who leads, as the store tells it. What it cannot tell is `None`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Leader {
    /// Who that is, for people.
    pub label: Option<Label>,
    /// The id of this leadership.
    pub owner: Option<Owner>,
    /// Its term.
    pub term: Option<Fence>,
}

impl Leader {
    /// Returns the label, or `(unknown)` without one.
    pub fn who(&self) -> &str {
        Label::or_unknown(self.label.as_ref())
    }

    fn new(holder: Participant) -> Self {
        Self { label: holder.label, owner: holder.owner, term: holder.fence }
    }
}

/// A watch on who leads. From [`Election::observe`].
#[derive(Debug)]
pub struct Observe {
    election: Election,
    inspect: Inspect,
    /// Whether anything was told, and what that was.
    begun: bool,
    told: Option<Leader>,
}

impl Observe {
    /// Tells who leads, or that nobody does (`None`): at once when called for the first time, then
    /// whenever it is somebody else than was told last.
    ///
    /// It looks whenever the store tells that something changed, and once a second. A leader that comes
    /// and goes between two looks is not seen.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](ErrorKind::Unavailable) if the store does not answer. It may be called again, and
    /// goes on from what was told last.
    ///
    /// # Cancel safety
    ///
    /// If dropped, nothing is lost: the next call tells it.
    pub async fn next(&mut self) -> Result<Option<Leader>> {
        let Self { election, inspect, begun, told } = self;
        let leader = inspect
            .until(async || {
                let leader = election.look(inspect).await?;
                Ok((!*begun || *told != leader).then_some(leader))
            })
            .await?;
        (*begun, *told) = (true, leader.clone());
        Ok(leader)
    }

    /// Blocks until it is known who leads, or until another does than was told last. Does what [`next`](Self::next)
    /// does, in [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`next`](Self::next).
    pub fn blocking_next(&mut self) -> Result<Option<Leader>> {
        block_on(self.next())
    }
}
