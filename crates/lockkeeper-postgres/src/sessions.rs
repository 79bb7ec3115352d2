//! Sessions on the server: how they are opened and shared, which queries they send, and how they end.
//!
//! A lock belongs to a session, and the session is its lease: the server ends a session that has been idle for its
//! `idle_session_timeout`, and every answered statement restarts that timeout.

mod batch;
mod connection;
mod fencing;
mod heartbeat;
mod pending;
mod pool;
mod pooled;
mod pooler;
mod probe;
mod session;
mod statements;
mod tls;
mod transport;

pub(crate) use connection::connection_closed;
pub(crate) use fencing::Fencing;
pub(crate) use heartbeat::{RenewalCause, min_interval as min_heartbeat_interval};
pub(crate) use pending::{
    Granted, HeldModes, PendingQuery, ReleaseContext, downgrade, poll_once, release,
};
pub(crate) use pool::{SessionPool, SessionRequest, Source};
pub(crate) use pooled::{Pool, PooledConnection};
pub(crate) use session::{Argument, QueryPermit, Session, SessionSlot};
pub(crate) use statements::Arguments;
pub(crate) use tls::Tls;
