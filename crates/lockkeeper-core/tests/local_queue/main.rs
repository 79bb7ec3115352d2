//! Local queues in front of a fair store (the memory store) and of an unfair one (`Unordered`).
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

#[path = "../common/mod.rs"]
mod common;
mod failures;
mod first_attempt;
mod handoff;
mod inspection;
mod order;
mod scripted;
mod unpolled;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use common::secs;
use common::unordered::Unordered;
use lockkeeper_core::{
    Attempt, Backend, Background, BoxFuture, Change, Claim, ClaimSpec, Guard, Holder, Keeper,
    LocalQueue, LockInfo, Memory, Mode, Name, Owner, Retry,
};
use lockkeeper_testkit::{Faults, Faulty};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

const TTL: Duration = Duration::from_secs(30);
/// How long the look-ahead waits for a woken front.
const FRONT_GRACE: Duration = Duration::from_millis(1);
const AFTER_GRACE: Attempt =
    Attempt::Contended { retry: Retry::After(FRONT_GRACE), holder: Holder::Unknown };

/// A local queue in front of a store, with faults between them.
struct Setup {
    store: Arc<LocalQueue>,
    keeper: Keeper,
    faults: Faults,
}

impl Setup {
    fn new(inner: impl Backend) -> Self {
        Self::with(inner, LocalQueue::new)
    }

    fn with(inner: impl Backend, queue: fn(Arc<dyn Backend>) -> LocalQueue) -> Self {
        let (inner, faults) = Faulty::new(inner);
        let store = Arc::new(queue(Arc::new(inner)));
        let keeper = Keeper::from_backend(store.clone()).ttl(TTL);
        Self { store, keeper, faults }
    }

    /// Returns a queue in front of a fair store and one in front of an unfair store.
    fn both() -> [Self; 2] {
        [Self::new(Memory::new()), Self::new(Unordered::default())]
    }

    fn claim(&self, change: impl FnOnce(&mut ClaimSpec)) -> Box<dyn Claim> {
        let background = Background::new(tokio::runtime::Handle::current());
        let mut spec = ClaimSpec::new(Name::new("a").unwrap(), TTL, background);
        change(&mut spec);
        self.store.claim(spec).unwrap()
    }

    fn waiter(&self) -> Box<dyn Claim> {
        self.claim(|spec| spec.queue = true)
    }

    async fn waiters(&self, name: &str) -> Vec<Option<Owner>> {
        let infos = self.keeper.inspect().unwrap().show(name).await.unwrap();
        infos.iter().flat_map(|info| &info.waiters).map(|waiter| waiter.owner).collect()
    }

    async fn until_queued(&self, name: &str, count: usize) {
        let start = std::time::Instant::now();
        while self.waiters(name).await.len() != count {
            assert!(start.elapsed() < secs(30), "not {count} in the queue of {name:?}");
            tokio::task::yield_now().await;
        }
    }

    /// Starts a task that acquires the lock, sends its number and holds the lock for `hold`.
    async fn enqueue(
        &self,
        mode: Mode,
        number: usize,
        entered: &mpsc::UnboundedSender<usize>,
        hold: Duration,
    ) -> JoinHandle<()> {
        let before = self.waiters("a").await.len();
        let (lock, entered) = (self.keeper.rw_lock("a"), entered.clone());
        let task = tokio::spawn(async move {
            let guard = match mode {
                Mode::Shared => lock.read().await.unwrap(),
                _ => lock.write().await.unwrap(),
            };
            entered.send(number).unwrap();
            sleep(hold).await;
            guard.release().await.unwrap();
        });
        self.until_queued("a", before + 1).await;
        task
    }

    async fn lock(&self) -> Guard {
        timeout(secs(600), self.keeper.mutex("a").lock()).await.expect("a lock").unwrap()
    }

    async fn left(&self) -> Vec<LockInfo> {
        self.keeper.inspect().unwrap().list("").await.unwrap()
    }

    /// Asserts that no lock is held and no queue is left.
    async fn assert_empty(&self) {
        sleep(secs(2)).await;
        assert_eq!(self.left().await, []);
        self.assert_no_queue();
    }

    fn assert_no_queue(&self) {
        let shown = format!("{:?}", self.store);
        let is_empty = shown.contains("locks: {}, semaphores: {}") && shown.contains("occupied: 0");
        assert!(is_empty, "a queue is left: {shown}");
    }

    /// Returns waiters whose first attempts were refused.
    async fn refused(&self, count: usize) -> Vec<Box<dyn Claim>> {
        let mut waiters = Vec::new();
        for _ in 0..count {
            let mut waiter = self.waiter();
            assert!(!is_granted(&mut *waiter).await);
            waiters.push(waiter);
        }
        waiters
    }
}

fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Polls `changed` once.
fn listen(claim: &mut dyn Claim) -> Option<Change> {
    match poll_once(claim.changed().as_mut()) {
        Poll::Ready(change) => Some(change),
        Poll::Pending => None,
    }
}

async fn is_granted(claim: &mut dyn Claim) -> bool {
    matches!(claim.attempt(None).await.unwrap(), Attempt::Granted(_))
}

fn is_handed_off(change: Option<Change>) -> bool {
    matches!(change, Some(Change::Granted(_)))
}

/// Returns a future that was polled once.
fn unpolled(setup: &Setup) -> Pin<Box<dyn Future<Output = ()>>> {
    let mutex = setup.keeper.mutex("a");
    let mut future: Pin<Box<dyn Future<Output = ()>>> =
        Box::pin(async move { drop(mutex.lock().await) });
    assert!(poll_once(future.as_mut()).is_pending());
    future
}

/// Returns a holder that does not use the queue, as in another process.
async fn elsewhere(store: &Unordered) -> Box<dyn Claim> {
    let background = Background::new(tokio::runtime::Handle::current());
    let spec = ClaimSpec::new(Name::new("a").unwrap(), TTL, background);
    let mut holder = store.claim(spec).unwrap();
    assert!(is_granted(&mut *holder).await);
    holder
}

/// Counts how often it is woken.
#[derive(Default)]
struct Wakes(AtomicUsize);

impl std::task::Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A claim that listens and is polled by the test.
struct Listening<'a> {
    changed: BoxFuture<'a, Change>,
    wakes: Arc<Wakes>,
}

impl<'a> Listening<'a> {
    fn new(claim: &'a mut dyn Claim) -> Self {
        Self { changed: claim.changed(), wakes: Arc::default() }
    }

    fn poll(&mut self) -> Option<Change> {
        let waker = Waker::from(self.wakes.clone());
        self.wakes.0.store(0, Ordering::Relaxed);
        match self.changed.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(change) => Some(change),
            Poll::Pending => None,
        }
    }

    fn is_woken(&self) -> bool {
        self.wakes.0.load(Ordering::Relaxed) > 0
    }
}
