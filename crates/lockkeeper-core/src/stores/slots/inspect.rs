//! Inspection of semaphores that are made of slots.

use std::collections::BTreeMap;

use super::Slots;
use crate::contract::{BoxFuture, Inspector, Kind, LockInfo, Mode, Participant};
use crate::error::Result;
use crate::name::Name;

/// Combines slots and gates into semaphores.
fn as_semaphores(infos: Vec<LockInfo>) -> Vec<LockInfo> {
    let mut shown = Vec::new();
    let mut semaphores: BTreeMap<String, LockInfo> = BTreeMap::new();
    for info in infos {
        let Some((name, part)) = info.name.split_once('\0') else {
            shown.push(info);
            continue;
        };
        if part == "turn" {
            // A try in progress neither holds nor waits.
            continue;
        }
        let semaphore = semaphores.entry(name.to_owned()).or_insert_with(|| LockInfo {
            name: Name::derived(name.to_owned()),
            kind: Kind::Semaphore,
            holders: Vec::new(),
            waiters: Vec::new(),
        });
        if part == "gate" {
            let at_gate = info.holders.into_iter().chain(info.waiters);
            semaphore.waiters.extend(at_gate.map(one_permit));
        } else {
            for holder in info.holders {
                let known = semaphore.holders.iter_mut().find(|known| known.owner == holder.owner);
                match known.map(|known| &mut known.mode) {
                    Some(Mode::Permits { take, .. }) => *take += 1,
                    _ => semaphore.holders.push(one_permit(holder)),
                }
            }
        }
    }
    for semaphore in semaphores.values_mut() {
        // The claim at the gate counts as a waiter, even if it holds some slots.
        let LockInfo { holders, waiters, .. } = semaphore;
        holders.retain(|holder| {
            holder.owner.is_none() || waiters.iter().all(|waiter| waiter.owner != holder.owner)
        });
    }
    shown.extend(semaphores.into_values());
    shown.sort_by(|a, b| (&a.name, a.kind).cmp(&(&b.name, b.kind)));
    shown
}

/// Sets the mode to one permit. The store does not record the total number, so `of` is 0.
fn one_permit(participant: Participant) -> Participant {
    Participant { mode: Mode::Permits { take: 1, of: 0 }, ..participant }
}

impl Inspector for Slots {
    fn list(&self, prefix: &str) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let prefix = prefix.to_owned();
        Box::pin(async move { Ok(as_semaphores(self.inner_inspector()?.list(&prefix).await?)) })
    }

    fn show(&self, name: &Name) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let name = name.clone();
        Box::pin(async move {
            let inner = self.inner_inspector()?;
            let mut infos = inner.show(&name).await?;
            infos.extend(inner.list(&format!("{name}\0")).await?);
            Ok(as_semaphores(infos))
        })
    }

    fn break_lock(&self, name: &Name) -> BoxFuture<'_, Result<usize>> {
        let name = name.clone();
        Box::pin(async move {
            let inner = self.inner_inspector()?;
            let broken = inner.break_lock(&name).await?;
            let parts = inner.list(&format!("{name}\0")).await?;
            // Counts owners, not slots.
            let holders: usize =
                as_semaphores(parts.clone()).iter().map(|info| info.holders.len()).sum();
            let gates = parts.iter().filter(|part| part.name.ends_with("\0gate"));
            let at_gate: Vec<_> =
                gates.flat_map(|gate| &gate.holders).map(|waiter| waiter.owner).collect();
            for part in &parts {
                let holder = part.holders.first().map(|holder| holder.owner);
                if part.name.contains("\0slot\0")
                    && !holder.is_some_and(|owner| at_gate.contains(&owner))
                {
                    inner.break_lock(&part.name).await?;
                }
            }
            Ok(broken + holders)
        })
    }

    fn changed(&self) -> BoxFuture<'_, ()> {
        match self.inner.inspector() {
            Some(inspector) => inspector.changed(),
            None => Box::pin(std::future::pending()),
        }
    }
}
