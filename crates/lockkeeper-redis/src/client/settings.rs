//! Settings of connections.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::tls::Tls;

/// The settings of all connections of a store.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) username: Option<String>,
    pub(crate) password: Option<String>,
    /// The password of the sentinels, which may differ from that of the servers.
    pub(crate) sentinel_password: Option<String>,
    pub(crate) database: i64,
    /// `Some` if connections are encrypted.
    pub(crate) tls: Option<Tls>,
    pub(crate) connect_timeout: Duration,
    pub(crate) command_timeout: Duration,
    pub(crate) protocol: Protocol,
    /// The prefix of the channels that sessions subscribe to.
    pub(crate) channel_prefix: Arc<str>,
}

/// The protocol to use with the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Protocol {
    /// RESP3, or RESP2 if the server does not support RESP3.
    #[default]
    Any,
    /// RESP2. Messages from the server arrive on a second connection.
    Resp2,
}

/// The addresses of the servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Servers {
    One(Address),
    Sentinel { sentinels: Vec<Address>, master: String },
    Cluster(Vec<Address>),
}

/// The address of a server.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Address {
    Tcp {
        host: String,
        port: u16,
    },
    /// The path of a Unix socket.
    Unix(PathBuf),
}

impl Address {
    pub(crate) fn tcp(host: impl Into<String>, port: u16) -> Self {
        Self::Tcp { host: host.into(), port }
    }

    /// Returns the host; empty for a Unix socket.
    pub(crate) fn host(&self) -> &str {
        match self {
            Self::Tcp { host, .. } => host,
            Self::Unix(_) => "",
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}
