//! A table of the claims of this process, by key, with what each has on the server. Inspection shows it, and a claim does
//! not try a lock that another claim of this process holds. It also collects the changes to the table of names.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockkeeper_core::{ClaimSpec, Fence, Label, Mode, Name, Owner, Participant};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::names::AdvisoryKey;
use crate::sessions::Session;

/// The maximum number of rows to remove that are remembered while nothing is written. Other rows stay until their session ends.
const MAX_REMOVED: usize = 65_536;

/// The claims of this process that hold or wait.
#[derive(Debug, Default)]
pub(crate) struct LocalClaims {
    table: Mutex<Table>,
    /// Whether there is a table of names.
    are_written: bool,
    /// Notified when a claim is removed or downgraded.
    released: Notify,
}

#[derive(Debug, Default)]
struct Table {
    claims: HashMap<AdvisoryKey, Vec<LocalClaim>>,
    /// The claims that the table of names may have to show, the oldest first. Most of them end before they are old enough.
    unwritten: VecDeque<(AdvisoryKey, Owner)>,
    /// The rows to remove from the table of names.
    removed: Vec<RowId>,
    /// Whether all claims have to be written, because writes have failed.
    write_all: bool,
}

/// The primary key of a row in the table of names: a lock, and the session that has it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RowId {
    pub(crate) pid: i32,
    pub(crate) session_start: f64,
    pub(crate) key: AdvisoryKey,
}

impl RowId {
    fn new(session: &Session, key: AdvisoryKey) -> Self {
        let (pid, session_start) = (session.connection.pid, session.connection.started);
        Self { pid, session_start, key }
    }
}

/// What the table of names shows about a lock.
#[derive(Debug)]
pub(crate) struct Description {
    pub(crate) granted: bool,
    pub(crate) since: Instant,
    pub(crate) name: Name,
    pub(crate) label: Label,
    pub(crate) owner: Owner,
    pub(crate) fence: Option<Fence>,
    /// Whether the table has no row for it yet.
    is_new: bool,
}

/// Changes to the table of names.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) added: Vec<(RowId, Description)>,
    pub(crate) removed: Vec<RowId>,
    /// Whether there are claims that are not old enough to be added.
    pub(crate) has_young: bool,
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
    /// Its row in the table of names.
    row: Option<RowId>,
    /// Whether it is in `Table::unwritten`. A statement cannot write a row twice.
    is_unwritten: bool,
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

    /// Returns its row in the table of names, and what the row shows. Returns `None` if it has nothing on the server.
    fn describe(&self, key: AdvisoryKey) -> Option<(RowId, Description)> {
        let (session, granted, fence) = match &self.stage {
            Stage::Held(session, fence) => (session, true, *fence),
            Stage::Waiting(session) => (session, false, None),
            Stage::WithoutSession => return None,
        };
        let (name, label) = (self.name.clone(), self.label.clone());
        let (since, owner, is_new) = (self.since, self.owner, self.row.is_none());
        Some((
            RowId::new(session, key),
            Description { granted, since, name, label, owner, fence, is_new },
        ))
    }

    /// Returns whether this claim prevents the server from granting `mode` to another claim.
    fn excludes(&self, mode: Mode) -> bool {
        let Stage::Held(session, _) = &self.stage else { return false };
        let both_shared = mode == Mode::Shared && self.mode == Mode::Shared;
        !both_shared && !session.connection.is_closed()
    }
}

impl LocalClaims {
    /// Creates an empty table. `are_written`: whether there is a table of names.
    pub(crate) fn new(are_written: bool) -> Self {
        Self { are_written, ..Self::default() }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
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
        let is_unwritten = self.are_written && matches!(stage, Stage::Waiting(_));
        let row = None;
        let local = LocalClaim { name, owner, label, mode, since, stage, row, is_unwritten };
        let mut table = self.table();
        table.claims.entry(key).or_default().push(local);
        if is_unwritten {
            table.unwritten.push_back((key, owner));
        }
        drop(table);
        Entry { local_claims: self.clone(), key, owner }
    }

    /// Returns the claims of this process, by key.
    pub(crate) fn all(&self) -> HashMap<AdvisoryKey, Vec<LocalClaim>> {
        self.table().claims.clone()
    }

    /// Summarizes the claims of this process on a key, for another claim of `mode`.
    pub(crate) fn others(&self, key: AdvisoryKey, mode: Mode) -> OtherClaims {
        let table = self.table();
        let local_claims = table.claims.get(&key).map_or(&[][..], Vec::as_slice);
        let holders =
            local_claims.iter().filter(|local| matches!(local.stage, Stage::Held(..))).count();
        OtherClaims {
            holders,
            exclude: local_claims.iter().any(|local| local.excludes(mode)),
            wait: local_claims.iter().any(LocalClaim::is_waiting),
        }
    }

    /// Returns whether the table of names may have to be changed.
    pub(crate) fn have_changes(&self) -> bool {
        let table = self.table();
        table.write_all || !table.unwritten.is_empty() || !table.removed.is_empty()
    }

    /// Returns the next changes to the table of names, for claims that are at least `min_age` old: up to `max` rows to add, and
    /// as many to remove.
    pub(crate) fn take_changes(&self, min_age: Duration, max: usize) -> Changes {
        let mut guard = self.table();
        let table = &mut *guard;
        if std::mem::take(&mut table.write_all) {
            table.unwritten = VecDeque::new();
            for (key, claims) in &mut table.claims {
                for claim in claims {
                    claim.is_unwritten = true;
                    table.unwritten.push_back((*key, claim.owner));
                }
            }
        }
        let rest = table.removed.len().saturating_sub(max);
        let mut changes = Changes { removed: table.removed.split_off(rest), ..Changes::default() };
        let mut young = VecDeque::new();
        // A removal that is left could be of the same lock and session as a row to add.
        while rest == 0
            && changes.added.len() < max
            && let Some((key, owner)) = table.unwritten.pop_front()
        {
            let mut claims = table.claims.get_mut(&key).into_iter().flatten();
            let Some(claim) = claims.find(|claim| claim.owner == owner) else { continue };
            if claim.since.elapsed() < min_age {
                young.push_back((key, owner));
                continue;
            }
            claim.is_unwritten = false;
            let Some((id, description)) = claim.describe(key) else { continue };
            claim.row = Some(id);
            changes.added.push((id, description));
        }
        changes.has_young = !young.is_empty();
        young.append(&mut table.unwritten);
        table.unwritten = young;
        changes
    }

    /// Takes back changes that may not have been made. `not_made`: whether it is certain. All claims are written again.
    pub(crate) fn put_back(&self, changes: Changes, not_made: bool) {
        if changes.added.is_empty() && changes.removed.is_empty() {
            return;
        }
        let mut guard = self.table();
        let table = &mut *guard;
        table.write_all = true;
        if not_made {
            // Rows that do not exist need no removal.
            for (id, _) in changes.added.iter().filter(|(_, lock)| lock.is_new) {
                let claims = table.claims.get_mut(&id.key).into_iter().flatten();
                for claim in claims.filter(|claim| claim.row == Some(*id)) {
                    claim.row = None;
                }
                table.removed.retain(|removed| removed != id);
            }
        }
        let room = MAX_REMOVED.saturating_sub(table.removed.len());
        table.removed.extend(changes.removed.into_iter().take(room));
    }

    /// Makes all claims be written again.
    pub(crate) fn write_all_again(&self) {
        self.table().write_all = true;
    }

    /// Replaces the list of claims to write by a mark to write all of them, so that it does not grow while nothing is written.
    pub(crate) fn collapse_changes(&self) {
        let mut table = self.table();
        table.write_all = true;
        table.unwritten = VecDeque::new();
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
        let mut local_claims = table.claims.get_mut(&self.key).into_iter().flatten();
        if let Some(local) = local_claims.find(|local| local.owner == self.owner) {
            change(local);
        }
    }

    pub(crate) fn set_stage(&self, since: Instant, stage: Stage) {
        let (waits, mut removed) = (matches!(stage, Stage::Waiting(_)), None);
        self.update(|local| {
            (local.since, local.stage) = (since, stage);
            let id = local.describe(self.key).map(|(id, _)| id);
            // The row of a waiter that is granted the lock is updated later.
            removed = local.row.take_if(|row| Some(*row) != id);
        });
        if waits {
            self.lasts();
        }
        if let Some(row) = removed {
            self.local_claims.table().removed.push(row);
        }
    }

    /// Records that the claim has lasted for some time, or may: the table of names may have to show it.
    pub(crate) fn lasts(&self) {
        let mut is_new = false;
        if self.local_claims.are_written {
            self.update(|local| is_new = !std::mem::replace(&mut local.is_unwritten, true));
        }
        if is_new {
            self.local_claims.table().unwritten.push_back((self.key, self.owner));
        }
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
        let Table { claims, removed, .. } = &mut *table;
        if let Some(local_claims) = claims.get_mut(&self.key) {
            local_claims.retain(|local| {
                let is_other = local.owner != self.owner;
                let is_removed = !is_other && removed.len() < MAX_REMOVED;
                removed.extend(local.row.filter(|_| is_removed));
                is_other
            });
            if local_claims.is_empty() {
                claims.remove(&self.key);
            }
        }
        drop(table);
        self.local_claims.released.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use lockkeeper_core::Background;
    use tokio::runtime::Handle;

    use super::*;

    fn claim(local_claims: &Arc<LocalClaims>) -> (Entry, RowId) {
        let key = AdvisoryKey::of("a");
        let name = Name::new("a").unwrap();
        let spec = ClaimSpec::new(name, Duration::from_secs(9), Background::new(Handle::current()));
        let entry = local_claims.register(key, &spec, Instant::now(), Stage::WithoutSession);
        (entry, RowId { pid: 1, session_start: 0.0, key })
    }

    fn row(entry: &Entry, id: RowId, is_new: bool) -> Changes {
        entry.update(|local| local.row = Some(id));
        let (name, label, owner) = (Name::new("a").unwrap(), Label::default(), entry.owner);
        let since = Instant::now();
        let lock = Description { granted: true, since, name, label, owner, fence: None, is_new };
        Changes { added: vec![(id, lock)], ..Changes::default() }
    }

    /// Otherwise each lock that ends while nothing can be written leaves a removal behind.
    #[tokio::test]
    async fn a_row_that_was_not_written_is_not_removed() {
        for (is_new, not_made, removals) in [(true, true, 0), (true, false, 1), (false, true, 1)] {
            for ends_before in [false, true] {
                let local_claims = Arc::new(LocalClaims::new(true));
                let (entry, id) = claim(&local_claims);
                let changes = row(&entry, id, is_new);
                if ends_before {
                    drop(entry);
                    local_claims.put_back(changes, not_made);
                } else {
                    local_claims.put_back(changes, not_made);
                    drop(entry);
                }
                let removed = local_claims.table().removed.len();
                assert_eq!(removed, removals, "{is_new} {not_made} {ends_before}");
            }
        }
    }

    #[tokio::test]
    async fn removals_are_capped() {
        let local_claims = Arc::new(LocalClaims::new(true));
        let (entry, id) = claim(&local_claims);
        local_claims.table().removed = vec![id; MAX_REMOVED - 1];
        let removed = vec![id; 5];
        local_claims.put_back(Changes { removed, ..row(&entry, id, false) }, false);
        drop(entry);
        assert_eq!(local_claims.table().removed.len(), MAX_REMOVED);
    }

    /// A removal that is sent later could be of the row that was added.
    #[tokio::test]
    async fn rows_are_added_after_all_removals() {
        let local_claims = Arc::new(LocalClaims::new(true));
        let (entry, id) = claim(&local_claims);
        entry.lasts();
        local_claims.table().removed = vec![id; 3];
        assert_eq!(local_claims.take_changes(Duration::ZERO, 2).removed.len(), 2);
        assert_eq!(local_claims.table().unwritten.len(), 1);
        assert_eq!(local_claims.take_changes(Duration::ZERO, 2).removed.len(), 1);
        assert_eq!(local_claims.table().unwritten.len(), 0);
    }
}
