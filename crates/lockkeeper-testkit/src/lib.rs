//! stub

pub mod history;
pub mod proxy;
#[cfg(unix)]
pub mod server;
