//! The public API: the keeper, its locks and their guards.

pub(crate) mod detached;
pub(crate) mod guard;
pub(crate) mod handle;
pub(crate) mod inspect;
pub(crate) mod keeper;
pub(crate) mod lock_all;
pub(crate) mod mutex;
pub(crate) mod runtimes;
pub(crate) mod rwlock;
pub(crate) mod semaphore;
pub(crate) mod ticket;
