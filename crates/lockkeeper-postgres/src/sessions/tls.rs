//! Connecting, with or without TLS.

use lockkeeper_core::Result;
use tokio_postgres::{Config, NoTls};

use crate::error::translate;

#[cfg(feature = "tls")]
pub(crate) use with::Tls;
#[cfg(not(feature = "tls"))]
pub(crate) use without::Tls;

/// A client, and the future that runs its connection.
pub(crate) type Connected = (tokio_postgres::Client, lockkeeper_core::BoxFuture<'static, ()>);

async fn connect_without_tls(config: &Config) -> Result<Connected> {
    let (client, connection) = config.connect(NoTls).await.map_err(translate)?;
    Ok((client, Box::pin(async { drop(connection.await) })))
}

#[cfg(feature = "tls")]
mod with {
    use std::path::Path;
    use std::sync::{Arc, OnceLock};

    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject as _;
    use rustls::{ClientConfig, RootCertStore};
    use tokio_postgres::config::SslMode;
    use tokio_postgres::{CancelToken, NoTls};
    use tokio_postgres_rustls::MakeRustlsConnect;

    use super::{Config, Connected, Result};
    use crate::error::{config, translate};

    /// The TLS settings of connections, if TLS is used. Certificate and host name are always verified. The root certificates
    /// are read when this is created.
    #[derive(Clone)]
    pub(crate) struct Tls(Option<MakeRustlsConnect>);

    impl Tls {
        /// Trusts the root certificates in a file, or else those of the operating system.
        pub(crate) fn new(root: Option<&Path>, mode: SslMode) -> Result<Self> {
            if mode == SslMode::Disable {
                return Ok(Self(None));
            }
            let roots = root.map_or_else(|| Ok(system_roots()), roots_in)?;
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let client = ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .map_err(|error| config(error.to_string()))?
                .with_root_certificates(roots)
                .with_no_client_auth();
            Ok(Self(Some(MakeRustlsConnect::new(client))))
        }

        pub(crate) async fn connect(&self, config: &Config) -> Result<Connected> {
            let Some(tls) = &self.0 else { return super::connect_without_tls(config).await };
            let (client, connection) = config.connect(tls.clone()).await.map_err(translate)?;
            Ok((client, Box::pin(async { drop(connection.await) })))
        }

        /// Sends a request to cancel the statement of a session.
        pub(crate) async fn cancel(&self, token: &CancelToken) -> Result<()> {
            let cancelled = match &self.0 {
                Some(tls) => token.cancel_query(tls.clone()).await,
                None => token.cancel_query(NoTls).await,
            };
            cancelled.map_err(translate)
        }
    }

    /// Returns the root certificates of the operating system. If there are none, every certificate is refused. They are read
    /// once per process, because that takes milliseconds.
    fn system_roots() -> Arc<RootCertStore> {
        static TRUSTED: OnceLock<Arc<RootCertStore>> = OnceLock::new();
        if let Some(roots) = TRUSTED.get() {
            return roots.clone();
        }
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let roots = Arc::new(roots);
        // If none were found, the next store reads them again.
        if roots.is_empty() { roots } else { TRUSTED.get_or_init(|| roots).clone() }
    }

    fn roots_in(path: &Path) -> Result<Arc<RootCertStore>> {
        let bad = |why: &dyn std::fmt::Display| {
            config(format!("cannot read certificates from sslrootcert={}: {why}", path.display()))
        };
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(path).map_err(|error| bad(&error))? {
            let certificate = certificate.map_err(|error| bad(&error))?;
            roots.add(certificate).map_err(|error| bad(&error))?;
        }
        if roots.is_empty() { Err(bad(&"the file contains none")) } else { Ok(Arc::new(roots)) }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn the_roots_of_the_system_are_read_once() {
            let (first, second) = (system_roots(), system_roots());
            assert!(first.is_empty() || Arc::ptr_eq(&first, &second));
        }
    }
}

#[cfg(not(feature = "tls"))]
mod without {
    use std::path::Path;

    use tokio_postgres::config::SslMode;
    use tokio_postgres::{CancelToken, NoTls};

    use super::{Config, Connected, Result};
    use crate::error::{config, translate};

    /// No TLS, because this build does not have the feature `tls`.
    #[derive(Clone)]
    pub(crate) struct Tls;

    impl Tls {
        pub(crate) fn new(root: Option<&Path>, mode: SslMode) -> Result<Self> {
            if root.is_some() || mode == SslMode::Require {
                return Err(config(
                    "this build has no TLS: enable the feature \"postgres-tls\" of lockkeeper",
                ));
            }
            Ok(Self)
        }

        pub(crate) async fn connect(&self, config: &Config) -> Result<Connected> {
            super::connect_without_tls(config).await
        }

        pub(crate) async fn cancel(&self, token: &CancelToken) -> Result<()> {
            token.cancel_query(NoTls).await.map_err(translate)
        }
    }
}
