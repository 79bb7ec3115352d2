//! Those of this process who wait to have a file for themselves: whoever releases it calls the first of them.
//!
//! A task that asks again as soon as it has released would nearly always have the lock again before a waiter hears of
//! the release from the kernel. So the first in line is called right there, and for a moment the others leave the lock
//! to it. The lock is free meanwhile: another process may be faster, and if the one who was called does not come, the
//! next one looks after that moment.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::backend::Id;

/// How long the others leave the lock to the one who was called.
const TURN: Duration = Duration::from_millis(1);

/// The waiters of a store, by file.
#[derive(Debug, Default)]
pub(crate) struct Lines(Mutex<HashMap<Id, Line>>);

#[derive(Debug, Default)]
struct Line {
    /// In the order in which they came.
    waiting: VecDeque<Arc<Notify>>,
    /// When the first was called, if it has not come since.
    called: Option<Instant>,
}

/// A place in line, for as long as it lives.
#[derive(Debug)]
pub(crate) struct Place {
    lines: Arc<Lines>,
    pub(crate) id: Id,
    call: Arc<Notify>,
    has_lock: bool,
}

impl Line {
    fn is_first(&self, call: &Arc<Notify>) -> bool {
        self.waiting.front().is_some_and(|first| Arc::ptr_eq(first, call))
    }
}

impl Lines {
    fn lock(&self) -> MutexGuard<'_, HashMap<Id, Line>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn join(self: &Arc<Self>, id: Id) -> Place {
        let call = Arc::<Notify>::default();
        self.lock().entry(id).or_default().waiting.push_back(call.clone());
        Place { lines: self.clone(), id, call, has_lock: false }
    }

    /// Calls the first in line, now that the file is free. The second is woken, too, to see whether the first comes: it
    /// may have been left unpolled.
    pub(crate) fn call(&self, id: Id) {
        let mut lines = self.lock();
        let Some(line) = lines.get_mut(&id) else { return };
        line.called = Some(Instant::now());
        let mut waiting = line.waiting.iter().cloned();
        let woken = [waiting.next(), waiting.next()];
        // Whoever is woken may come back at once.
        drop(lines);
        for call in woken.into_iter().flatten() {
            call.notify_one();
        }
    }

    /// For how long yet the lock is to be left to another, who is first in line and was called.
    pub(crate) fn left_to_another(&self, id: Id, place: Option<&Place>) -> Option<Duration> {
        let lines = self.lock();
        let line = lines.get(&id)?;
        if place.is_some_and(|place| line.is_first(&place.call)) {
            return None;
        }
        TURN.checked_sub(line.called?.elapsed()).filter(|left| !left.is_zero())
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }
}

impl Place {
    /// Waits until it is called.
    pub(crate) async fn called(&self) {
        self.call.notified().await;
    }

    /// It has come, and others hold the lock: its turn is over until it is called again.
    pub(crate) fn came_in_vain(&self) {
        if let Some(line) = self.lines.lock().get_mut(&self.id)
            && line.is_first(&self.call)
        {
            line.called = None;
        }
    }

    /// Leaves the line with the lock.
    pub(crate) fn served(mut self) {
        self.has_lock = true;
        if let Some(line) = self.lines.lock().get_mut(&self.id) {
            let came = line.is_first(&self.call);
            if line.called.take().is_some() && !came {
                // Whoever was called has not come, and may never. Others are not to wait for it each time.
                line.waiting.rotate_left(1);
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut lines = self.lines.lock();
        let Some(line) = lines.get_mut(&self.id) else { return };
        let was_first = line.is_first(&self.call);
        line.waiting.retain(|call| !Arc::ptr_eq(call, &self.call));
        let next = line.waiting.front().cloned();
        if next.is_none() {
            lines.remove(&self.id);
        }
        drop(lines);
        // It may have been called, and go without having come.
        if let Some(next) = next.filter(|_| was_first && !self.has_lock) {
            next.notify_one();
        }
    }
}
