//! A store with fault injection.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockkeeper_core::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Error, ErrorKind, Fence,
    Inspector, Mode, Release, Renewal, Result,
};
use tokio::time::{Instant, sleep};

/// An operation of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// [`Claim::attempt`].
    Attempt,
    /// [`Claim::changed`].
    Changed,
    /// [`Claim::renew`].
    Renew,
    /// [`Claim::downgrade`].
    Downgrade,
    /// [`Claim::release`].
    Release,
}

/// A fault that is injected into a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The request reaches the store after this delay.
    SlowRequest(Duration),
    /// The store processes the request immediately, and the response takes this long.
    SlowAnswer(Duration),
    /// The request does not reach the store, and fails immediately.
    Refused,
    /// The store processes the request, the response is lost, and the request fails.
    LostAnswer,
    /// The store processes the request, and the caller never gets a response.
    NoAnswer,
    /// The request does not reach the store, and the caller never gets a response.
    Hangs,
}

/// A store with faults, which are controlled by its [`Faults`].
///
/// # Examples
///
/// ```
/// use lockkeeper_core::{ErrorKind, Keeper, Memory};
/// use lockkeeper_testkit::{Fault, Faulty, Op};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let (store, faults) = Faulty::new(Memory::new());
/// faults.once(Op::Attempt, Fault::LostAnswer);
/// let error = Keeper::new(store).mutex("a").lock().await.unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Unavailable);
/// # }
/// ```
#[derive(Debug)]
pub struct Faulty {
    store: Arc<Store>,
    faults: Faults,
}

/// The wrapped store.
struct Store {
    /// Creates an empty store, for stores that can lose their data.
    make: Option<Box<dyn Fn() -> Arc<dyn Backend> + Send + Sync>>,
    /// How often the data was lost, and the current store.
    current: Mutex<(u64, Arc<dyn Backend>)>,
    first: Arc<dyn Backend>,
}

impl Store {
    fn new(
        first: Arc<dyn Backend>,
        make: Option<Box<dyn Fn() -> Arc<dyn Backend> + Send + Sync>>,
    ) -> Arc<Self> {
        Arc::new(Self { make, current: Mutex::new((0, first.clone())), first })
    }

    /// Returns the store after its data was lost `forgotten` times.
    fn after(&self, forgotten: u64) -> Arc<dyn Backend> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.0 != forgotten
            && let Some(make) = &self.make
        {
            *current = (forgotten, make());
        }
        current.1.clone()
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("first", &self.first).finish_non_exhaustive()
    }
}

/// Controls the faults of a [`Faulty`] store. Clones control the same store.
#[derive(Debug, Clone, Default)]
pub struct Faults(Arc<Mutex<Script>>);

#[derive(Debug, Default)]
struct Script {
    always: HashMap<Op, Fault>,
    once: HashMap<Op, VecDeque<Fault>>,
    requests: HashMap<Op, usize>,
    /// How often the store has lost all data.
    forgotten: u64,
    /// When the store was last restarted.
    restarted: Option<Instant>,
    /// The origin of the store's clock.
    clock: Option<Instant>,
    /// The highest fence that a release told the store.
    told: Option<Fence>,
}

impl Faulty {
    /// Wraps a store, without faults at first.
    pub fn new(inner: impl Backend) -> (Self, Faults) {
        Self::around(Arc::new(inner))
    }

    /// Wraps a store that is shared with others.
    pub fn around(inner: Arc<dyn Backend>) -> (Self, Faults) {
        let faults = Faults::default();
        (Self { store: Store::new(inner, None), faults: faults.clone() }, faults)
    }

    /// Wraps a store that can lose all data: `make` creates an empty one. Does not support inspection.
    pub fn forgetting<B: Backend>(make: impl Fn() -> B + Send + Sync + 'static) -> (Self, Faults) {
        let make = move || Arc::new(make()) as Arc<dyn Backend>;
        let faults = Faults::default();
        (Self { store: Store::new(make(), Some(Box::new(make))), faults: faults.clone() }, faults)
    }

    /// Returns the wrapped store as it is now.
    pub fn current(&self) -> Arc<dyn Backend> {
        self.store.after(self.faults.script().forgotten)
    }
}

impl Faults {
    fn script(&self) -> MutexGuard<'_, Script> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Injects a fault into every request of an operation from now on.
    pub fn always(&self, op: Op, fault: Fault) {
        self.script().always.insert(op, fault);
    }

    /// Injects a fault into the next request of an operation. Several calls queue up.
    pub fn once(&self, op: Op, fault: Fault) {
        self.script().once.entry(op).or_default().push_back(fault);
    }

    /// Injects a fault into every request of every operation: `Refused` is a store that is down, `Hangs` a network
    /// partition.
    pub fn everything(&self, fault: Fault) {
        for op in [Op::Attempt, Op::Changed, Op::Renew, Op::Downgrade, Op::Release] {
            self.always(op, fault);
        }
    }

    /// Removes all faults.
    pub fn none(&self) {
        let mut script = self.script();
        script.always.clear();
        script.once.clear();
    }

    /// Deletes all data of a store created by [`Faulty::forgetting`], like `FLUSHALL` on a server. Claims are not notified.
    pub fn forget(&self) {
        let mut script = self.script();
        script.forgotten += 1;
        script.told = None;
    }

    /// Restarts the store without its data. From now on it has an uptime and honours [`ClaimSpec::min_uptime`].
    pub fn restart(&self) {
        let mut script = self.script();
        script.forgotten += 1;
        script.told = None;
        script.restarted = Some(Instant::now());
    }

    /// Makes fences follow a clock, as on Redis: no fence is below the microseconds since this instant. Nodes with
    /// different instants have skewed clocks. The store must honour floors. It then also honours [`Claim::set_fence`].
    pub fn clock(&self, since: Instant) {
        self.script().clock = Some(since);
    }

    /// Fails if the store was restarted less than this long ago.
    fn check_uptime(&self, min: Option<Duration>) -> Result<()> {
        let restarted = self.script().restarted;
        match (restarted.map(|at| at.elapsed()), min) {
            (Some(uptime), Some(min)) if uptime < min => {
                let message = format!("started {uptime:?} ago, does not vote before {min:?}");
                Err(Error::new(ErrorKind::Unavailable, message))
            }
            _ => Ok(()),
        }
    }

    fn time(&self) -> Option<Fence> {
        let micros = self.script().clock?.elapsed().as_micros();
        Fence::new(u64::try_from(micros).unwrap_or(u64::MAX).max(1))
    }

    /// Remembers the fence that a release carried to a store with a clock, as Redis does.
    fn remember(&self, told: Option<Fence>, ttl: Duration) {
        let Some(now) = self.time() else { return };
        let most = u64::try_from(ttl.as_micros() / 2).unwrap_or(u64::MAX);
        let most = Fence::new(now.get().saturating_add(most)).unwrap_or(Fence::MAX);
        let mut script = self.script();
        script.told = script.told.max(told.map(|told| told.min(most)));
    }

    /// Returns the number of requests of an operation so far.
    pub fn asked(&self, op: Op) -> usize {
        self.script().requests.get(&op).copied().unwrap_or(0)
    }

    fn next(&self, op: Op) -> Option<Fault> {
        let mut script = self.script();
        *script.requests.entry(op).or_default() += 1;
        let once = script.once.get_mut(&op).and_then(VecDeque::pop_front);
        once.or_else(|| script.always.get(&op).copied())
    }

    async fn apply<T>(&self, op: Op, send: impl AsyncFnOnce() -> Result<T>) -> Result<T> {
        let lost = |what| Err(Error::new(ErrorKind::Unavailable, what));
        match self.next(op) {
            None => send().await,
            Some(Fault::SlowRequest(delay)) => {
                sleep(delay).await;
                send().await
            }
            Some(Fault::SlowAnswer(delay)) => {
                let answer = send().await;
                sleep(delay).await;
                answer
            }
            Some(Fault::Refused) => lost("connection refused"),
            Some(Fault::LostAnswer) => {
                let _ = send().await;
                lost("connection reset")
            }
            Some(Fault::NoAnswer) => {
                let _ = send().await;
                std::future::pending().await
            }
            Some(Fault::Hangs) => std::future::pending().await,
        }
    }
}

impl Backend for Faulty {
    fn name(&self) -> &'static str {
        self.store.first.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.store.first.capabilities()
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        let (store, faults) = (self.store.clone(), self.faults.clone());
        let forgotten = faults.script().forgotten;
        let claim = store.after(forgotten).claim(spec.clone())?;
        let inner = Inner {
            store,
            faults: faults.clone(),
            spec,
            forgotten,
            claim,
            minted: None,
            told: None,
        };
        Ok(Box::new(FaultyClaim { inner, faults }))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        if self.store.make.is_some() { None } else { self.store.first.inspector() }
    }
}

struct FaultyClaim {
    inner: Inner,
    faults: Faults,
}

/// A claim on the current store.
struct Inner {
    store: Arc<Store>,
    faults: Faults,
    spec: ClaimSpec,
    forgotten: u64,
    claim: Box<dyn Claim>,
    /// The store's clock at the claim's first attempt. A repeated attempt of a holder returns the same fence.
    minted: Option<Fence>,
    /// The fence of the hold, if a combinator granted a higher one.
    told: Option<Fence>,
}

impl Inner {
    fn now(&mut self) -> &mut dyn Claim {
        let forgotten = self.faults.script().forgotten;
        if self.forgotten != forgotten {
            (self.forgotten, self.minted) = (forgotten, None);
            if let Ok(claim) = self.store.after(forgotten).claim(self.spec.clone()) {
                self.claim = claim;
            }
        }
        &mut *self.claim
    }

    async fn attempt(&mut self, floor: Option<Fence>) -> Result<Attempt> {
        self.faults.check_uptime(self.spec.min_uptime)?;
        self.now();
        if self.minted.is_none() {
            let told = self.faults.script().told;
            let told = if self.spec.mode == Mode::Exclusive { told.map(Fence::next) } else { told };
            self.minted = self.faults.time().max(told);
        }
        let floor = floor.max(self.minted);
        let answer = self.claim.attempt(floor).await;
        let Ok(Attempt::Granted(mut grant)) = answer else {
            self.minted = None;
            return answer;
        };
        let time = self.faults.time();
        grant.fence_is_past |= time.is_some() && grant.fence <= time;
        Ok(Attempt::Granted(grant))
    }

    async fn release(&mut self) -> Result<Release> {
        self.minted = None;
        let release = self.now().release().await;
        if let (Ok(Release::Released), told) = (&release, self.told.take()) {
            self.faults.remember(told, self.spec.ttl);
        }
        release
    }

    async fn downgrade(&mut self, ttl: Duration) -> Result<Renewal> {
        let renewal = self.now().downgrade(ttl).await;
        if let (Ok(Renewal::Renewed { .. }), told) = (&renewal, self.told.take()) {
            self.faults.remember(told, self.spec.ttl);
        }
        renewal
    }
}

impl Claim for FaultyClaim {
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        let Self { inner, faults } = self;
        Box::pin(faults.apply(Op::Attempt, async move || inner.attempt(floor).await))
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(async move {
            match self.faults.next(Op::Changed) {
                None => self.inner.now().changed().await,
                Some(Fault::SlowRequest(delay) | Fault::SlowAnswer(delay)) => {
                    let change = self.inner.now().changed().await;
                    sleep(delay).await;
                    change
                }
                // `changed` cannot fail: the notification is lost.
                Some(_) => std::future::pending().await,
            }
        })
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        let Self { inner, faults } = self;
        Box::pin(faults.apply(Op::Renew, async move || inner.now().renew(ttl).await))
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        let Self { inner, faults } = self;
        Box::pin(faults.apply(Op::Downgrade, async move || inner.downgrade(ttl).await))
    }

    fn set_fence(&mut self, fence: Fence) {
        self.inner.told = Some(fence);
        self.inner.now().set_fence(fence);
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        let Self { inner, faults } = self;
        Box::pin(faults.apply(Op::Release, async move || inner.release().await))
    }
}
