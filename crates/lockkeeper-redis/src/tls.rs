//! TLS: certificates are read and parsed once for many connections, and not on a thread of the runtime.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockkeeper_core::Result;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::config::{Address, Config};
use crate::error::{config as config_error, io, unavailable};
use crate::stream::{Reader, Writer};

/// How long certificates that were read serve new connections. Those that are replaced on disk count after that.
const MAX_AGE: Duration = Duration::from_secs(5 * 60);

/// What all connections of a configuration, and of its clones, encrypt with.
#[derive(Clone, Default)]
pub(crate) struct Tls {
    cached: Arc<tokio::sync::Mutex<Option<Cached>>>,
}

struct Cached {
    client: Arc<ClientConfig>,
    read: Instant,
}

impl Tls {
    async fn client(&self, config: &Config) -> Result<Arc<ClientConfig>> {
        // While one reads them, the others wait for it.
        let mut cached = self.cached.lock().await;
        if let Some(Cached { client, read }) = &*cached
            && read.elapsed() < MAX_AGE
        {
            return Ok(client.clone());
        }
        let ca_file = config.ca_file.clone();
        let made = tokio::task::spawn_blocking(move || make_client(ca_file.as_deref())).await;
        let client = Arc::new(made.map_err(|_| unavailable("the runtime is shutting down"))??);
        *cached = Some(Cached { client: client.clone(), read: Instant::now() });
        Ok(client)
    }

    pub(crate) async fn encrypt(
        &self,
        config: &Config,
        address: &Address,
        stream: TcpStream,
    ) -> Result<(Reader, Writer)> {
        let name = ServerName::try_from(address.host.clone());
        let name = name.map_err(|error| config_error(error.to_string()))?;
        let connector = TlsConnector::from(self.client(config).await?);
        let stream = connector.connect(name, stream).await.map_err(io)?;
        let (reader, writer) = tokio::io::split(stream);
        Ok((Box::new(reader), Box::new(writer)))
    }
}

/// Certificates are always checked, and so is the host's name.
fn make_client(ca_file: Option<&Path>) -> Result<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| config_error(error.to_string()))?
        .with_root_certificates(roots(ca_file)?)
        .with_no_client_auth();
    Ok(client)
}

/// The roots in the CA file, or else those that the operating system trusts. If these are none, the server's
/// certificate is refused when it comes to that.
fn roots(ca_file: Option<&Path>) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let Some(path) = ca_file else {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        return Ok(roots);
    };
    let bad = |why: &dyn std::fmt::Display| {
        config_error(format!("the CA file {}: {why}", path.display()))
    };
    for certificate in CertificateDer::pem_file_iter(path).map_err(|error| bad(&error))? {
        let certificate = certificate.map_err(|error| bad(&error))?;
        roots.add(certificate).map_err(|error| bad(&error))?;
    }
    if roots.is_empty() { Err(bad(&"it has none")) } else { Ok(roots) }
}
