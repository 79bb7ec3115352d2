//! What happens on the connections to a server, for the lock layer.

use lockkeeper_core::Result;

use super::identity::Identity;
use super::script::Script;

/// What the lock layer does with what happens on the connections to one server. By default, nothing.
pub(crate) trait EventHandler: Send + Sync + 'static {
    /// The scripts that a new session loads.
    fn scripts(&self) -> Vec<&'static Script> {
        Vec::new()
    }

    /// Accepts or refuses a new session.
    fn connected(&self, _server: &Identity) -> Result<()> {
        Ok(())
    }

    /// Receives a message that was published on a channel. Runs on the read loop, so it must not block.
    fn message(&self, _channel: &[u8], _message: &[u8]) {}

    /// Called after a reconnect: messages may have been lost.
    fn reconnected(&self) {}

    /// Whether to reconnect without waiting for the next command, because messages are expected.
    fn expects_messages(&self) -> bool {
        false
    }
}

/// Ignores all events.
pub(crate) struct NoEvents;

impl EventHandler for NoEvents {}
