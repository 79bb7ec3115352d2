//! Checks replicas for problems that make a failover unsafe.

use std::collections::HashMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use lockkeeper_core::{Finding, Result};
use redis::from_redis_value;

use crate::client::connection::Connection;
use crate::client::settings::{Address, Servers};
use crate::client::{handshake, stream};
use crate::config::Config;
use crate::error::unavailable;

/// The largest difference between the clocks of master and replica that is not reported. After a failover, fences come
/// from the replica's clock; a planned failover takes about this long, so a smaller difference does not lower them.
const MAX_DIFFERENCE: Duration = Duration::from_millis(100);

/// Bounds for how far a server's clock is ahead of the local clock, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Clock {
    min: i128,
    max: i128,
}

impl Clock {
    /// Reads a server's clock. The server did so between the local times before the request and after the reply.
    pub(super) async fn read(server: &Connection) -> Option<Self> {
        let before = now()?;
        let time = server.query(&redis::cmd("TIME")).await.ok()?;
        let (seconds, micros): (u32, u32) = from_redis_value(time).ok()?;
        let (time, after) = (i128::from(seconds) * 1_000_000 + i128::from(micros), now()?);
        Some(Self { min: time - after, max: time - before })
    }

    #[cfg(test)]
    pub(super) fn ahead(micros: i128) -> Self {
        Self { min: micros, max: micros }
    }

    /// Returns the smallest possible difference from the local clock.
    pub(super) fn apart(self) -> Duration {
        micros(self.min.max(-self.max).max(0))
    }

    /// Returns how far it is ahead of another clock, at least.
    fn ahead_of(self, other: Self) -> Duration {
        micros((self.min - other.max).max(0))
    }
}

fn now() -> Option<i128> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    i128::try_from(now.as_micros()).ok()
}

fn micros(micros: i128) -> Duration {
    u64::try_from(micros).map_or(Duration::MAX, Duration::from_micros)
}

/// A replica and its reply.
pub(super) struct Replica {
    address: Address,
    reply: Result<Reply>,
}

struct Reply {
    clock: Option<Clock>,
    /// Sentinel does not promote a replica of priority 0.
    is_promotable: bool,
}

/// Queries the replicas that a master's `INFO` lists, with the credentials of the URL.
pub(super) async fn query_all(config: &Config, info: &HashMap<String, String>) -> Vec<Replica> {
    let addresses = (0..).map_while(|number| info.get(&format!("slave{number}")));
    let replicas = addresses.filter_map(|line| address(line)).map(async |address| {
        let reply = tokio::time::timeout(config.client.connect_timeout, query(config, &address));
        let reply = reply.await.unwrap_or_else(|_| Err(unavailable("no answer in time")));
        Replica { address, reply }
    });
    join_all(replicas).await
}

/// Parses the address of a replica from a line such as `ip=10.0.0.7,port=6379,state=online,offset=14,lag=0`.
fn address(line: &str) -> Option<Address> {
    let field = |name: &str| {
        line.split(',').find_map(|field| field.split_once('=').filter(|pair| pair.0 == name))
    };
    Some(Address::tcp(field("ip")?.1, field("port")?.1.parse().ok()?))
}

async fn query(config: &Config, address: &Address) -> Result<Reply> {
    let endpoints = stream::resolve(address).await?;
    let server = handshake::open_plain(&config.client, address, &endpoints).await?;
    server.end_handshake();
    let mut info = redis::cmd("INFO");
    let info = server.query(info.arg("replication")).await.ok();
    let info = info.and_then(|info| from_redis_value::<String>(info).ok()).unwrap_or_default();
    let is_promotable = !info.lines().any(|line| line.trim_end() == "slave_priority:0");
    Ok(Reply { clock: Clock::read(&server).await, is_promotable })
}

/// Checks that grants wait for all replicas that may be promoted. `count` replicas are connected.
pub(super) fn acknowledged(count: u32, replicas: &[Replica], config: &Config) -> Finding {
    let wanted = config.min_replicas;
    if count < wanted {
        return Finding::fail(
            format!("{count} replicas are connected, and min_replicas is {wanted}"),
            "no lock will be granted: connect more replicas, or lower min_replicas in the URL",
        );
    }
    if count == 0 {
        return Finding::ok("no replicas, so no failover that could lose a grant");
    }
    // A cluster ignores the priority.
    let is_cluster = matches!(config.servers, Servers::Cluster(_));
    let is_promotable = |replica: &&Replica| {
        is_cluster || replica.reply.as_ref().map_or(true, |reply| reply.is_promotable)
    };
    let excluded = replicas.len() - replicas.iter().filter(is_promotable).count();
    let promotable = count.saturating_sub(u32::try_from(excluded).unwrap_or(u32::MAX));
    let which = match excluded {
        0 => format!("{count} replicas"),
        _ => format!("{count} replicas, {promotable} of which may be promoted"),
    };
    if promotable <= wanted {
        return Finding::ok(format!("{which}, and grants wait for {wanted} of them"));
    }
    let setting = if is_cluster { "cluster-replica-no-failover yes" } else { "replica-priority 0" };
    let waits = match wanted {
        0 => "grants do not wait for them".to_owned(),
        _ => format!("grants wait for only {wanted} of them"),
    };
    Finding::warn(
        format!("{which}, and {waits}"),
        format!(
            "a failover to a replica that has not acknowledged a grant loses it: add \
             ?min_replicas={promotable} to the URL, or exclude replicas from promotion with \
             {setting}"
        ),
    )
}

/// Checks that fences keep rising if a replica is promoted. `master` is the master's clock.
pub(super) fn clocks(master: Option<Clock>, replicas: &[Replica]) -> Vec<Finding> {
    let Some(master) = master.filter(|_| !replicas.is_empty()) else { return Vec::new() };
    let findings: Vec<Finding> =
        replicas.iter().filter_map(|replica| clock(master, replica)).collect();
    if findings.is_empty() {
        return vec![Finding::ok("the clocks of its replicas agree with its own")];
    }
    findings
}

fn clock(master: Clock, Replica { address, reply }: &Replica) -> Option<Finding> {
    let clock = match reply {
        Ok(reply) => reply.clock.ok_or_else(|| "TIME is refused".to_owned()),
        Err(error) => Err(error.to_string()),
    };
    let clock = match clock {
        Ok(clock) => clock,
        Err(why) => {
            return Some(Finding::warn(
                format!("the clock of its replica {address} cannot be read: {why}"),
                "check that the replica runs, that it accepts the credentials of the URL, and that NTP sets its clock",
            ));
        }
    };
    let (behind, ahead) = (master.ahead_of(clock), clock.ahead_of(master));
    let (apart, direction, consequence) = if behind > MAX_DIFFERENCE {
        (
            behind,
            "behind",
            "after a failover to it, fences may fall by that much, and leases last longer",
        )
    } else if ahead > MAX_DIFFERENCE {
        (ahead, "ahead of", "after a failover to it, leases end earlier by that much")
    } else {
        return None;
    };
    Some(Finding::warn(
        format!("the clock of its replica {address} is {apart:.1?} {direction} its own"),
        format!("{consequence}: synchronise both with NTP"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_certain_differences_between_clocks_are_reported() {
        let same = Clock { min: -40, max: 60 };
        assert_eq!(same.apart(), Duration::ZERO);
        let ahead = Clock { min: 200_000, max: 300_000 };
        assert_eq!(ahead.apart(), Duration::from_millis(200));
        let behind = Clock { min: -300_000, max: -200_000 };
        assert_eq!(behind.apart(), Duration::from_millis(200));
        assert_eq!(ahead.ahead_of(behind), Duration::from_millis(400));
        assert_eq!(behind.ahead_of(ahead), Duration::ZERO);
    }

    #[test]
    fn the_advice_on_unacknowledged_replicas_fits_the_topology() {
        for (url, setting) in [
            ("redis+sentinel://h/m", "replica-priority 0"),
            ("redis+cluster://h", "cluster-replica-no-failover yes"),
        ] {
            let found = acknowledged(2, &[], &Config::from_url(url).unwrap());
            let shown = format!("{found:?}");
            assert!(shown.contains("?min_replicas=2") && shown.contains(setting), "{shown}");
        }
    }

    #[test]
    fn the_address_of_a_replica_is_read_from_info() {
        let found = address("ip=::1,port=6380,state=online,offset=14,lag=0").unwrap();
        assert_eq!(found, Address::tcp("::1", 6380));
        assert!(address("ip=10.0.0.7").is_none());
    }
}
