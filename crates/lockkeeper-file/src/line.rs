//! Those of this process who wait for a file to themselves: whoever releases it hands it to the first of them, locked
//! as it is.
//!
//! Without that, a task that asks again as soon as it has released would nearly always have the lock again before a
//! waiter hears of the release from the kernel.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::backend::{Id, LockFile};

/// How long a lock stays in this process, from one waiter to the next, before it is really released: other processes
/// are to have a chance. Whoever holds it for longer than this hands nothing over.
const TOGETHER: Duration = Duration::from_millis(1);

/// A file that was opened, and perhaps locked.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) file: LockFile,
    pub(crate) id: Id,
    /// When the kernel locked it. It may have been handed on since.
    pub(crate) locked: Option<Instant>,
}

/// The waiters of a store, by file, in the order in which they came.
#[derive(Debug, Default)]
pub(crate) struct Lines(Mutex<HashMap<Id, VecDeque<oneshot::Sender<Open>>>>);

/// A place in line. Dropped, it is left; and a file that was handed to it is closed, and so released.
#[derive(Debug)]
pub(crate) struct Place {
    lines: Arc<Lines>,
    pub(crate) id: Id,
    handed: oneshot::Receiver<Open>,
    arrived: Option<Open>,
}

impl Lines {
    fn lock(&self) -> MutexGuard<'_, HashMap<Id, VecDeque<oneshot::Sender<Open>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn join(self: &Arc<Self>, id: Id) -> Place {
        let (sender, handed) = oneshot::channel();
        self.lock().entry(id).or_default().push_back(sender);
        Place { lines: self.clone(), id, handed, arrived: None }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn next(&self, id: Id) -> Option<oneshot::Sender<Open>> {
        let mut lines = self.lock();
        let line = lines.get_mut(&id)?;
        let next = line.pop_front();
        if line.is_empty() {
            lines.remove(&id);
        }
        next
    }

    /// Hands a locked file to the first in line. If there is nobody, or it is time for others, it is released.
    pub(crate) fn hand_on(&self, open: Open) {
        let mut open = open;
        while open.locked.is_some_and(|locked| locked.elapsed() < TOGETHER)
            && let Some(next) = self.next(open.id)
        {
            // Not with the lines locked: whoever is woken may come back at once.
            match next.send(open) {
                Ok(()) => return,
                // That one is leaving.
                Err(back) => open = back,
            }
        }
    }
}

impl Place {
    /// Waits until the file has been handed to this place.
    pub(crate) async fn arrived(&mut self) {
        if self.arrived.is_none() {
            match (&mut self.handed).await {
                Ok(open) => self.arrived = Some(open),
                // Whoever takes a place out of its line hands it the file.
                Err(_) => std::future::pending().await,
            }
        }
    }

    /// The file, if it has been handed to this place.
    pub(crate) fn take(&mut self) -> Option<Open> {
        self.arrived.take().or_else(|| self.handed.try_recv().ok())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // From here on nothing is handed to it. What was is closed with the rest, when the lines are unlocked again.
        self.handed.close();
        let mut lines = self.lines.lock();
        if let Some(line) = lines.get_mut(&self.id) {
            line.retain(|place| !place.is_closed());
            if line.is_empty() {
                lines.remove(&self.id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::backend::Store;

    /// Between the moment at which a place is closed and the one at which it is out of its line.
    #[test]
    fn what_comes_back_from_one_who_is_leaving_goes_to_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::write(&path, "").unwrap();
        let id = Store::id_at(&path).unwrap().unwrap();
        let locked = Some(Instant::now() + Duration::from_secs(600));
        let lines = Arc::<Lines>::default();
        let (mut leaving, mut next) = (lines.join(id), lines.join(id));
        leaving.handed.close();
        lines.hand_on(Open { file: Store::make(&path).unwrap(), id, locked });
        assert!(next.take().is_some());
        drop((leaving, next));
        assert!(lines.is_empty());
    }
}
