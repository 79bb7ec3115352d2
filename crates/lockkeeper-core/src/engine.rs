//! The engine: acquire, wait, hold, renew, release or lose. Written once, for every store.

pub(crate) mod context;
pub(crate) mod driver;
pub(crate) mod floors;
pub(crate) mod hold;
pub(crate) mod maintenance;
pub(crate) mod observe;
pub(crate) mod pending;
pub(crate) mod polling;
pub(crate) mod until_lost;
