//! What it takes to prove a Lockkeeper store.
//!
//! - [`mod@conformance`]: what every store must do, as tests that run on yours.
//! - [`Faulty`]: a store around yours that loses answers, hangs or is down, on demand.
//! - [`fences`]: what every register of fences must do.
//! - [`history`]: a record of who held what when, and a check that no two held what they may not.
//! - [`helper`]: a program that takes locks in a process of its own, to be killed.
//! - [`server`]: real servers, started on free ports in temporary directories and stopped by pid.
//! - [`layers`]: whether the modules of a crate import downwards only.
//! - [`log`]: what was logged.
//! - [`proxy`]: a link to such a server that can be delayed, cut and frozen.
//! - [`wait`]: for what should happen soon, with a panic that says what did not.
//! - [`Flock`]: a small store of sessions, the counterpart of the memory store's leases.

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

/// The code in the guide for authors of stores, so that it is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guides/writing-a-backend.md")]
struct Guide;
