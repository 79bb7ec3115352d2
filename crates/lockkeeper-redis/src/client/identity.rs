//! The identity of a session and its server.

use std::time::Duration;

use tokio::time::Instant;

use super::settings::Address;

/// Identifies a session and its server, so that a later session can end it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(super) address: Address,
    /// The run id of the server, which changes when it restarts.
    pub(super) run: Option<String>,
    /// The client id of the session (`CLIENT ID`).
    pub(super) client: Option<i64>,
}

/// The minimum uptime that a server reported, and when its reply arrived.
#[derive(Debug, Clone, Copy)]
pub(super) struct Uptime {
    pub(super) reported: Duration,
    pub(super) at: Instant,
}

impl Identity {
    /// Returns the run id of the server.
    pub(crate) fn run(&self) -> Option<&str> {
        self.run.as_deref()
    }

    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    #[cfg(test)]
    pub(crate) fn of(host: &str, run: Option<&str>) -> Self {
        let address = Address::tcp(host, 6379);
        Self { address, run: run.map(str::to_owned), client: None }
    }
}
