//! The choice of the runtime that serves a call: the keeper's own, or the blocking runtime.
//!
//! A keeper has at most two contexts on one store. The first belongs to the runtime in which the keeper was created or
//! first used. The second belongs to the blocking runtime: `blocking_` methods use it, because the thread that they
//! block may be the only one of the first runtime. Both share the fence floors, and `close` closes both.

use std::sync::Arc;

use crate::background::Background;
use crate::engine::context::KeeperContext;

impl KeeperContext {
    /// Returns the context for an async call: this one, unless its runtime has been shut down.
    ///
    /// In that case the blocking runtime takes over, because it is never shut down. Guards acquired before stay lost.
    pub(crate) fn live(self: &Arc<Self>) -> &Arc<Self> {
        if self.runtime_is_known_gone() { self.for_blocking() } else { self }
    }

    /// Returns the context for a blocking call, on the blocking runtime.
    ///
    /// A keeper that has no runtime yet is bound to the blocking runtime, and needs no second context.
    pub(crate) fn for_blocking(self: &Arc<Self>) -> &Arc<Self> {
        if self.background.get_or_init(Background::blocking).is_blocking() {
            return self;
        }
        let context = self.blocking.get_or_init(|| Arc::new(self.new_blocking()));
        // `close` may have run before this context existed.
        if self.closed.is_cancelled() {
            context.close();
        }
        context
    }

    /// Returns this context and the one on the blocking runtime, if it exists.
    pub(crate) fn both(self: &Arc<Self>) -> impl Iterator<Item = &Arc<Self>> {
        std::iter::once(self).chain(self.blocking.get())
    }
}
