//! Byte streams to and from a server, encrypted or not.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use futures_util::future::select_ok;
use lockkeeper_core::Result;
use tokio::net::TcpStream;

use super::io::{Reader, Writer};
use super::settings::{Address, Settings};
use super::unix;
use crate::error::{io, unavailable};

/// What to connect to: one of the addresses of a host, or a Unix socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Ip(SocketAddr),
    Unix(PathBuf),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(ip) => ip.fmt(f),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}

/// Resolves a host to its addresses, at least one, in the resolver's order. For a Unix socket, returns its path.
pub(crate) async fn resolve(address: &Address) -> Result<Vec<Endpoint>> {
    let (host, port) = match address {
        Address::Tcp { host, port } => (host.as_str(), *port),
        Address::Unix(path) => return Ok(vec![Endpoint::Unix(path.clone())]),
    };
    let mut endpoints = Vec::new();
    for ip in tokio::net::lookup_host((host, port)).await.map_err(io)? {
        let endpoint = Endpoint::Ip(ip);
        if !endpoints.contains(&endpoint) {
            endpoints.push(endpoint);
        }
    }
    if endpoints.is_empty() {
        return Err(unavailable("the host name has no address"));
    }
    Ok(endpoints)
}

/// Connects to the first of these endpoints that accepts. The server's certificate must be valid for the host of
/// `address`.
pub(crate) async fn connect(
    settings: &Settings,
    address: &Address,
    endpoints: &[Endpoint],
) -> Result<(Reader, Writer)> {
    if let [Endpoint::Unix(path)] = endpoints {
        return unix::connect(path).await;
    }
    // Concurrently: an address that drops packets must not delay the others.
    let attempts = endpoints.iter().filter_map(|endpoint| match endpoint {
        Endpoint::Ip(ip) => Some(Box::pin(TcpStream::connect(ip))),
        Endpoint::Unix(_) => None,
    });
    let (stream, _) = select_ok(attempts).await.map_err(io)?;
    stream.set_nodelay(true).map_err(io)?;
    if let Some(tls) = &settings.tls {
        return tls.encrypt(address.host(), stream).await;
    }
    let (reader, writer) = stream.into_split();
    Ok((Box::new(reader), Box::new(writer)))
}
