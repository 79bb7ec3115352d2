//! A table of the claims of this process, by key, with what each has on the server. Inspection shows it, and a claim does
//! not try a lock that another claim of this process holds.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lockkeeper_core::{ClaimSpec, Fence, Label, Mode, Name, Owner, Participant};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::names::AdvisoryKey;
use crate::sessions::Session;

/// The claims of this process that hold or wait.
#[derive(Debug, Default)]
pub(crate) struct LocalClaims {
    table: Mutex<HashMap<AdvisoryKey, Vec<LocalClaim>>>,
    /// Notified when a claim is removed or downgraded.
    released: Notify,
}

/// A claim that holds or waits.
#[derive(Debug, Clone)]
pub(crate) struct LocalClaim {
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
    /// Neither a lock nor a wait, because there is no session for it.
    WithoutSession,
    Waiting(Arc<Session>),
    Held(Arc<Session>, Option<Fence>),
}

impl LocalClaim {
    /// Returns whether the claim uses the session with this process id. No two claims on one key use the same session.
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

    /// Returns whether this claim prevents the server from granting `mode` to another claim.
    fn excludes(&self, mode: Mode) -> bool {
        let Stage::Held(session, _) = &self.stage else { return false };
        let both_shared = mode == Mode::Shared && self.mode == Mode::Shared;
        !both_shared && !session.connection.is_closed()
    }
}

impl LocalClaims {
    fn table(&self) -> MutexGuard<'_, HashMap<AdvisoryKey, Vec<LocalClaim>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a claim.
    pub(crate) fn register(
        self: &Arc<Self>,
        key: AdvisoryKey,
        spec: &ClaimSpec,
        since: Instant,
        stage: Stage,
    ) -> Entry {
        let ClaimSpec { name, owner, label, mode, .. } = spec;
        let (name, owner, label, mode) = (name.clone(), *owner, label.clone(), *mode);
        let local = LocalClaim { name, owner, label, mode, since, stage };
        self.table().entry(key).or_default().push(local);
        Entry { local_claims: self.clone(), key, owner }
    }

    /// Returns the claims of this process, by key.
    pub(crate) fn all(&self) -> HashMap<AdvisoryKey, Vec<LocalClaim>> {
        self.table().clone()
    }

    /// Summarizes the claims of this process on a key, for another claim of `mode`.
    pub(crate) fn others(&self, key: AdvisoryKey, mode: Mode) -> OtherClaims {
        let table = self.table();
        let local_claims = table.get(&key).map_or(&[][..], Vec::as_slice);
        let holders =
            local_claims.iter().filter(|local| matches!(local.stage, Stage::Held(..))).count();
        OtherClaims {
            holders,
            exclude: local_claims.iter().any(|local| local.excludes(mode)),
            wait: local_claims.iter().any(LocalClaim::is_waiting),
        }
    }

    /// Waits until the summary of a key differs from `before`.
    pub(crate) async fn changed(&self, key: AdvisoryKey, mode: Mode, before: OtherClaims) {
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

/// A summary of the other claims of this process on a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct OtherClaims {
    holders: usize,
    /// Whether one of them holds the lock in a mode that excludes this claim.
    pub(crate) exclude: bool,
    /// Whether one of them waits, or its abandoned wait is being cancelled.
    pub(crate) wait: bool,
}

/// The entry of a claim. Dropping it removes the claim.
#[derive(Debug)]
pub(crate) struct Entry {
    local_claims: Arc<LocalClaims>,
    key: AdvisoryKey,
    owner: Owner,
}

impl Entry {
    fn update(&self, change: impl FnOnce(&mut LocalClaim)) {
        let mut table = self.local_claims.table();
        let mut local_claims = table.get_mut(&self.key).into_iter().flatten();
        if let Some(local) = local_claims.find(|local| local.owner == self.owner) {
            change(local);
        }
    }

    pub(crate) fn set_stage(&self, since: Instant, stage: Stage) {
        self.update(|local| (local.since, local.stage) = (since, stage));
    }

    /// Records that the hold is shared now.
    pub(crate) fn downgrade(&self) {
        self.update(|local| local.mode = Mode::Shared);
        self.local_claims.released.notify_waiters();
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut table = self.local_claims.table();
        if let Some(local_claims) = table.get_mut(&self.key) {
            local_claims.retain(|local| local.owner != self.owner);
            if local_claims.is_empty() {
                table.remove(&self.key);
            }
        }
        drop(table);
        self.local_claims.released.notify_waiters();
    }
}
