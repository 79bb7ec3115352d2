//! Which server a session is on.

use std::time::Duration;

use tokio::time::Instant;

use super::settings::Address;

/// Identifies a session and its server, so that a later session can end it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(super) address: Address,
    /// The run id of the server, which changes when it restarts.
    pub(super) run: Option<String>,
    pub(super) client: Option<i64>,
}

/// How long a server had been up at least when it was asked, and when its reply came.
#[derive(Debug, Clone, Copy)]
pub(super) struct Uptime {
    pub(super) reported: Duration,
    pub(super) at: Instant,
}

impl Identity {
    /// The run id of the server.
    pub(crate) fn run(&self) -> Option<&str> {
        self.run.as_deref()
    }

    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    #[cfg(test)]
    pub(crate) fn of(host: &str, run: Option<&str>) -> Self {
        let address = Address { host: host.to_owned(), port: 6379 };
        Self { address, run: run.map(str::to_owned), client: None }
    }
}
