//! What happens on the connections to a server, for the lock layer.

use lockkeeper_core::Result;

use super::identity::Identity;
use super::script::Script;

/// What the lock layer does with what happens on the connections to one server.
pub(crate) trait EventHandler: Send + Sync + 'static {
    /// The scripts that a new session loads.
    fn scripts(&self) -> Vec<&'static Script>;

    /// Accepts or refuses a new session.
    fn connected(&self, server: &Identity) -> Result<()>;

    /// Receives a message that was published on a channel. Runs on the read loop, so it must not block.
    fn message(&self, channel: &[u8], message: &[u8]);

    /// Called after a reconnect: messages may have been lost.
    fn reconnected(&self);

    /// Whether to reconnect without waiting for the next command, because messages are expected.
    fn expects_messages(&self) -> bool;
}

/// Ignores all events.
pub(crate) struct NoEvents;

impl EventHandler for NoEvents {
    fn scripts(&self) -> Vec<&'static Script> {
        Vec::new()
    }

    fn connected(&self, _: &Identity) -> Result<()> {
        Ok(())
    }

    fn message(&self, _: &[u8], _: &[u8]) {}

    fn reconnected(&self) {}

    fn expects_messages(&self) -> bool {
        false
    }
}
