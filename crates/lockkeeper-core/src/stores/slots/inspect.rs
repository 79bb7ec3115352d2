//! A look at semaphores that are made of slots.

use std::collections::BTreeMap;

use super::Slots;
use crate::contract::{BoxFuture, Inspector, Kind, LockInfo, Mode, Participant};
use crate::error::Result;
use crate::name::Name;

/// Shows slots and gates as the semaphores that they are.
fn as_semaphores(infos: Vec<LockInfo>) -> Vec<LockInfo> {
    let mut shown = Vec::new();
    let mut semaphores: BTreeMap<String, LockInfo> = BTreeMap::new();
    for info in infos {
        let Some((name, part)) = info.name.split_once('\0') else {
            shown.push(info);
            continue;
        };
        if part == "turn" {
            // A try that is being decided: it neither holds nor waits.
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
            semaphore.waiters.extend(at_gate.map(|participant| permits(participant, 1)));
        } else {
            for holder in info.holders {
                let known = semaphore.holders.iter_mut().find(|known| known.owner == holder.owner);
                match known.map(|known| &mut known.mode) {
                    Some(Mode::Permits { take, .. }) => *take += 1,
                    _ => semaphore.holders.push(permits(holder, 1)),
                }
            }
        }
    }
    for semaphore in semaphores.values_mut() {
        // Whoever is at the gate waits, even if it has some slots already.
        let LockInfo { holders, waiters, .. } = semaphore;
        holders.retain(|holder| {
            holder.owner.is_none() || waiters.iter().all(|waiter| waiter.owner != holder.owner)
        });
    }
    shown.extend(semaphores.into_values());
    shown.sort_by(|a, b| (&a.name, a.kind).cmp(&(&b.name, b.kind)));
    shown
}

/// How many permits its holder believes in is not written anywhere: 0.
fn permits(participant: Participant, take: u32) -> Participant {
    Participant { mode: Mode::Permits { take, of: 0 }, ..participant }
}

impl Inspector for Slots {
    fn list(&self, prefix: &str) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let prefix = prefix.to_owned();
        Box::pin(async move { Ok(as_semaphores(self.look()?.list(&prefix).await?)) })
    }

    fn show(&self, name: &Name) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let name = name.clone();
        Box::pin(async move {
            let look = self.look()?;
            let mut infos = look.show(&name).await?;
            infos.extend(look.list(&format!("{name}\0")).await?);
            Ok(as_semaphores(infos))
        })
    }

    fn break_lock(&self, name: &Name) -> BoxFuture<'_, Result<usize>> {
        let name = name.clone();
        Box::pin(async move {
            let look = self.look()?;
            let mut broken = look.break_lock(&name).await?;
            let parts = look.list(&format!("{name}\0")).await?;
            // Owners and not slots are counted, as everywhere.
            let holders =
                as_semaphores(parts.clone()).iter().map(|info| info.holders.len()).sum::<usize>();
            let waiting: Vec<_> =
                parts.iter().filter(|part| part.name.ends_with("\0gate")).collect();
            let waits =
                |owner| waiting.iter().flat_map(|gate| &gate.holders).any(|p| p.owner == owner);
            for part in &parts {
                let holder = part.holders.first().map(|holder| holder.owner);
                if part.name.contains("\0slot\0") && !holder.is_some_and(&waits) {
                    look.break_lock(&part.name).await?;
                }
            }
            broken += holders;
            Ok(broken)
        })
    }

    fn changed(&self) -> BoxFuture<'_, ()> {
        match self.inner.inspector() {
            Some(inspector) => inspector.changed(),
            None => Box::pin(std::future::pending()),
        }
    }
}
