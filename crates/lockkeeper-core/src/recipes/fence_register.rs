//! The other side of fencing: who remembers the highest fence, and refuses a lower one.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::blocking_runtime::block_on;
use crate::contract::BoxFuture;
use crate::error::{Error, Result};
use crate::fence::Fence;
use crate::name::Name;

/// How long a register's store may take. A check stands before a write that somebody waits for.
const PATIENCE: Duration = Duration::from_secs(10);

/// Remembers the highest [`Fence`] seen for each name, and says which requests come too late.
///
/// It belongs to whatever a lock protects. A holder that was paused past its lease does not know that
/// another holds the lock by now; but its fence is lower than the other's, and so its request can be
/// told apart. Cheap to clone; clones are the same register.
///
/// # What it guarantees
///
/// When a check has passed, every later check of that name with a lower fence is answered
/// [`Stale`](FenceCheck::Stale), however many check at the same time, and wherever. The same fence passes
/// again: one holder may write more than once.
///
/// # What it does not
///
/// - **That the write which follows comes in time.** Between a check and the write, a higher fence may pass
///   *and write*. Where that does harm, check and write in one transaction, as
///   `Fences::check_in` of the PostgreSQL store does, or guard the row itself: `docs/guides/fencing.md` shows how.
/// - **To tell a forged fence.** Whoever may send a fence can send the highest there is, and lock all
///   others out.
/// - **To compare fences of different stores.** Each store counts in its own way: the fences of one name
///   must all come from one.
///
/// # Examples
///
/// ```
/// # use lockkeeper_core as lockkeeper;
/// use lockkeeper::{Fence, FenceCheck, FenceRegister, Keeper, Memory};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// let keeper = Keeper::new(Memory::new());
/// let register = FenceRegister::in_memory();
///
/// let paused = keeper.mutex("orders/42").lock().await?.fence().unwrap(); // and given back
/// let latest = keeper.mutex("orders/42").lock().await?.fence().unwrap();
///
/// assert_eq!(register.check("orders/42", latest).await?, FenceCheck::Passed);
/// assert_eq!(register.check("orders/42", paused).await?, FenceCheck::Stale { highest: latest });
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct FenceRegister {
    store: Arc<dyn FenceStore>,
}

/// What a [`FenceRegister`] says of a fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use = "a stale request must not be obeyed"]
pub enum FenceCheck {
    /// None higher has been seen: go on.
    Passed,
    /// A higher one has been seen: whoever sent this has lost the lock. Refuse it; to try again with the
    /// same fence is no use.
    Stale {
        /// The highest that has been seen.
        highest: Fence,
    },
}

impl FenceCheck {
    /// Whether to go on.
    pub fn is_passed(self) -> bool {
        self == Self::Passed
    }
}

/// Where a [`FenceRegister`] keeps its fences: what the author of a store implements.
pub trait FenceStore: fmt::Debug + Send + Sync + 'static {
    /// The store's name as it stands in error messages: `memory`, `redis`, …
    fn name(&self) -> &'static str;

    /// Compares a fence with the highest of its name and, if it is not lower, puts it in its place: both
    /// in one step that no other check can get in between.
    ///
    /// # Errors
    ///
    /// An error means that it is unknown whether the fence was taken down. Asking again settles it.
    fn check(&self, name: &Name, fence: Fence) -> BoxFuture<'_, Result<FenceCheck>>;
}

impl FenceRegister {
    /// A register that keeps its fences in a store.
    pub fn new(store: impl FenceStore) -> Self {
        Self { store: Arc::new(store) }
    }

    /// A register in the memory of this process, for a resource that only this process writes to, and for
    /// tests.
    ///
    /// It forgets everything when the process ends, and nothing before: it grows by an entry for each name.
    pub fn in_memory() -> Self {
        Self::new(InMemory::default())
    }

    /// Says whether whoever sends this fence may still write, and remembers the fence if so.
    ///
    /// # Errors
    ///
    /// [`InvalidName`](crate::ErrorKind::InvalidName);
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the store does not answer within ten seconds: then
    /// nobody knows, and the request should be refused. [`Config`](crate::ErrorKind::Config) if the store
    /// is not set up.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the fence may or may not have been remembered. That does no harm: it was sent.
    pub async fn check(&self, name: impl Into<Arc<str>>, fence: Fence) -> Result<FenceCheck> {
        let name = Name::new(name)?;
        let answer = tokio::time::timeout(PATIENCE, self.store.check(&name, fence)).await;
        let answer = answer.unwrap_or_else(|_| Err(Error::no_answer(PATIENCE)));
        answer.map_err(|error| error.at(self.store.name(), "check the fence of", &name))
    }

    /// Says whether a client that sends this fence may still write. Does what [`check`](Self::check) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    pub fn blocking_check(&self, name: impl Into<Arc<str>>, fence: Fence) -> Result<FenceCheck> {
        block_on(self.check(name, fence))
    }
}

impl fmt::Debug for FenceRegister {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FenceRegister").field(&self.store).finish()
    }
}

#[derive(Default)]
struct InMemory(Mutex<HashMap<Name, Fence>>);

impl FenceStore for InMemory {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn check(&self, name: &Name, fence: Fence) -> BoxFuture<'_, Result<FenceCheck>> {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let highest = seen.entry(name.clone()).or_insert(fence);
        *highest = fence.max(*highest);
        let answer = match *highest {
            highest if highest > fence => FenceCheck::Stale { highest },
            _ => FenceCheck::Passed,
        };
        Box::pin(std::future::ready(Ok(answer)))
    }
}

impl fmt::Debug for InMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InMemory")
    }
}
