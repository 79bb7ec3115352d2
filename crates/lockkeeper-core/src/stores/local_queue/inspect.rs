//! Inspection: the locks that the store lists, and the waiters of this process that it does not.

use super::LocalQueue;
use crate::contract::{BoxFuture, Inspector, Kind, LockInfo, Participant};
use crate::error::{Error, Result};
use crate::name::Name;

impl LocalQueue {
    fn inner_inspector(&self) -> Result<&dyn Inspector> {
        self.inner.inspector().ok_or_else(|| Error::unsupported("inspection"))
    }

    /// Adds the waiters of this process behind those of the store.
    fn add_waiters(&self, infos: &mut Vec<LockInfo>, wanted: impl Fn(&str) -> bool) {
        for (name, kind, waiting) in self.queues.waiting(wanted) {
            let known = infos.iter().position(|info| info.name == name && info.kind == kind);
            let info = known.and_then(|known| infos.get_mut(known));
            let (holders, waiters) = match &info {
                Some(info) => (&info.holders[..], &info.waiters[..]),
                None => (&[][..], &[][..]),
            };
            let is_known = |waiter: &Participant| {
                holders.iter().chain(waiters).any(|other| other.owner == waiter.owner)
            };
            let new: Vec<Participant> =
                waiting.into_iter().filter(|waiter| !is_known(waiter)).collect();
            match info {
                Some(info) => info.waiters.extend(new),
                None => infos.push(LockInfo { name, kind, holders: Vec::new(), waiters: new }),
            }
        }
        let key = |info: &LockInfo| -> (Name, Kind) { (info.name.clone(), info.kind) };
        infos.sort_by_cached_key(key);
    }
}

impl Inspector for LocalQueue {
    fn list(&self, prefix: &str) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let prefix = prefix.to_owned();
        Box::pin(async move {
            let mut infos = self.inner_inspector()?.list(&prefix).await?;
            self.add_waiters(&mut infos, |name| name.starts_with(&prefix));
            Ok(infos)
        })
    }

    fn show(&self, name: &Name) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let name = name.clone();
        Box::pin(async move {
            let mut infos = self.inner_inspector()?.show(&name).await?;
            self.add_waiters(&mut infos, |other| other == name.as_str());
            Ok(infos)
        })
    }

    fn break_lock(&self, name: &Name) -> BoxFuture<'_, Result<usize>> {
        let name = name.clone();
        Box::pin(async move { self.inner_inspector()?.break_lock(&name).await })
    }

    fn changed(&self) -> BoxFuture<'_, ()> {
        match self.inner.inspector() {
            Some(inspector) => inspector.changed(),
            None => Box::pin(std::future::pending()),
        }
    }
}
