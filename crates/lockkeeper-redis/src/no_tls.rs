//! A build without TLS: `tls.rs` without its feature.

use lockkeeper_core::Result;
use tokio::net::TcpStream;

use crate::config::{Address, Config};
use crate::error::config as config_error;
use crate::stream::{Reader, Writer};

#[derive(Clone, Default)]
pub(crate) struct Tls {}

impl Tls {
    /// Never called: the configuration has been refused.
    #[expect(clippy::unused_self, reason = "as in tls.rs")]
    pub(crate) fn encrypt(
        &self,
        _: &Config,
        _: &Address,
        _: TcpStream,
    ) -> std::future::Ready<Result<(Reader, Writer)>> {
        std::future::ready(Err(config_error("this build has no TLS")))
    }
}
