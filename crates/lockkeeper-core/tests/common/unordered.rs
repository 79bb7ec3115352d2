//! A store without a queue, leases or fences, like a directory of locked files.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lockkeeper_core::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Fence, Grant, Holder,
    Inspector, Kind, Label, LockInfo, LossReason, Mode, Name, Owner, Participant, Release, Renewal,
    Result, Retry,
};
use tokio::sync::watch;

/// The owner, mode and label of each holder, by name.
type Holders = HashMap<Name, Vec<(Owner, Mode, Label)>>;

/// The store. Clones share their data. Every change notifies all claims.
#[derive(Debug, Clone)]
pub struct Unordered {
    holders: Arc<Mutex<Holders>>,
    changes: watch::Sender<u64>,
    /// Whether waiters are notified.
    push: bool,
}

impl Default for Unordered {
    fn default() -> Self {
        Self { holders: Arc::default(), changes: watch::Sender::new(0), push: true }
    }
}

impl Unordered {
    /// Returns a store that sends no notifications.
    pub fn silent() -> Self {
        Self { push: false, ..Self::default() }
    }

    fn holders(&self) -> MutexGuard<'_, Holders> {
        self.holders.lock().unwrap()
    }

    fn change(&self) {
        self.changes.send_modify(|changes| *changes += 1);
    }

    fn infos(&self, wanted: impl Fn(&str) -> bool) -> Vec<LockInfo> {
        let holders = self.holders();
        let wanted = holders.iter().filter(|(name, _)| wanted(name));
        let participant = |(owner, mode, label): &(Owner, Mode, Label)| Participant {
            owner: Some(*owner),
            label: Some(label.clone()),
            mode: *mode,
            fence: None,
            age: None,
            remaining: None,
        };
        let mut infos: Vec<LockInfo> = wanted
            .map(|(name, holders)| LockInfo {
                name: name.clone(),
                kind: Kind::Lock,
                holders: holders.iter().map(participant).collect(),
                waiters: Vec::new(),
            })
            .collect();
        infos.sort_by(|a, b| a.name.cmp(&b.name));
        infos
    }
}

impl Backend for Unordered {
    fn name(&self) -> &'static str {
        "unordered"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { push: self.push, shared: true, downgrade: true, ..Capabilities::default() }
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        let claim = UnorderedClaim {
            store: self.clone(),
            changes: self.changes.subscribe(),
            spec,
            held: false,
        };
        Ok(Box::new(claim))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        Some(self)
    }
}

struct UnorderedClaim {
    store: Unordered,
    changes: watch::Receiver<u64>,
    spec: ClaimSpec,
    held: bool,
}

impl UnorderedClaim {
    fn remove(&mut self) -> bool {
        let mut all = self.store.holders();
        let mut removed = false;
        if let Some(holders) = all.get_mut(&self.spec.name) {
            let before = holders.len();
            holders.retain(|(owner, ..)| *owner != self.spec.owner);
            removed = holders.len() < before;
            if holders.is_empty() {
                all.remove(&self.spec.name);
            }
        }
        drop(all);
        if removed {
            self.store.change();
        }
        self.held = false;
        removed
    }

    fn is_held(&self) -> bool {
        let all = self.store.holders();
        all.get(&self.spec.name).is_some_and(|h| h.iter().any(|(o, ..)| *o == self.spec.owner))
    }

    fn try_acquire(&mut self) -> Attempt {
        self.changes.borrow_and_update();
        let mut all = self.store.holders();
        let holders = all.entry(self.spec.name.clone()).or_default();
        let granted = holders.iter().any(|(owner, ..)| *owner == self.spec.owner);
        let mode = self.spec.mode;
        let shared = |mode| mode == Mode::Shared;
        if !granted {
            if !holders.iter().all(|(_, held, _)| shared(*held) && shared(mode)) {
                return Attempt::Contended { retry: Retry::OnNotify, holder: Holder::Unknown };
            }
            holders.push((self.spec.owner, mode, self.spec.label.clone()));
        }
        self.held = true;
        Attempt::Granted(Grant { fence: None, fence_is_past: false, valid_for: None })
    }
}

impl Claim for UnorderedClaim {
    fn attempt(&mut self, _floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        let attempt = self.try_acquire();
        Box::pin(std::future::ready(Ok(attempt)))
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(async move {
            loop {
                if !self.store.push {
                    std::future::pending::<()>().await;
                }
                self.changes.changed().await.unwrap();
                if !self.held {
                    return Change::LookAgain;
                }
                if !self.is_held() {
                    self.held = false;
                    return Change::Lost(LossReason::Broken);
                }
            }
        })
    }

    fn renew(&mut self, _ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        self.held = self.is_held();
        let renewal = if self.held { Renewal::Held } else { Renewal::Lost(LossReason::Broken) };
        Box::pin(std::future::ready(Ok(renewal)))
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        let mut all = self.store.holders();
        for (owner, mode, _) in all.entry(self.spec.name.clone()).or_default() {
            if *owner == self.spec.owner {
                *mode = Mode::Shared;
            }
        }
        drop(all);
        self.spec.mode = Mode::Shared;
        self.store.change();
        self.renew(ttl)
    }

    fn set_fence(&mut self, _fence: Fence) {}

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        let release = if self.remove() { Release::Released } else { Release::WasNotHeld };
        Box::pin(std::future::ready(Ok(release)))
    }
}

impl Drop for UnorderedClaim {
    fn drop(&mut self) {
        self.remove();
    }
}

impl Inspector for Unordered {
    fn list(&self, prefix: &str) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let infos = self.infos(|name| name.starts_with(prefix));
        Box::pin(std::future::ready(Ok(infos)))
    }

    fn show(&self, name: &Name) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let infos = self.infos(|other| other == name.as_str());
        Box::pin(std::future::ready(Ok(infos)))
    }

    fn break_lock(&self, name: &Name) -> BoxFuture<'_, Result<usize>> {
        let broken = self.holders().remove(name).map_or(0, |holders| holders.len());
        self.change();
        Box::pin(std::future::ready(Ok(broken)))
    }

    fn changed(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::pending())
    }
}
