//! The conformance suite: the behaviour that every store must have, as tests that any store can run.
//!
//! [`conformance!`](crate::conformance!) creates one test for each behaviour, named after it. The store's
//! [`Capabilities`] select the form of a behaviour:
//! an undeclared capability must answer `Unsupported`, and is tested for that. No case is skipped.
//!
//! [`conformance_across_processes!`](crate::conformance_across_processes!) is for stores that other
//! processes can reach: it kills and stops holders and waiters.
//!
//! # Examples
//!
//! ```
//! use std::sync::Arc;
//! use lockkeeper_core::{Backend, Inspector, Memory, Name};
//! use lockkeeper_testkit::conformance::Subject;
//!
//! async fn memory() -> Subject {
//!     let store = Memory::new();
//!     Subject::new(Arc::new(store.clone()), move |held| {
//!         let store = store.clone();
//!         // How to remove a hold without its holder knowing.
//!         async move {
//!             let inspector = store.inspector().unwrap();
//!             inspector.break_lock(&Name::new(held.name).unwrap()).await.unwrap();
//!         }
//!     })
//! }
//!
//! mod conformance {
//!     lockkeeper_testkit::conformance!(super::memory);
//! }
//! # fn main() {}
//! ```

#![allow(clippy::missing_panics_doc, clippy::unwrap_used, reason = "a case is a test: it panics")]

mod contract;
mod failures;
mod inspection;
mod leases;
mod locks;
#[cfg(unix)]
mod processes;
mod unsuccessful_acquires;
mod waits;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lockkeeper_core::{
    Attempt, Backend, Background, BoxFuture, Capabilities, Claim, ClaimSpec, ErrorKind, Grant,
    Guard, Keeper, LockInfo, Name, Owner,
};

use crate::wait::{eventually, soon};

pub use contract::*;
pub use failures::*;
pub use inspection::*;
pub use leases::*;
pub use locks::*;
#[cfg(unix)]
pub use processes::*;
pub use unsuccessful_acquires::*;
pub use waits::*;

/// A store under test, created per case or shared by all cases. Every case uses unique names.
pub struct Subject {
    backend: Arc<dyn Backend>,
    sever: Sever,
    another: Option<Another>,
    ttl: Duration,
    prefix: String,
    shown_waiters: ShownWaiters,
    /// Values that must live as long as the store: a server, a directory.
    kept: Vec<Box<dyn Send + Sync>>,
    #[cfg(unix)]
    helper: Option<processes::Helper>,
}

/// Which waiters inspection shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ShownWaiters {
    All,
    OwnProcess,
    None,
}

type Another = Box<dyn Fn() -> BoxFuture<'static, Arc<dyn Backend>> + Send + Sync>;
type Sever = Arc<dyn Fn(Held) -> BoxFuture<'static, ()> + Send + Sync>;

/// A hold to remove from the store.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Held {
    /// The name of the lock.
    pub name: String,
    /// The owner of the hold.
    pub owner: Owner,
}

impl Subject {
    /// Creates a subject from a store, and from a function that removes a hold without its holder knowing:
    /// deletes its key, terminates its session.
    pub fn new<F>(
        backend: Arc<dyn Backend>,
        sever: impl Fn(Held) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        static CASES: AtomicU64 = AtomicU64::new(0);
        let case = CASES.fetch_add(1, Ordering::Relaxed);
        Self {
            backend,
            sever: Arc::new(move |held| Box::pin(sever(held))),
            another: None,
            ttl: Duration::from_secs(1),
            prefix: format!("case-{}-{case}-{:08x}/", std::process::id(), fastrand::u32(..)),
            shown_waiters: ShownWaiters::All,
            kept: Vec::new(),
            #[cfg(unix)]
            helper: None,
        }
    }

    /// Sets the TTL of cases that wait for a lease to expire (default: one second). Use a longer one for a
    /// slow store.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// Sets a function that opens the store again, as another client with separate connections. Cases in which several
    /// clients contend then open one per client. Without it they share one.
    #[must_use]
    pub fn another<F>(mut self, open: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Arc<dyn Backend>> + Send + 'static,
    {
        self.another = Some(Box::new(move || Box::pin(open())));
        self
    }

    /// Declares a store that supports inspection but does not know its waiters: it must show none.
    #[must_use]
    pub fn without_waiters(mut self) -> Self {
        self.shown_waiters = ShownWaiters::None;
        self
    }

    /// Declares a store that supports inspection but knows only the waiters of the inspecting process, like one that
    /// is wrapped in `LocalQueue`.
    #[must_use]
    pub fn with_own_waiters(mut self) -> Self {
        self.shown_waiters = ShownWaiters::OwnProcess;
        self
    }

    /// Keeps a value alive as long as the subject: a server, a directory.
    #[must_use]
    pub fn keep(mut self, thing: impl Send + Sync + 'static) -> Self {
        self.kept.push(Box::new(thing));
        self
    }

    fn capabilities(&self) -> Capabilities {
        self.backend.capabilities()
    }

    /// Returns a keeper with a TTL that no case outlives, so that nothing expires.
    fn keeper(&self) -> Keeper {
        Keeper::from_backend(self.backend.clone()).ttl(Duration::from_secs(600))
    }

    /// Returns keepers of independent clients, if the subject can be opened more than once.
    async fn clients(&self, count: usize) -> Vec<Keeper> {
        let mut clients = Vec::new();
        for _ in 0..count {
            clients.push(match &self.another {
                Some(another) => {
                    Keeper::from_backend(another().await).ttl(Duration::from_secs(600))
                }
                None => self.keeper(),
            });
        }
        clients
    }

    /// Returns a lock name that only this case uses.
    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Returns a bare claim, to test the contract itself.
    fn claim(&self, name: &str, change: impl FnOnce(&mut ClaimSpec)) -> Box<dyn Claim> {
        let background = Background::new(tokio::runtime::Handle::current());
        let name = Name::new(self.name(name)).expect("a good name");
        let mut spec = ClaimSpec::new(name, Duration::from_secs(600), background);
        change(&mut spec);
        self.backend.claim(spec).expect("a claim that the store declares")
    }

    /// Returns whether the store frees a hold that is no longer renewed: leases expire, and sessions
    /// may.
    async fn expires_without_renewal(&self) -> bool {
        if self.capabilities().leases {
            return true;
        }
        let mut claim = self.claim("a probe", |_| ());
        let answer = soon("attempt", claim.attempt(None)).await.expect("the store answers");
        soon("release", claim.release()).await.expect("the store answers");
        matches!(answer, Attempt::Granted(Grant { valid_for: Some(_), .. }))
    }

    async fn sever(&self, guard: &Guard) {
        let held = Held { name: guard.name().to_owned(), owner: guard.owner() };
        (self.sever)(held).await;
    }

    /// Returns the locks under this case's names, if the store supports inspection.
    async fn remaining_locks(&self) -> Option<Vec<LockInfo>> {
        let inspector = self.backend.inspector()?;
        let listed = match inspector.list(&self.prefix).await {
            // A store that hashes names cannot filter by prefix. It lists the names of this process.
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                let all = inspector.list("").await.expect("the store supports inspection");
                all.into_iter().filter(|info| info.name.starts_with(&self.prefix)).collect()
            }
            listed => listed.expect("the store supports inspection"),
        };
        Some(listed)
    }

    /// Waits until a name has this many waiters; if the store does not show waiters, for 100 ms.
    async fn wait_for_waiters(&self, name: &str, count: usize) {
        if self.backend.inspector().is_none() || self.shown_waiters != ShownWaiters::All {
            // Every waiter is queued by then. A slower store fails the checks of order.
            return tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let full = self.name(name);
        eventually(&format!("{count} waiters for {name:?}"), async || {
            let left = self.remaining_locks().await.unwrap_or_default();
            let infos = left.iter().filter(|info| *info.name == *full);
            infos.map(|info| info.waiters.len()).sum::<usize>() == count
        })
        .await;
    }

    /// Closes the keepers and asserts that the store has no locks of this case any more.
    async fn assert_nothing_left(self, keepers: &[&Keeper]) {
        for keeper in keepers {
            soon("close", keeper.close()).await;
        }
        if let Some(left) = self.remaining_locks().await {
            assert_eq!(left, [], "left behind in the store");
        }
    }
}

impl fmt::Debug for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subject").field("backend", &self.backend).finish_non_exhaustive()
    }
}

/// Runs a case on a new runtime.
#[doc(hidden)]
pub fn run<S, F>(factory: impl FnOnce() -> S, case: impl FnOnce(Subject) -> F)
where
    S: Future<Output = Subject>,
    F: Future<Output = ()>,
{
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let done = runtime.block_on(async {
        tokio::time::timeout(MAX_CASE_TIME, async { case(factory().await).await }).await
    });
    // Dropping the runtime would wait for its blocking threads.
    runtime.shutdown_timeout(Duration::from_secs(10));
    assert!(done.is_ok(), "the case hangs: it did not finish within {MAX_CASE_TIME:?}");
}

/// Longer than any case takes, even on a busy machine.
const MAX_CASE_TIME: Duration = Duration::from_secs(240);

/// Creates a test for each behaviour that every store must have.
///
/// Takes the path of an async function without arguments that returns a
/// [`Subject`](crate::conformance::Subject). See the [module](mod@crate::conformance).
#[macro_export]
macro_rules! conformance {
    ($factory:path) => {
        $crate::__cases! { __as_tests $factory }
    };
}

/// The names of all cases.
#[doc(hidden)]
#[macro_export]
macro_rules! __cases {
    ($emit:ident $($factory:path)?) => {
        $crate::$emit! { $($factory)?;
            a_repeated_attempt_of_the_holder_is_granted_again
            a_repeated_attempt_has_a_full_lease
            an_unqueued_attempt_leaves_no_trace
            a_refreshed_waiter_keeps_its_position
            a_waiter_that_leaves_passes_its_grant_on
            a_release_frees_only_its_own_hold_and_works_in_any_state
            a_renewal_never_creates_a_hold
            a_renewal_lasts_for_its_ttl
            an_expired_lease_is_neither_renewed_nor_released
            a_cancelled_call_leaves_the_claim_usable
            fences_rise_and_honour_their_floor_where_declared
            holders_never_overlap_under_contention
            exactly_one_of_concurrent_tries_for_a_free_lock_succeeds
            two_guards_of_one_mutex_exclude_each_other
            a_failed_try_returns_none_and_a_bounded_wait_times_out
            a_wait_that_timed_out_has_left_the_queue
            a_failed_lock_all_holds_no_lock_when_it_returns
            extreme_waits_are_granted_or_refused_and_never_fail
            a_contended_lock_all_waits_for_all_its_names
            waiters_are_granted_the_lock_in_order_where_declared
            a_waiter_is_handed_the_lock_when_it_is_released
            a_lock_is_renewed_for_as_long_as_it_is_held
            a_guard_dropped_on_a_plain_thread_releases_its_lock
            readers_share_and_writers_exclude
            readers_do_not_overtake_a_waiting_writer
            a_failed_try_write_does_not_block_readers
            a_downgrade_admits_no_other_writer
            a_semaphore_grants_as_many_permits_as_it_has
            a_semaphore_and_a_mutex_of_one_name_are_independent
            a_lease_that_is_not_renewed_expires
            a_hold_that_cannot_renew_is_lost_before_another_is_granted
            a_ticket_transfers_a_hold
            lost_responses_leave_nothing
            an_acquire_cancelled_at_any_poll_leaves_nothing
            the_holder_of_a_removed_hold_is_notified
            all_names_work_and_are_independent
            extreme_ttls_are_accepted_or_refused
            inspection_shows_holders_and_waiters
            a_broken_lock_is_lost_and_the_next_waiter_is_granted
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __as_tests {
    ($factory:path; $($case:ident)*) => {
        $(
            #[test]
            fn $case() {
                $crate::conformance::run($factory, $crate::conformance::$case);
            }
        )*
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __one_by_one {
    ($factory:path; $($case:ident)*) => {
        $(
            println!("{}", stringify!($case));
            run(&$factory, $case);
        )*
    };
}

/// Runs all cases one after the other, where separate tests are not possible, as in a doctest.
///
/// # Panics
///
/// If a case fails. The name of each case is printed before it runs.
pub fn run_all<S: Future<Output = Subject>>(factory: impl Fn() -> S) {
    crate::__cases!(__one_by_one factory);
}
