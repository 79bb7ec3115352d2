//! Replaces `tls.rs` in a build without the feature `tls`.

use std::path::PathBuf;

use lockkeeper_core::{Error, Result};
use tokio::net::TcpStream;

use super::io::{Reader, Writer};
use crate::error::config as config_error;

#[derive(Clone)]
pub(crate) struct Tls;

impl Tls {
    /// Returns an error: this build does not support TLS.
    pub(crate) fn new(_: Option<PathBuf>) -> Result<Self> {
        Err(no_tls())
    }

    #[expect(clippy::unused_self, reason = "as in tls.rs")]
    pub(crate) fn encrypt(
        &self,
        _: &str,
        _: TcpStream,
    ) -> std::future::Ready<Result<(Reader, Writer)>> {
        std::future::ready(Err(config_error(
            "this build has no TLS: enable the feature \"redis-tls\" of lockkeeper",
        )))
    }
}

fn no_tls() -> Error {
    config_error("this build has no TLS: enable the feature \"redis-tls\" of lockkeeper")
}
