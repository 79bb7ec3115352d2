//! Replaces `unix.rs` on platforms without Unix sockets.

use std::path::Path;

use lockkeeper_core::{Error, Result};

use super::io::{Reader, Writer};
use crate::error::config;

/// Returns an error: this platform has no Unix sockets.
pub(crate) fn check_support() -> Result<()> {
    Err(unsupported())
}

pub(super) fn connect(_: &Path) -> std::future::Ready<Result<(Reader, Writer)>> {
    std::future::ready(Err(unsupported()))
}

fn unsupported() -> Error {
    config("Unix sockets are not supported on this platform: use redis://host/")
}
