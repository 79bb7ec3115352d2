//! Bytes to and from a server, encrypted or not.

use std::net::SocketAddr;

use futures_util::future::select_ok;
use lockkeeper_core::Result;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::config::{Address, Config};
use crate::error::{io, unavailable};

pub(crate) type Reader = Box<dyn AsyncRead + Send + Unpin>;
pub(crate) type Writer = Box<dyn AsyncWrite + Send + Unpin>;

/// The addresses of a host, at least one, in the resolver's order.
pub(crate) async fn resolve(address: &Address) -> Result<Vec<SocketAddr>> {
    let found = tokio::net::lookup_host((address.host.as_str(), address.port)).await.map_err(io)?;
    let mut places = Vec::new();
    for place in found {
        if !places.contains(&place) {
            places.push(place);
        }
    }
    if places.is_empty() { Err(unavailable("the name has no address")) } else { Ok(places) }
}

/// Connects to the first of these addresses that answers. `address` is for the certificate.
pub(crate) async fn connect(
    config: &Config,
    address: &Address,
    places: &[SocketAddr],
) -> Result<(Reader, Writer)> {
    // All at once: one that swallows everything must not keep the others from being tried.
    let tries = places.iter().map(|place| Box::pin(TcpStream::connect(place)));
    let (stream, _) = select_ok(tries).await.map_err(io)?;
    stream.set_nodelay(true).map_err(io)?;
    if config.tls {
        return config.tls_state.encrypt(config, address, stream).await;
    }
    let (reader, writer) = stream.into_split();
    Ok((Box::new(reader), Box::new(writer)))
}
