//! Elections: one leader at a time, with increasing terms.

mod leadership;
mod observe;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::backoff::Backoff;
use crate::blocking_runtime::block_on;
use crate::contract::{Fences, Mode};
use crate::engine::context::KeeperContext;
use crate::error::{Error, ErrorKind, Result};
use crate::fence::Fence;
use crate::locks::handle::LockHandle;
use crate::locks::inspect::Inspect;
use crate::locks::keeper::Keeper;
use crate::options::option_setters;

pub use self::leadership::Leadership;
pub use self::observe::{Leader, Observe};

/// The prefix of an election's lock name.
const PREFIX: &str = "election/";

/// The bounds of the backoff between failed campaigns.
const MIN_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// An election: one of the candidates leads at a time. From [`Keeper::election`].
///
/// # What it guarantees
///
/// An election is a [`Mutex`](crate::Mutex) and has the same guarantees. A leader learns of its loss *before* another
/// candidate can be elected, and each leader has a higher [term](Leadership::term) than all before it. On a
/// [fair](crate::Capabilities::fair) store, candidates are elected in the order in which they started to campaign. The
/// exceptions are those of a [`Guard`](crate::Guard#what-it-does-not-guarantee): a leader that is deposed by
/// [`break_lock`](crate::Inspect::break_lock), or whose session the server terminates, learns of it some milliseconds after
/// the store has freed the lock.
///
/// # What it does not guarantee
///
/// A process may be paused between a check and its next action for longer than its lease, and then act as a leader that
/// it no longer is. If that can do harm, send the term with each action of the leader, and let the receiver reject a lower
/// term than it has seen.
///
/// # Names
///
/// The election `service` is the lock `election/service` in the store. So an election and a mutex of the same name do not
/// conflict, `lockkeeper ls election/` lists all leaders, and `lockkeeper break election/service` deposes one. The prefix
/// counts towards the limit of 1 KiB for a name.
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
    lock: LockHandle,
}

impl Keeper {
    /// Returns an election, in which one of the candidates leads at a time.
    pub fn election(&self, name: impl AsRef<str>) -> Election {
        let name = name.as_ref();
        // An empty name stays empty, and is rejected like that of any lock.
        let lock = if name.is_empty() { String::new() } else { format!("{PREFIX}{name}") };
        Election { lock: self.lock(lock) }
    }
}

impl Election {
    option_setters!(lock.options);

    /// Waits until this candidate is elected, for at most `max_wait`.
    ///
    /// # Errors
    ///
    /// Same as [`Mutex::lock`](crate::Mutex::lock). [`Unavailable`](ErrorKind::Unavailable) is not retried here.
    /// [`Unsupported`](ErrorKind::Unsupported) if the store has no fences, or they are disabled: terms are fences.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the candidate leaves the queue, and a leadership that is granted or in flight is released
    /// in the background.
    pub async fn campaign(&self) -> Result<Leadership> {
        self.campaign_on(self.lock.context.live()).await
    }

    /// Blocks until this candidate is elected, for at most `max_wait`. The [blocking](crate::blocking) form of
    /// [`campaign`](Self::campaign).
    ///
    /// # Errors
    ///
    /// Same as [`campaign`](Self::campaign).
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
        let no_terms =
            || self.lock.error(Error::unsupported("fences, which elections need for their terms"));
        // Checked before any I/O.
        if context.capabilities.fences == Fences::None {
            return Err(no_terms());
        }
        let guard = self.lock.acquire_on(context, Mode::Exclusive).await?;
        let term = guard.fence().ok_or_else(no_terms)?;
        tracing::info!(election = self.name(), %term, "elected");
        Ok(Leadership { guard, term })
    }

    /// Campaigns, runs a future from `work` while this process leads, and campaigns again if the leadership is lost. When
    /// a future completes, resigns and returns its output.
    ///
    /// - **The work stops first.** The future is dropped before another candidate can be elected if the leadership is lost,
    ///   and before the leadership is released if this future is dropped. Only code that awaits can be stopped: a long
    ///   computation continues to its next await.
    /// - **It survives outages.** While the store does not answer, the campaign is retried, with a backoff of up to five
    ///   seconds, and logs a warning with `tracing`. A leader whose store is down leads until its lease expires.
    /// - Output of work that completes at the same time as the leadership is lost is dropped. The next term repeats the
    ///   work.
    ///
    /// # Errors
    ///
    /// The errors of [`campaign`](Self::campaign) that a retry cannot fix: an invalid name or option, a store without
    /// fences, a closed keeper.
    ///
    /// # Panics
    ///
    /// If the work panics. The leadership is released in the background.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work first, and then releases the leadership in the background.
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
    ///     // … until the work is complete
    /// };
    /// keeper.election("service").run_while_leader(work).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn run_while_leader<F: Future>(
        &self,
        // Not `AsyncFnMut`: generic code cannot require its futures to be `Send` (rust-lang/rust#109417), so it could not
        // spawn this.
        mut work: impl FnMut(Fence) -> F,
    ) -> Result<F::Output> {
        loop {
            let leadership = self.campaign_until_elected(self.lock.context.live()).await?;
            let term = leadership.term();
            // The work is a temporary of this statement, so it is always dropped before the leadership. The call of
            // `work` is inside of the future, so that it does not run after the deadline.
            match leadership.while_leader(async { work(term).await }).await {
                Ok(output) => {
                    leadership.guard.release_after_work().await;
                    return Ok(output);
                }
                Err(error) => {
                    tracing::warn!(%error, %term, "leadership lost: stopped the work, campaigning again");
                }
            }
        }
    }

    /// Campaigns, runs `work` on this thread while this process leads, and campaigns again if the leadership was lost
    /// meanwhile. Otherwise resigns and returns the output.
    ///
    /// For [blocking code](crate::blocking). It survives outages of the store, like
    /// [`run_while_leader`](Self::run_while_leader). Unlike there, **the work cannot be stopped**: if the leadership is
    /// lost, the work continues until it returns, while another process may lead. Let the work check
    /// [`is_leader`](Leadership::is_leader) at each step. If one step too many can do harm, send the
    /// [term](Leadership::term) with it and let the receiver reject a lower one.
    ///
    /// # Errors
    ///
    /// Same as [`run_while_leader`](Self::run_while_leader).
    ///
    /// # Panics
    ///
    /// If the work panics. The leadership is released in the background.
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
                block_on(leadership.guard.release_after_work());
                return Ok(output);
            }
            let (term, error) = (leadership.term(), leadership.guard.lost_error());
            tracing::warn!(%error, %term, "leadership lost during the work, campaigning again");
        }
    }

    /// Campaigns until elected, and retries while the store does not answer.
    async fn campaign_until_elected(&self, context: &Arc<KeeperContext>) -> Result<Leadership> {
        let mut backoff = Backoff::new(MIN_BACKOFF, MAX_BACKOFF);
        let mut failures = 0_u32;
        loop {
            match self.campaign_on(context).await {
                Ok(leadership) => {
                    if failures > 0 {
                        tracing::info!(election = self.name(), failures, "the store answers again");
                    }
                    return Ok(leadership);
                }
                // Not a warning: another candidate leads.
                Err(error) if error.kind() == ErrorKind::TimedOut => {
                    tracing::debug!(%error, "not elected, campaigning again");
                }
                Err(error) if error.is_retryable() => {
                    failures += 1;
                    tracing::warn!(%error, failures, "the campaign failed, trying again");
                }
                Err(error) => return Err(error),
            }
            // Also after a timeout: a `max_wait` of zero would make this a busy loop.
            tokio::time::sleep(backoff.next()).await;
        }
    }

    /// Returns the leader, or `None` if the election has none.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](ErrorKind::Unsupported) if the store does not support inspection,
    /// [`Unavailable`](ErrorKind::Unavailable) if it does not answer.
    pub async fn leader(&self) -> Result<Option<Leader>> {
        Leader::read(&self.inspect()?, &self.lock.name).await
    }

    /// Returns the leader, or `None` if the election has none. The [blocking](crate::blocking) form of
    /// [`leader`](Self::leader).
    ///
    /// # Errors
    ///
    /// Same as [`leader`](Self::leader).
    pub fn blocking_leader(&self) -> Result<Option<Leader>> {
        block_on(self.leader())
    }

    fn inspect(&self) -> Result<Inspect> {
        Inspect::new(self.lock.context.clone())
    }

    /// Watches the leader: [`next`](Observe::next) returns the current one, and then each change.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](ErrorKind::Unsupported) if the store does not support inspection.
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
        let (inspect, name) = (self.inspect()?, self.lock.name.clone());
        Ok(Observe { inspect, name, begun: false, last: None })
    }

    /// Returns the name of the election.
    pub fn name(&self) -> &str {
        self.lock.name.as_deref().map_or("", election_name)
    }
}

/// Returns the name of the election that a lock belongs to.
fn election_name(lock: &str) -> &str {
    lock.strip_prefix(PREFIX).unwrap_or(lock)
}
