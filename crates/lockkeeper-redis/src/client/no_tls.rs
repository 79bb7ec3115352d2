//! A build without TLS: `tls.rs` without its feature.

use std::path::PathBuf;

use lockkeeper_core::Result;
use tokio::net::TcpStream;

use super::io::{Reader, Writer};
use crate::error::config as config_error;

#[derive(Clone)]
pub(crate) struct Tls;

impl Tls {
    /// Refuses: the configuration of a build without TLS must not ask for it.
    pub(crate) fn new(_: Option<PathBuf>) -> Result<Self> {
        Err(config_error("this build has no TLS: enable the feature \"redis-tls\" of lockkeeper"))
    }

    #[expect(clippy::unused_self, reason = "as in tls.rs")]
    pub(crate) fn encrypt(
        &self,
        _: &str,
        _: TcpStream,
    ) -> std::future::Ready<Result<(Reader, Writer)>> {
        std::future::ready(Err(config_error("this build has no TLS")))
    }
}
