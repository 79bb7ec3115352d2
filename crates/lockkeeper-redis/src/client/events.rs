//! Events on the connections to a server, for the lock layer.

use lockkeeper_core::Result;

use super::identity::Identity;
use super::script::Script;

/// Handles events on the connections to one server. The lock layer implements it; the defaults ignore events.
pub(crate) trait EventHandler: Send + Sync + 'static {
    /// Returns the scripts that a new session loads.
    fn scripts(&self) -> Vec<&'static Script> {
        Vec::new()
    }

    /// Called with a new session before it is used. An error rejects it.
    fn connected(&self, _server: &Identity) -> Result<()> {
        Ok(())
    }

    /// Called with a message on a subscribed channel. Runs on the read loop, so it must not block.
    fn message(&self, _channel: &[u8], _message: &[u8]) {}

    /// Called after a reconnect: messages may have been lost.
    fn reconnected(&self) {}

    /// Returns whether to reconnect at once, because messages are expected, instead of at the next command.
    fn expects_messages(&self) -> bool {
        false
    }
}

/// Ignores all events.
pub(crate) struct NoEvents;

impl EventHandler for NoEvents {}
