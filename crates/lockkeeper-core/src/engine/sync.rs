//! The synchronization types of [`shared_future`](super::shared_future). `tests/shared_future` compiles that file with
//! the types of loom instead.

pub(crate) use std::sync::atomic::{AtomicBool, Ordering};
pub(crate) use std::sync::{Mutex, MutexGuard};
