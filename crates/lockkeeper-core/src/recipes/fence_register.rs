//! The checking side of fencing: a register of the highest fences, which rejects lower ones.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::blocking_runtime::block_on;
use crate::contract::BoxFuture;
use crate::error::{Error, Result};
use crate::fence::Fence;
use crate::name::Name;

/// The timeout of a check. A client waits for the write that follows it.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A register of the highest [`Fence`] seen for each name, which rejects requests with a lower one.
///
/// It belongs to the resource that a lock protects. A holder that was paused past its lease does not know that another
/// client holds the lock. But its fence is lower than that client's, so its requests can be detected. The register is
/// cheap to clone, and clones share their state.
///
/// # What it guarantees
///
/// After a check has passed, every later check of that name with a lower fence returns [`Stale`](FenceCheck::Stale), for
/// any number of concurrent checks in any process that uses the same store. The same fence passes again, because a holder
/// may write more than once.
///
/// # What it does not guarantee
///
/// - **That the following write is in time.** Between a check and its write, a higher fence may pass *and write*. If that
///   can do harm, check and write in one transaction, as `Fences::check_in` of the PostgreSQL store does, or fence the row
///   itself. `docs/guides/fencing.md` shows both.
/// - **Protection against forged fences.** A client that may send fences can send the highest one and lock all others out.
/// - **Fences of different stores.** Each store counts in its own way: all fences of one name must come from one store.
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
/// let paused = keeper.mutex("orders/42").lock().await?.fence().unwrap(); // and released
/// let latest = keeper.mutex("orders/42").lock().await?.fence().unwrap();
///
/// assert_eq!(register.check("orders/42", latest).await?, FenceCheck::Passed);
/// assert_eq!(register.check("orders/42", paused).await?, FenceCheck::Stale { highest: latest });
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct FenceRegister {
    store: Arc<dyn FenceStore>,
}

/// The outcome of a check by a [`FenceRegister`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use = "a stale request must be rejected"]
pub enum FenceCheck {
    /// No higher fence has been seen: perform the request.
    Passed,
    /// A higher fence has been seen, so the sender has lost the lock: reject the request. A retry with the same fence
    /// fails again.
    Stale {
        /// The highest fence seen.
        highest: Fence,
    },
}

impl FenceCheck {
    /// Returns whether the request may be performed.
    pub fn is_passed(self) -> bool {
        self == Self::Passed
    }
}

/// The storage of a [`FenceRegister`]. Authors of stores implement it.
pub trait FenceStore: fmt::Debug + Send + Sync + 'static {
    /// Returns the name of the store for error messages: `memory`, `redis`, …
    fn name(&self) -> &'static str;

    /// Compares a fence with the highest of its name and, unless it is lower, records it. Both happen in one atomic step.
    ///
    /// # Errors
    ///
    /// An error means that it is unknown whether the fence was recorded. A retry resolves that.
    fn check(&self, name: &Name, fence: Fence) -> BoxFuture<'_, Result<FenceCheck>>;
}

impl FenceRegister {
    /// Creates a register that keeps its fences in a store.
    pub fn new(store: impl FenceStore) -> Self {
        Self { store: Arc::new(store) }
    }

    /// Creates a register in the memory of this process, for tests and for a resource that only this process writes to.
    ///
    /// It keeps one entry per name until it is dropped.
    pub fn in_memory() -> Self {
        Self::new(InMemory::default())
    }

    /// Returns whether a client with this fence may still write, and records the fence if so.
    ///
    /// # Errors
    ///
    /// - [`InvalidName`](crate::ErrorKind::InvalidName).
    /// - [`Unavailable`](crate::ErrorKind::Unavailable) if the store does not answer within ten seconds. The state of the
    ///   fence is unknown: reject the request.
    /// - [`Config`](crate::ErrorKind::Config) if the store is not set up.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the fence may or may not be recorded. Both are safe.
    pub async fn check(&self, name: impl Into<Arc<str>>, fence: Fence) -> Result<FenceCheck> {
        let name = Name::new(name)?;
        let answer = tokio::time::timeout(TIMEOUT, self.store.check(&name, fence)).await;
        let answer = answer.unwrap_or_else(|_| Err(Error::no_answer(TIMEOUT)));
        answer.map_err(|error| error.at(self.store.name(), "check the fence of", &name))
    }

    /// Returns whether a client with this fence may still write. The [blocking](crate::blocking) form of
    /// [`check`](Self::check).
    ///
    /// # Errors
    ///
    /// Same as [`check`](Self::check).
    pub fn blocking_check(&self, name: impl Into<Arc<str>>, fence: Fence) -> Result<FenceCheck> {
        block_on(self.check(name, fence))
    }
}

#[derive(Debug, Default)]
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
