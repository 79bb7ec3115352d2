//! Tools for testing a Lockkeeper store.
//!
//! - [`mod@conformance`]: the behaviour that every store must have, as tests that run on yours.
//! - [`Faulty`]: a wrapper around a store that loses responses, hangs or fails on demand.
//! - [`fences`]: the behaviour that every fence register must have.
//! - [`history`]: a record of all holds of a run, and a check that no two holders overlapped.
//! - [`helper`]: a program that acquires locks in a separate process, which tests can kill.
//! - [`server`]: real servers, started on free ports in temporary directories and stopped by pid.
//! - [`layers`]: a check that the modules of a crate import downwards only.
//! - [`log`]: captured log lines.
//! - [`proxy`]: a TCP proxy to a server, whose connections can be delayed, cut and frozen.
//! - [`wait`]: waits with a timeout, which panic with the name of what did not happen.
//! - [`Flock`]: a small store with sessions instead of leases, the counterpart of the memory store.

pub mod conformance;
mod faulty;
pub mod fences;
mod flock;
pub mod helper;
pub mod history;
pub mod layers;
pub mod log;
pub mod proxy;
#[cfg(unix)]
pub mod server;
pub mod wait;

pub use faulty::{Fault, Faults, Faulty, Op};
pub use flock::Flock;

/// The code in the guide for store authors, so that it is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guides/writing-a-backend.md")]
struct Guide;
