//! A store that misbehaves on demand.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockkeeper_core::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Error, ErrorKind, Fence,
    Inspector, Release, Renewal, Result,
};
use tokio::time::sleep;

/// What a claim is asked.
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

/// What goes wrong with a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It reaches the store only after this time.
    SlowRequest(Duration),
    /// The store obeys at once, and its answer takes this long.
    SlowAnswer(Duration),
    /// It does not reach the store, and that is known: an error at once.
    Refused,
    /// The store obeys, and its answer is lost: an error.
    LostAnswer,
    /// The store obeys, and nobody ever hears of it.
    NoAnswer,
    /// It does not reach the store, and nobody ever hears of it.
    Hangs,
}

/// A store with faults, which are set by its [`Faults`].
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
    inner: Arc<dyn Backend>,
    faults: Faults,
}

/// The switchboard of a [`Faulty`] store. Clones are the same one.
#[derive(Debug, Clone, Default)]
pub struct Faults(Arc<Mutex<Script>>);

#[derive(Debug, Default)]
struct Script {
    always: HashMap<Op, Fault>,
    once: HashMap<Op, VecDeque<Fault>>,
    asked: HashMap<Op, usize>,
}

impl Faulty {
    /// A store around another, without faults to begin with.
    pub fn new(inner: impl Backend) -> (Self, Faults) {
        Self::around(Arc::new(inner))
    }

    /// The same, around a store that others use too.
    pub fn around(inner: Arc<dyn Backend>) -> (Self, Faults) {
        let faults = Faults::default();
        (Self { inner, faults: faults.clone() }, faults)
    }
}

impl Faults {
    fn script(&self) -> MutexGuard<'_, Script> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a fault happen to every such question from now on.
    pub fn always(&self, op: Op, fault: Fault) {
        self.script().always.insert(op, fault);
    }

    /// Makes a fault happen to the next such question. Several calls queue up.
    pub fn once(&self, op: Op, fault: Fault) {
        self.script().once.entry(op).or_default().push_back(fault);
    }

    /// Makes a fault happen to everything: `Refused` is a store that is down, `Hangs` one that is cut
    /// off.
    pub fn everything(&self, fault: Fault) {
        for op in [Op::Attempt, Op::Changed, Op::Renew, Op::Downgrade, Op::Release] {
            self.always(op, fault);
        }
    }

    /// Ends all faults.
    pub fn none(&self) {
        let mut script = self.script();
        script.always.clear();
        script.once.clear();
    }

    /// How many such questions have been asked.
    pub fn asked(&self, op: Op) -> usize {
        self.script().asked.get(&op).copied().unwrap_or(0)
    }

    fn next(&self, op: Op) -> Option<Fault> {
        let mut script = self.script();
        *script.asked.entry(op).or_default() += 1;
        let once = script.once.get_mut(&op).and_then(VecDeque::pop_front);
        once.or_else(|| script.always.get(&op).copied())
    }

    async fn apply<T>(&self, op: Op, ask: impl AsyncFnOnce() -> Result<T>) -> Result<T> {
        let lost = |what| Err(Error::new(ErrorKind::Unavailable, what));
        match self.next(op) {
            None => ask().await,
            Some(Fault::SlowRequest(delay)) => {
                sleep(delay).await;
                ask().await
            }
            Some(Fault::SlowAnswer(delay)) => {
                let answer = ask().await;
                sleep(delay).await;
                answer
            }
            Some(Fault::Refused) => lost("connection refused"),
            Some(Fault::LostAnswer) => {
                let _ = ask().await;
                lost("connection reset")
            }
            Some(Fault::NoAnswer) => {
                let _ = ask().await;
                std::future::pending().await
            }
            Some(Fault::Hangs) => std::future::pending().await,
        }
    }
}

impl Backend for Faulty {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        let inner = self.inner.claim(spec)?;
        Ok(Box::new(FaultyClaim { inner, faults: self.faults.clone() }))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.inner.inspector()
    }
}

struct FaultyClaim {
    inner: Box<dyn Claim>,
    faults: Faults,
}

impl Claim for FaultyClaim {
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        let Self { inner, faults } = self;
        Box::pin(faults.apply(Op::Attempt, async move || inner.attempt(floor).await))
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(async move {
            match self.faults.next(Op::Changed) {
                None => self.inner.changed().await,
                Some(Fault::SlowRequest(delay) | Fault::SlowAnswer(delay)) => {
                    let change = self.inner.changed().await;
                    sleep(delay).await;
                    change
                }
                // A notice has no errors: it is missed.
                Some(_) => std::future::pending().await,
            }
        })
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        let Self { inner, faults } = self;
        Box::pin(faults.apply(Op::Renew, async move || inner.renew(ttl).await))
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        let Self { inner, faults } = self;
        Box::pin(faults.apply(Op::Downgrade, async move || inner.downgrade(ttl).await))
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        let Self { inner, faults } = self;
        Box::pin(faults.apply(Op::Release, async move || inner.release().await))
    }
}
