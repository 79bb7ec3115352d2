//! The blocking twins of scopes, and the way from an async keeper to its blocking twin.

use std::ops::Deref;
use std::sync::Arc;

use super::{Keeper, enter, wait};
use crate::engine::hold::ReleaseOutcome;
use crate::error::Result;
use crate::recipes::scope::{FRAME, Frame, current};

/// Runs a closure as one request: what it locks, it may lock again inside.
///
/// The blocking twin of [`scope`](fn@crate::scope), and one with it: inside of an async scope this is an
/// inner one.
pub fn scope<T>(work: impl FnOnce() -> T) -> T {
    FRAME.sync_scope(Frame::inside(current()), work)
}

impl Keeper {
    /// The blocking twin of an async keeper: the same store, the same options.
    ///
    /// Renewals and background releases run on the thread of all blocking keepers. Connections of the store
    /// may belong to the runtime that the async keeper was opened in, though: if that one has no thread
    /// left to run on, because you block it, the store seems not to answer. A keeper that was
    /// [opened](Self::from_backend) for blocking use does not depend on anybody's runtime.
    ///
    /// Closing the async keeper closes it, too.
    pub fn of(keeper: &crate::Keeper) -> Self {
        let _entered = enter();
        Self(keeper.twin())
    }

    /// The async keeper inside of this one. It works in any runtime.
    pub fn as_async(&self) -> &crate::Keeper {
        &self.0
    }

    /// Waits for a mutex, unless this scope holds it already: then it counts up. See
    /// [`Keeper::lock_scoped`](crate::Keeper::lock_scoped).
    ///
    /// # Errors
    ///
    /// As the async twin's.
    pub fn lock_scoped(&self, name: impl Into<Arc<str>>) -> Result<ScopedGuard> {
        wait(self.0.lock_scoped(name)).map(ScopedGuard)
    }
}

/// The blocking twin of [`ScopedGuard`](crate::ScopedGuard), which this dereferences to.
#[derive(Debug)]
#[must_use = "dropping the guard gives the lock back at once, unless an outer one holds it"]
pub struct ScopedGuard(crate::ScopedGuard);

impl ScopedGuard {
    /// Gives the lock back if nobody else in the scope holds it: `None` if somebody does.
    ///
    /// # Errors
    ///
    /// As the async twin's.
    pub fn release(self) -> Result<Option<ReleaseOutcome>> {
        wait(self.0.release())
    }
}

impl Deref for ScopedGuard {
    type Target = crate::ScopedGuard;

    fn deref(&self) -> &crate::ScopedGuard {
        &self.0
    }
}
