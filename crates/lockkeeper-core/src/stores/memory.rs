//! The memory store: the reference implementation of a store.

mod table;

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;
use tokio::time::Instant;

use crate::contract::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Fences, Grant, Inspector,
    Kind, LockInfo, Mode, Release, Renewal,
};
use crate::error::{Error, ErrorKind, Result};
use crate::fence::Fence;
use crate::loss::LossReason;
use crate::name::Name;
use table::{Attempted, ClaimState, Step, Table};

/// A store in the memory of this process: for tests, for development, and as the reference for other stores.
///
/// It has leases, a fair queue with notifications, fences, all modes and inspection. It uses tokio's clock, so tests can
/// pause it. Each `Memory` is a separate store, and clones share one. It does not exclude other processes.
#[derive(Debug, Clone, Default)]
pub struct Memory {
    table: Arc<Mutex<Table>>,
    /// Notified at every change.
    changed: Arc<Notify>,
}

impl Memory {
    /// Creates an empty store.
    pub fn new() -> Self {
        Self::default()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Backend for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            leases: true,
            fair: true,
            push: true,
            shared: true,
            permits: true,
            downgrade: true,
            fences: Fences::Raisable,
        }
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        Ok(Box::new(MemoryClaim {
            store: self.clone(),
            spec,
            position: None,
            holds: false,
            notify: None,
            notice: None,
        }))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        Some(self)
    }
}

struct MemoryClaim {
    store: Memory,
    spec: ClaimSpec,
    /// The position in the queue, if it is queued.
    position: Option<u64>,
    /// Whether the engine knows that the claim holds the lock.
    holds: bool,
    /// Notified when the table changes the state of this claim.
    notify: Option<Arc<Notify>>,
    /// For a claim that is not queued: a subscription to the next change.
    notice: Option<Pin<Box<OwnedNotified>>>,
}

/// The highest floor that is accepted, unless the store has granted such a fence itself. The fences of this store count
/// grants, so they stay far below.
const MAX_FLOOR: u64 = 1 << 62;

/// Returns a future that is ready.
fn ready<'a, T: Send + 'a>(answer: T) -> BoxFuture<'a, T> {
    Box::pin(std::future::ready(answer))
}

impl MemoryClaim {
    fn notify(&mut self) -> Arc<Notify> {
        self.notify.get_or_insert_default().clone()
    }

    fn granted(&mut self, fence: Fence) -> Grant {
        self.holds = true;
        self.position = None;
        self.notice = None;
        Grant { fence: Some(fence), fence_is_past: false, valid_for: Some(self.spec.ttl) }
    }

    fn renewed(&mut self, ttl: Duration, step: Step) -> Renewal {
        self.holds = self.store.table().renew(&self.spec, step, ttl, Instant::now());
        if !self.holds {
            return Renewal::Lost(LossReason::Broken);
        }
        if step == Step::Downgrade {
            self.spec.mode = Mode::Shared;
            self.store.changed.notify_waiters();
        }
        Renewal::Renewed { valid_for: ttl }
    }
}

impl Claim for MemoryClaim {
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        let implausible = |floor: &Fence| {
            floor.get() > MAX_FLOOR && floor.get() - 1 > self.store.table().last_fence()
        };
        if let Some(floor) = floor.filter(implausible) {
            let message = format!(
                "the next fence must be at least {floor}, which is not a fence of this store: it counts its grants"
            );
            return ready(Err(Error::new(ErrorKind::Config, message)));
        }
        let notify = if self.spec.queue { Some(self.notify()) } else { None };
        let (spec, position, notify) = (&self.spec, self.position, notify.as_ref());
        let attempted = self.store.table().attempt(spec, position, floor, notify, Instant::now());
        self.store.changed.notify_waiters();
        ready(Ok(match attempted {
            Attempted::Granted(fence) => Attempt::Granted(self.granted(fence)),
            Attempted::Contended { position, retry, holder, listener } => {
                self.position = position;
                self.notice = listener.map(|listener| Box::pin(listener.notified_owned()));
                self.holds = false;
                Attempt::Contended { retry, holder }
            }
        }))
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(async move {
            if let Some(notice) = &mut self.notice {
                notice.as_mut().await;
                self.notice = None;
                return Change::LookAgain;
            }
            let notify = self.notify();
            loop {
                let state = self.store.table().state(&self.spec, self.position, &notify);
                match state {
                    ClaimState::Holds(fence) if !self.holds => {
                        return Change::Granted(self.granted(fence));
                    }
                    ClaimState::Absent if self.holds => return Change::Lost(LossReason::Broken),
                    ClaimState::MustRetry => return Change::LookAgain,
                    ClaimState::Absent if self.position.take().is_some() => {
                        return Change::LookAgain;
                    }
                    ClaimState::Holds(_) | ClaimState::Waits | ClaimState::Absent => {}
                }
                notify.notified().await;
            }
        })
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        ready(Ok(self.renewed(ttl, Step::Renew)))
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        match self.spec.mode.kind() {
            Kind::Lock => ready(Ok(self.renewed(ttl, Step::Downgrade))),
            Kind::Semaphore => ready(Err(Error::unsupported("downgrades of permits"))),
        }
    }

    // The fences of this store do not follow a clock.
    fn set_fence(&mut self, _fence: Fence) {}

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        let held = self.store.table().release(&self.spec, self.position.take(), Instant::now());
        self.holds = false;
        self.notice = None;
        self.store.changed.notify_waiters();
        ready(Ok(if held { Release::Released } else { Release::WasNotHeld }))
    }
}

impl Inspector for Memory {
    fn list(&self, prefix: &str) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        ready(Ok(self.table().list(Instant::now(), |name| name.starts_with(prefix))))
    }

    fn show(&self, name: &Name) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        ready(Ok(self.table().list(Instant::now(), |other| other == name.as_str())))
    }

    fn break_lock(&self, name: &Name) -> BoxFuture<'_, Result<usize>> {
        let broken = self.table().break_lock(name, Instant::now());
        self.changed.notify_waiters();
        ready(Ok(broken))
    }

    fn changed(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.changed.notified())
    }
}
