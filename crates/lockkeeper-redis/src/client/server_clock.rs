//! An estimate of a server's clock.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use redis::{Cmd, RedisResult, Value};
use tokio::time::Instant;

use super::connection::Connection;
use crate::error::{ErrorClass, classify};

/// A reply that took longer than this does not update the estimate, which would be late by as much.
const MAX_DELAY: Duration = Duration::from_millis(250);

/// Estimates a server's clock from its last reply to `TIME`.
///
/// The estimate is late by the time that the reply took, and wrong after the server's clock was set or this machine was
/// suspended, until the next reply. It decides when a queue entry expires, and whether a script has to compare a fence with
/// the server's clock. No lease or fence is computed from it.
#[derive(Debug)]
pub(crate) struct ServerClock {
    start: Instant,
    /// The server's clock at `start`, in microseconds.
    at_start: AtomicI64,
    /// Whether `TIME` works outside a script. Some proxies reject it.
    is_plain: bool,
}

impl ServerClock {
    /// Reads the clock of a server.
    pub(super) async fn read(connection: &Connection) -> RedisResult<Self> {
        let start = Instant::now();
        let mut clock = Self { start, at_start: AtomicI64::new(0), is_plain: true };
        let reply = match connection.query(&clock.command()).await {
            Err(error) if classify(&error) == ErrorClass::Refused => {
                clock.is_plain = false;
                connection.query(&clock.command()).await?
            }
            reply => reply?,
        };
        clock.set(&reply);
        Ok(clock)
    }

    /// Returns a command that reads the clock.
    pub(super) fn command(&self) -> Cmd {
        if self.is_plain {
            return redis::cmd("TIME");
        }
        redis::cmd("EVAL").arg("return redis.call('TIME')").arg(0).take()
    }

    /// Returns whether `TIME` works outside a script.
    pub(crate) fn is_plain(&self) -> bool {
        self.is_plain
    }

    /// Updates the estimate from a reply to a `TIME` that was sent at `sent`. Returns the server's time in microseconds.
    pub(crate) fn sample(&self, reply: &Value, sent: Instant) -> Option<u64> {
        if sent.elapsed() < MAX_DELAY { self.set(reply) } else { time(reply) }
    }

    fn set(&self, reply: &Value) -> Option<u64> {
        let time = time(reply)?;
        let at_start = i64::try_from(time).ok()?.checked_sub(self.elapsed())?;
        self.at_start.store(at_start, Ordering::Relaxed);
        Some(time)
    }

    /// Returns the estimated time of the server's clock, in microseconds.
    pub(crate) fn now(&self) -> u64 {
        let now = self.at_start.load(Ordering::Relaxed).saturating_add(self.elapsed());
        u64::try_from(now).unwrap_or(0)
    }

    fn elapsed(&self) -> i64 {
        i64::try_from(self.start.elapsed().as_micros()).unwrap_or(i64::MAX)
    }
}

fn time(reply: &Value) -> Option<u64> {
    let [Value::BulkString(seconds), Value::BulkString(micros)] = reply.as_sequence()? else {
        return None;
    };
    let number = |text: &[u8]| std::str::from_utf8(text).ok()?.parse::<u64>().ok();
    number(seconds)?.checked_mul(1_000_000)?.checked_add(number(micros)?)
}
