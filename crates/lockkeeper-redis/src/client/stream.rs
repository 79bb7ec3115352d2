//! Byte streams to and from a server, encrypted or not.

use std::net::SocketAddr;

use futures_util::future::select_ok;
use lockkeeper_core::Result;
use tokio::net::TcpStream;

use super::io::{Reader, Writer};
use super::settings::{Address, Settings};
use crate::error::{io, unavailable};

/// Resolves a host to its addresses, at least one, in the resolver's order.
pub(crate) async fn resolve(address: &Address) -> Result<Vec<SocketAddr>> {
    let found = tokio::net::lookup_host((address.host.as_str(), address.port)).await.map_err(io)?;
    let mut ips = Vec::new();
    for ip in found {
        if !ips.contains(&ip) {
            ips.push(ip);
        }
    }
    if ips.is_empty() { Err(unavailable("the name has no address")) } else { Ok(ips) }
}

/// Connects to the first of these addresses that answers. `address` is checked against the certificate.
pub(crate) async fn connect(
    settings: &Settings,
    address: &Address,
    ips: &[SocketAddr],
) -> Result<(Reader, Writer)> {
    // All at once: an address that drops packets must not delay the others.
    let attempts = ips.iter().map(|ip| Box::pin(TcpStream::connect(ip)));
    let (stream, _) = select_ok(attempts).await.map_err(io)?;
    stream.set_nodelay(true).map_err(io)?;
    if let Some(tls) = &settings.tls {
        return tls.encrypt(&address.host, stream).await;
    }
    let (reader, writer) = stream.into_split();
    Ok((Box::new(reader), Box::new(writer)))
}
