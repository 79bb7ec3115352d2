//! TLS. CA certificates are cached, and read on a blocking thread.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockkeeper_core::Result;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::io::{Reader, Writer};
use crate::error::{config as config_error, io, unavailable};

/// The maximum age of cached certificates. A replaced file takes effect after that, for new connections.
const MAX_AGE: Duration = Duration::from_secs(5 * 60);

/// The TLS settings and the certificate cache of a configuration and its clones.
#[derive(Clone)]
pub(crate) struct Tls {
    ca_file: Option<PathBuf>,
    cached: Arc<tokio::sync::Mutex<Option<Cached>>>,
}

struct Cached {
    client: Arc<ClientConfig>,
    read: Instant,
}

impl Tls {
    #[expect(clippy::unnecessary_wraps, reason = "without the feature it is an error")]
    pub(crate) fn new(ca_file: Option<PathBuf>) -> Result<Self> {
        Ok(Self { ca_file, cached: Arc::default() })
    }

    async fn client(&self) -> Result<Arc<ClientConfig>> {
        // One connection reads the files. Others wait for it.
        let mut cached = self.cached.lock().await;
        if let Some(Cached { client, read }) = &*cached
            && read.elapsed() < MAX_AGE
        {
            return Ok(client.clone());
        }
        let ca_file = self.ca_file.clone();
        let made = tokio::task::spawn_blocking(move || make_client(ca_file.as_deref())).await;
        let client = Arc::new(made.map_err(|_| unavailable("the runtime is shutting down"))??);
        *cached = Some(Cached { client: client.clone(), read: Instant::now() });
        Ok(client)
    }

    pub(crate) async fn encrypt(&self, host: &str, stream: TcpStream) -> Result<(Reader, Writer)> {
        let name = ServerName::try_from(host.to_owned());
        let name = name.map_err(|error| config_error(error.to_string()))?;
        let connector = TlsConnector::from(self.client().await?);
        let stream = connector.connect(name, stream).await.map_err(io)?;
        let (reader, writer) = tokio::io::split(stream);
        Ok((Box::new(reader), Box::new(writer)))
    }
}

/// Creates a TLS configuration that always verifies certificates and host names.
fn make_client(ca_file: Option<&Path>) -> Result<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| config_error(error.to_string()))?
        .with_root_certificates(roots(ca_file)?)
        .with_no_client_auth();
    Ok(client)
}

/// Returns the root certificates of the CA file, or those of the operating system if there is no file. Without any root,
/// every server certificate is rejected.
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
    if roots.is_empty() { Err(bad(&"it contains no certificate")) } else { Ok(roots) }
}
