//! How to reach the servers.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::tls::Tls;

/// What every connection of a store needs to know.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) username: Option<String>,
    pub(crate) password: Option<String>,
    /// The password of the sentinels, which may differ from that of the servers.
    pub(crate) sentinel_password: Option<String>,
    pub(crate) database: i64,
    /// Set if connections are encrypted.
    pub(crate) tls: Option<Tls>,
    pub(crate) connect_timeout: Duration,
    pub(crate) command_timeout: Duration,
    pub(crate) protocol: Protocol,
    /// What the names of the channels that sessions subscribe to start with.
    pub(crate) channel_prefix: Arc<str>,
}

/// Which protocol to speak with the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Protocol {
    /// RESP3, or RESP2 if the server does not know RESP3.
    #[default]
    Any,
    /// RESP2: messages from the server come on a second connection.
    Resp2,
}

/// Where the servers are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Servers {
    One(Address),
    Sentinel { sentinels: Vec<Address>, master: String },
    Cluster(Vec<Address>),
}

/// A host and a port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Address {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}
