//! What claims of this process have on the server, by key: for inspection, and so that a lock which is held here is not
//! tried.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lockkeeper_core::{ClaimSpec, Fence, Label, Mode, Name, Owner, Participant};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::names::AdvisoryKey;
use crate::sessions::Session;

/// The claims of this process that hold or wait.
#[derive(Debug, Default)]
pub(crate) struct Locals {
    table: Mutex<HashMap<AdvisoryKey, Vec<Local>>>,
    /// Notified when a claim has left, or was downgraded.
    released: Notify,
}

/// A claim that holds or waits.
#[derive(Debug, Clone)]
pub(crate) struct Local {
    pub(crate) name: Name,
    owner: Owner,
    label: Label,
    mode: Mode,
    since: Instant,
    stage: Stage,
}

/// What a claim has on the server.
#[derive(Debug, Clone)]
pub(crate) enum Stage {
    /// Neither a lock nor a wait: there is no session for it.
    WithoutSession,
    Waiting(Arc<Session>),
    Held(Arc<Session>, Option<Fence>),
}

impl Local {
    /// Returns whether a session serves the claim. No other claim on its key has that session.
    pub(crate) fn uses(&self, pid: i32) -> bool {
        match &self.stage {
            Stage::Held(session, _) | Stage::Waiting(session) => session.connection.pid == pid,
            Stage::WithoutSession => false,
        }
    }

    pub(crate) fn is_waiting(&self) -> bool {
        matches!(self.stage, Stage::Waiting(_))
    }

    /// Returns the claim as inspection shows it.
    pub(crate) fn participant(&self) -> Participant {
        let fence = if let Stage::Held(_, fence) = self.stage { fence } else { None };
        let (owner, label) = (Some(self.owner), Some(self.label.clone()));
        let age = Some(self.since.elapsed());
        Participant { owner, label, mode: self.mode, fence, age, remaining: None }
    }

    /// Returns whether the server refuses `mode` to another claim because of this one.
    fn excludes(&self, mode: Mode) -> bool {
        let Stage::Held(session, _) = &self.stage else { return false };
        let both_shared = mode == Mode::Shared && self.mode == Mode::Shared;
        !both_shared && !session.connection.is_closed()
    }
}

impl Locals {
    fn table(&self) -> MutexGuard<'_, HashMap<AdvisoryKey, Vec<Local>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a claim.
    pub(crate) fn enter(
        self: &Arc<Self>,
        key: AdvisoryKey,
        spec: &ClaimSpec,
        since: Instant,
        stage: Stage,
    ) -> Entry {
        let ClaimSpec { name, owner, label, mode, .. } = spec;
        let (name, owner, label, mode) = (name.clone(), *owner, label.clone(), *mode);
        let local = Local { name, owner, label, mode, since, stage };
        self.table().entry(key).or_default().push(local);
        Entry { locals: self.clone(), key, owner }
    }

    /// Returns what this process has, by key.
    pub(crate) fn all(&self) -> HashMap<AdvisoryKey, Vec<Local>> {
        self.table().clone()
    }

    /// Returns what the other claims of this process have of a key, as it matters to one of `mode` that has nothing.
    pub(crate) fn others(&self, key: AdvisoryKey, mode: Mode) -> Others {
        let table = self.table();
        let locals = table.get(&key).map_or(&[][..], Vec::as_slice);
        let holders = locals.iter().filter(|local| matches!(local.stage, Stage::Held(..))).count();
        Others {
            holders,
            exclude: locals.iter().any(|local| local.excludes(mode)),
            wait: locals.iter().any(Local::is_waiting),
        }
    }

    /// Waits until the other claims of this process have something else of a key than `before`.
    pub(crate) async fn changed(&self, key: AdvisoryKey, mode: Mode, before: Others) {
        loop {
            let mut released = std::pin::pin!(self.released.notified());
            released.as_mut().enable();
            if self.others(key, mode) != before {
                return;
            }
            released.await;
        }
    }
}

/// What the other claims of this process have of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Others {
    holders: usize,
    /// Whether the server would refuse a try because of their holds.
    pub(crate) exclude: bool,
    /// Whether one of them waits, or has given up and its wait is being cancelled.
    pub(crate) wait: bool,
}

/// A claim's entry. Dropped, the claim neither holds nor waits any more.
#[derive(Debug)]
pub(crate) struct Entry {
    locals: Arc<Locals>,
    key: AdvisoryKey,
    owner: Owner,
}

impl Entry {
    fn update(&self, change: impl FnOnce(&mut Local)) {
        let mut table = self.locals.table();
        let mut locals = table.get_mut(&self.key).into_iter().flatten();
        if let Some(local) = locals.find(|local| local.owner == self.owner) {
            change(local);
        }
    }

    pub(crate) fn set_stage(&self, since: Instant, stage: Stage) {
        self.update(|local| (local.since, local.stage) = (since, stage));
    }

    /// Takes note that the hold is shared now.
    pub(crate) fn downgrade(&self) {
        self.update(|local| local.mode = Mode::Shared);
        self.locals.released.notify_waiters();
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut table = self.locals.table();
        if let Some(locals) = table.get_mut(&self.key) {
            locals.retain(|local| local.owner != self.owner);
            if locals.is_empty() {
                table.remove(&self.key);
            }
        }
        drop(table);
        self.locals.released.notify_waiters();
    }
}
