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
        return encrypt(config, address, stream).await;
    }
    let (reader, writer) = stream.into_split();
    Ok((Box::new(reader), Box::new(writer)))
}

#[cfg(feature = "tls")]
async fn encrypt(
    config: &Config,
    address: &Address,
    stream: TcpStream,
) -> Result<(Reader, Writer)> {
    use rustls::pki_types::ServerName;

    let bad = |error: &dyn std::fmt::Display| crate::error::config(error.to_string());
    let name = ServerName::try_from(address.host.clone()).map_err(|error| bad(&error))?;
    let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(client(config)?));
    let stream = connector.connect(name, stream).await.map_err(io)?;
    let (reader, writer) = tokio::io::split(stream);
    Ok((Box::new(reader), Box::new(writer)))
}

/// Certificates are always checked, and so is the host's name.
#[cfg(feature = "tls")]
fn client(config: &Config) -> Result<rustls::ClientConfig> {
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let client = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| crate::error::config(error.to_string()))?
        .with_root_certificates(roots(config)?)
        .with_no_client_auth();
    Ok(client)
}

/// The roots in the CA file, or else those that the operating system trusts. If these are none, the server's
/// certificate is refused when it comes to that.
#[cfg(feature = "tls")]
fn roots(config: &Config) -> Result<rustls::RootCertStore> {
    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject as _;

    let mut roots = rustls::RootCertStore::empty();
    let Some(path) = &config.ca_file else {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        return Ok(roots);
    };
    let bad = |why: &dyn std::fmt::Display| {
        crate::error::config(format!("the CA file {}: {why}", path.display()))
    };
    for certificate in CertificateDer::pem_file_iter(path).map_err(|error| bad(&error))? {
        let certificate = certificate.map_err(|error| bad(&error))?;
        roots.add(certificate).map_err(|error| bad(&error))?;
    }
    if roots.is_empty() { Err(bad(&"it has none")) } else { Ok(roots) }
}

/// Never called: the configuration has been refused.
#[cfg(not(feature = "tls"))]
fn encrypt(_: &Config, _: &Address, _: TcpStream) -> std::future::Ready<Result<(Reader, Writer)>> {
    std::future::ready(Err(crate::error::config("this build has no TLS")))
}
