//! A FIFO queue whose entries can be removed from anywhere.

use std::collections::VecDeque;

/// The smallest number of removed entries that triggers a compaction.
const MIN_COMPACTION: usize = 32;

/// A FIFO queue. `push` and `pop` take amortized constant time. `remove` takes logarithmic time, amortized.
pub(super) struct Queue<T> {
    /// In the order of their ids. A removed entry is `None`.
    entries: VecDeque<(u64, Option<T>)>,
    next_id: u64,
    /// The number of entries that have not been removed.
    len: usize,
}

impl<T> Queue<T> {
    pub(super) fn new() -> Self {
        Self { entries: VecDeque::new(), next_id: 0, len: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds an entry and returns its id.
    pub(super) fn push(&mut self, entry: T) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.len += 1;
        self.entries.push_back((id, Some(entry)));
        id
    }

    pub(super) fn pop(&mut self) -> Option<T> {
        loop {
            if let (_, Some(entry)) = self.entries.pop_front()? {
                self.len -= 1;
                return Some(entry);
            }
        }
    }

    /// Removes an entry if it is in the queue.
    pub(super) fn remove(&mut self, id: u64) -> Option<T> {
        let at = self.entries.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        let removed = self.entries[at].1.take()?;
        self.len -= 1;
        if self.entries.len() - self.len > self.len.max(MIN_COMPACTION) {
            self.entries.retain(|(_, entry)| entry.is_some());
            self.entries.shrink_to(2 * self.len);
        }
        Some(removed)
    }

    /// Empties the queue. Ids are not reused.
    pub(super) fn take_all(&mut self) -> impl Drop + use<T> {
        self.len = 0;
        std::mem::take(&mut self.entries)
    }

    /// Frees the memory of an empty queue.
    pub(super) fn shrink(&mut self) {
        if self.is_empty() {
            self.entries = VecDeque::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_popped_in_order_without_the_removed_ones() {
        let mut queue = Queue::new();
        let ids: Vec<u64> = (0..1000).map(|entry| queue.push(entry)).collect();
        for (at, id) in ids.iter().enumerate().filter(|(at, _)| at % 3 != 0) {
            assert_eq!(queue.remove(*id), Some(at));
            assert_eq!(queue.remove(*id), None);
        }
        assert_eq!(queue.len(), 334);
        let left: Vec<usize> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(left, (0..1000).step_by(3).collect::<Vec<_>>());
        assert!(queue.is_empty());
        assert_eq!(queue.remove(ids[0]), None);
        assert_eq!(queue.push(7), 1000);
        assert_eq!((queue.pop(), queue.pop()), (Some(7), None));
    }

    #[test]
    fn an_id_from_before_take_all_removes_no_later_entry() {
        let mut queue = Queue::new();
        let before = queue.push(1);
        drop(queue.take_all());
        assert!(queue.is_empty());
        queue.push(2);
        assert_eq!(queue.remove(before), None);
        assert_eq!(queue.pop(), Some(2));
    }

    #[test]
    fn removed_entries_take_no_memory() {
        let mut queue = Queue::new();
        let first = queue.push([0_u8; 1024]);
        for _ in 0..10_000 {
            let id = queue.push([0; 1024]);
            queue.remove(id);
        }
        assert!(queue.entries.capacity() < 200, "{}", queue.entries.capacity());
        queue.remove(first);
        queue.shrink();
        assert_eq!(queue.entries.capacity(), 0);
    }
}
