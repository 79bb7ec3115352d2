//! The transport: connections to Redis servers, without lock logic.
//!
//! From the network upwards: [`stream`], [`tls`] and [`unix`] carry bytes, [`resp`] scans and parses frames, [`connection`] matches
//! replies to commands, [`session`] logs in and subscribes, [`reconnecting`] replaces a broken session, and
//! [`topology`] finds the server that has a slot. The lock layer attaches an [`events::EventHandler`] to each server.

pub(crate) mod cluster;
pub(crate) mod connection;
pub(crate) mod events;
pub(crate) mod handshake;
pub(crate) mod identity;
pub(crate) mod io;
pub(crate) mod node;
pub(crate) mod reconnecting;
pub(crate) mod replication;
pub(crate) mod resp;
pub(crate) mod script;
pub(crate) mod sentinel;
pub(crate) mod server_clock;
pub(crate) mod session;
pub(crate) mod settings;
pub(crate) mod stream;
#[cfg_attr(not(feature = "tls"), path = "client/no_tls.rs")]
pub(crate) mod tls;
pub(crate) mod topology;
#[cfg_attr(not(unix), path = "client/no_unix.rs")]
pub(crate) mod unix;
