//! Replicas: what a failover to one of them would make unsafe.

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

/// How far the clocks of master and replica may be apart. A planned failover takes about that long, and after it the
/// next fence is that of the replica's clock.
const MAX_DIFFERENCE: Duration = Duration::from_millis(100);

/// A server's clock compared with the one here: by how many microseconds it is ahead, at least and at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Clock {
    least: i128,
    most: i128,
}

impl Clock {
    /// Reads it. The answer was made between the moment before the request was sent and the one after it came.
    pub(super) async fn read(server: &Connection) -> Option<Self> {
        let before = now()?;
        let time = server.query(&redis::cmd("TIME")).await.ok()?;
        let (seconds, micros): (u32, u32) = from_redis_value(time).ok()?;
        let (time, after) = (i128::from(seconds) * 1_000_000 + i128::from(micros), now()?);
        Some(Self { least: time - after, most: time - before })
    }

    #[cfg(test)]
    pub(super) fn ahead(micros: i128) -> Self {
        Self { least: micros, most: micros }
    }

    /// How far it is from the one here, at least.
    pub(super) fn apart(self) -> Duration {
        micros(self.least.max(-self.most).max(0))
    }

    /// How far it is ahead of another, at least.
    fn ahead_of(self, other: Self) -> Duration {
        micros((self.least - other.most).max(0))
    }
}

fn now() -> Option<i128> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    i128::try_from(now.as_micros()).ok()
}

fn micros(micros: i128) -> Duration {
    u64::try_from(micros).map_or(Duration::MAX, Duration::from_micros)
}

/// A replica, as far as it could be asked.
pub(super) struct Replica {
    address: Address,
    answer: Result<Answer>,
}

struct Answer {
    clock: Option<Clock>,
    /// Sentinel promotes no replica of priority 0.
    is_promoted: bool,
}

/// Asks the replicas that a master's `INFO` names, with the login of the URL.
pub(super) async fn ask_all(config: &Config, info: &HashMap<String, String>) -> Vec<Replica> {
    let addresses = (0..).map_while(|number| info.get(&format!("slave{number}")));
    let asked = addresses.filter_map(|line| address(line)).map(async |address| {
        let asked =
            tokio::time::timeout(config.client.connect_timeout, ask(config, &address)).await;
        let answer = asked.unwrap_or_else(|_| Err(unavailable("no answer in time")));
        Replica { address, answer }
    });
    join_all(asked).await
}

/// Where a replica is, in a line such as `ip=10.0.0.7,port=6379,state=online,offset=14,lag=0`.
fn address(line: &str) -> Option<Address> {
    let field = |name: &str| {
        line.split(',').find_map(|field| field.split_once('=').filter(|pair| pair.0 == name))
    };
    Some(Address { host: field("ip")?.1.to_owned(), port: field("port")?.1.parse().ok()? })
}

async fn ask(config: &Config, address: &Address) -> Result<Answer> {
    let ips = stream::resolve(address).await?;
    let server = handshake::open_plain(&config.client, address, &ips).await?;
    server.end_handshake();
    let mut info = redis::cmd("INFO");
    let info = server.query(info.arg("replication")).await.ok();
    let info = info.and_then(|info| from_redis_value::<String>(info).ok()).unwrap_or_default();
    let is_promoted = !info.lines().any(|line| line.trim_end() == "slave_priority:0");
    Ok(Answer { clock: Clock::read(&server).await, is_promoted })
}

/// Whether grants wait for all replicas that may be promoted. `count` is how many are connected.
pub(super) fn acknowledged(count: u32, replicas: &[Replica], config: &Config) -> Finding {
    let wanted = config.min_replicas;
    if count < wanted {
        return Finding::fail(
            format!("{count} replicas are connected, and min_replicas is {wanted}"),
            "no lock will be granted: connect more replicas, or lower min_replicas in the URL",
        );
    }
    if count == 0 {
        return Finding::ok("no replicas, so no failover that could forget a grant");
    }
    // Nodes of a cluster do not look at the priority.
    let is_cluster = matches!(config.servers, Servers::Cluster(_));
    let is_promoted = |replica: &&Replica| {
        is_cluster || replica.answer.as_ref().map_or(true, |answer| answer.is_promoted)
    };
    let kept_back = replicas.len() - replicas.iter().filter(is_promoted).count();
    let promoted = count.saturating_sub(u32::try_from(kept_back).unwrap_or(u32::MAX));
    let which = match kept_back {
        0 => format!("{count} replicas"),
        _ => format!("{count} replicas, {promoted} of which may be promoted"),
    };
    if promoted <= wanted {
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
            "a failover to one that has not acknowledged a grant forgets it: put \
             ?min_replicas={promoted} into the URL, or give replicas that must not be promoted \
             {setting}"
        ),
    )
}

/// Whether fences go on rising if a replica is promoted. `master` is the master's clock.
pub(super) fn clocks(master: Option<Clock>, replicas: &[Replica]) -> Vec<Finding> {
    let Some(master) = master.filter(|_| !replicas.is_empty()) else { return Vec::new() };
    let findings: Vec<Finding> =
        replicas.iter().filter_map(|replica| clock(master, replica)).collect();
    if findings.is_empty() {
        return vec![Finding::ok("the clocks of its replicas agree with its own")];
    }
    findings
}

fn clock(master: Clock, Replica { address, answer }: &Replica) -> Option<Finding> {
    let clock = match answer {
        Ok(answer) => answer.clock.ok_or_else(|| "TIME is refused".to_owned()),
        Err(error) => Err(error.to_string()),
    };
    let clock = match clock {
        Ok(clock) => clock,
        Err(why) => {
            return Some(Finding::warn(
                format!("the clock of its replica {address} cannot be read: {why}"),
                "see that the replica runs, that the login of the URL is right there, and that NTP sets its clock",
            ));
        }
    };
    let (behind, ahead) = (master.ahead_of(clock), clock.ahead_of(master));
    let (apart, direction, consequence) = if behind > MAX_DIFFERENCE {
        (
            behind,
            "behind",
            "after a failover to it fences may fall by that much, and leases last longer",
        )
    } else if ahead > MAX_DIFFERENCE {
        (ahead, "ahead of", "after a failover to it leases end earlier by that much")
    } else {
        return None;
    };
    Some(Finding::warn(
        format!("the clock of its replica {address} is {apart:.1?} {direction} its own"),
        format!("{consequence}: let NTP set both"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_certain_differences_between_clocks_are_reported() {
        let here = Clock { least: -40, most: 60 };
        assert_eq!(here.apart(), Duration::ZERO);
        let ahead = Clock { least: 200_000, most: 300_000 };
        assert_eq!(ahead.apart(), Duration::from_millis(200));
        let behind = Clock { least: -300_000, most: -200_000 };
        assert_eq!(behind.apart(), Duration::from_millis(200));
        assert_eq!(ahead.ahead_of(behind), Duration::from_millis(400));
        assert_eq!(behind.ahead_of(ahead), Duration::ZERO);
    }

    #[test]
    fn the_advice_for_replicas_that_are_not_waited_for_is_that_of_the_topology() {
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
    fn a_replica_is_where_its_master_says() {
        let found = address("ip=::1,port=6380,state=online,offset=14,lag=0").unwrap();
        assert_eq!((found.host.as_str(), found.port), ("::1", 6380));
        assert!(address("ip=10.0.0.7").is_none());
    }
}
