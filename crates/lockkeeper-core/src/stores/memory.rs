//! The memory store: the reference for what a store does.

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
use table::{Asked, Standing, Step, Table};

/// A store inside this process: for tests, for development, and as the reference for other stores.
///
/// Leases, a fair queue, hand-over by push, fences, all modes, inspection. It runs on tokio's clock,
/// so tests may pause it. Each `Memory` is a store of its own; clones are the same one. It does not
/// exclude other processes.
#[derive(Debug, Clone, Default)]
pub struct Memory {
    table: Arc<Mutex<Table>>,
    /// Told whenever anything changes.
    changed: Arc<Notify>,
}

impl Memory {
    /// An empty store.
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
            ticket: None,
            holds: false,
            bell: None,
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
    /// The place in the queue, if there is one.
    ticket: Option<u64>,
    /// Whether this side knows that it holds.
    holds: bool,
    /// Rung when the table does something to this claim.
    bell: Option<Arc<Notify>>,
    /// For a claim that is not queued: made while the table was locked, so that no release between
    /// the attempt and the wait is missed.
    notice: Option<Pin<Box<OwnedNotified>>>,
}

/// The highest floor that is taken, unless the store has granted such a fence itself. The fences of this store count
/// grants: it comes nowhere near this number, which leaves it as many fences again.
const MAX_FLOOR: u64 = 1 << 62;

/// An answer that is there already.
fn ready<'a, T: Send + 'a>(answer: T) -> BoxFuture<'a, T> {
    Box::pin(std::future::ready(answer))
}

impl MemoryClaim {
    fn bell(&mut self) -> Arc<Notify> {
        self.bell.get_or_insert_default().clone()
    }

    fn granted(&mut self, fence: Fence) -> Grant {
        self.holds = true;
        self.ticket = None;
        self.notice = None;
        Grant { fence: Some(fence), valid_for: Some(self.spec.ttl) }
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
            let message =
                format!("a floor of {floor} is not of this store, which counts its grants");
            return ready(Err(Error::new(ErrorKind::Config, message)));
        }
        let bell = if self.spec.queue { Some(self.bell()) } else { None };
        let asked =
            self.store.table().ask(&self.spec, self.ticket, floor, bell.as_ref(), Instant::now());
        self.store.changed.notify_waiters();
        ready(Ok(match asked {
            Asked::Granted(fence) => Attempt::Granted(self.granted(fence)),
            Asked::Contended { ticket, retry, holder, notice } => {
                self.ticket = ticket;
                self.notice = notice.map(|notice| Box::pin(notice.notified_owned()));
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
            let bell = self.bell();
            loop {
                let standing = self.store.table().standing(&self.spec, self.ticket, &bell);
                match standing {
                    Standing::Holds(fence) if !self.holds => {
                        return Change::Granted(self.granted(fence));
                    }
                    Standing::Gone if self.holds => return Change::Lost(LossReason::Broken),
                    Standing::ShouldAsk => return Change::LookAgain,
                    Standing::Gone if self.ticket.take().is_some() => return Change::LookAgain,
                    Standing::Holds(_) | Standing::Waits | Standing::Gone => {}
                }
                bell.notified().await;
            }
        })
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        ready(Ok(self.renewed(ttl, Step::Renew)))
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        match self.spec.mode.kind() {
            Kind::Lock => ready(Ok(self.renewed(ttl, Step::Downgrade))),
            Kind::Semaphore => ready(Err(Error::unsupported("downgrade for permits"))),
        }
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        let held = self.store.table().release(&self.spec, self.ticket.take(), Instant::now());
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
