//! A part in a connection: to lock a key on it, to ask something, to leave it.

use std::sync::Arc;

use crate::key::Key;
use crate::link::Link;

/// A claim's right to lock a key on a connection: no other claim of that key is on it.
///
/// Dropped before it was left, it ends the connection: nobody knows what the session then holds.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) link: Arc<Link>,
    pub(crate) key: Key,
    left: Left,
}

/// A question about no lock of the session that answers it.
#[derive(Debug)]
pub(crate) struct Visit(pub(crate) Arc<Link>);

impl Drop for Visit {
    fn drop(&mut self) {
        self.0.end_visit();
    }
}

/// A claim that is giving its lock back.
#[derive(Debug)]
pub(crate) struct Leaving(pub(crate) Arc<Link>);

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.has_left();
    }
}

/// How a seat is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Left {
    /// Not yet.
    Not,
    /// Nothing was locked there.
    Unused,
    /// What was locked there has been given back.
    Used,
}

impl Seat {
    /// The seat that was taken with [`Link::sit`].
    pub(crate) fn new(link: Arc<Link>, key: Key) -> Self {
        Self { link, key, left: Left::Not }
    }

    /// Gives the seat up, on which nothing was locked.
    pub(crate) fn leave(mut self) {
        self.left = Left::Unused;
    }

    /// Gives the seat up after what was locked there has been given back.
    pub(crate) fn vacate(mut self) {
        self.left = Left::Used;
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if self.left == Left::Not {
            self.link.kill();
        }
        self.link.leave(self.key, self.left);
    }
}
