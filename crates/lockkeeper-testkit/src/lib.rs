//! What it takes to prove a Lockkeeper store.
//!
//! - [`Faulty`]: a store around yours that loses answers, hangs or is down, on demand.
//! - [`history`]: a record of who held what when, and a check that no two held what they may not.
//! - [`server`]: real servers, started on free ports in temporary directories and stopped by pid.
//! - [`proxy`]: a link to such a server that can be delayed, cut and frozen.

mod faulty;
pub mod history;
pub mod proxy;
#[cfg(unix)]
pub mod server;

pub use faulty::{Fault, Faults, Faulty, Op};
