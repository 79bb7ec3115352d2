//! Checks servers for problems that make locks unsafe.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Error, ErrorKind, Finding, Result};
use redis::{ServerErrorKind, from_redis_value};

use crate::backend::Redis;
use crate::client::events::NoEvents;
use crate::client::node::Node as _;
use crate::client::session::{Opening, Session};
use crate::client::settings::{Address, Protocol, Servers};
use crate::client::{handshake, stream};
use crate::config::Config;
use crate::error::{at, translate, unavailable};

mod replicas;

use replicas::{Clock, Replica};

/// The largest difference between the clocks of server and client that is not reported.
const MAX_DIFFERENCE: Duration = Duration::from_secs(2);
/// The oldest Redis version that is supported.
const MIN_VERSION: (u32, u32) = (6, 2);

/// Checks the servers of a `redis://` (and its variants) or `redlock://` URL for problems that make locks unsafe.
///
/// # Errors
///
/// [`Config`](lockkeeper_core::ErrorKind::Config) if the URL is invalid. Any other problem is a finding.
pub async fn diagnose(url: &str) -> Result<Vec<Finding>> {
    if url.to_ascii_lowercase().starts_with("redlock:") {
        return Ok(redlock(&Config::redlock_from_url(url)?).await);
    }
    let config = Config::from_url(url)?;
    let mut findings = Vec::new();
    match addresses(&config).await {
        Ok(addresses) => {
            for address in addresses {
                findings.extend(Server::check(&config, &address).await.1);
            }
        }
        Err(error) => findings.push(unreachable(&error)),
    }
    Ok(findings)
}

/// Returns the addresses of the masters.
async fn addresses(config: &Config) -> Result<Vec<Address>> {
    if let Servers::One(address) = &config.servers {
        return Ok(vec![address.clone()]);
    }
    let mut addresses = Vec::new();
    for node in Redis::lazy(config.clone(), None).store.topology.nodes().await? {
        addresses.push(node.client().session().await?.identity().address().clone());
    }
    Ok(addresses)
}

/// Checks each node, and whether they are independent of each other.
async fn redlock(nodes: &[Config]) -> Vec<Finding> {
    let (mut findings, mut seen) = (Vec::new(), Vec::<(Address, Server)>::new());
    for config in nodes {
        let Servers::One(address) = &config.servers else { continue };
        let (node, found) = Server::check(config, address).await;
        findings.extend(found);
        seen.extend(node.map(|node| (address.clone(), node)));
    }
    let count = nodes.len();
    if count < 3 || count.is_multiple_of(2) {
        let advice = "use three or five nodes: an even number tolerates no more failures than one node fewer";
        findings.push(Finding::warn(format!("the quorum has {count} nodes"), advice));
    }
    let mut independent = true;
    for (at, (address, node)) in seen.iter().enumerate() {
        if let Some(master) = &node.master {
            independent = false;
            findings.push(Finding::fail(
                format!("{address}: a replica of {master}"),
                "nodes of a quorum must be independent: make it a master",
            ));
        }
        let same = seen[..at].iter().find(|(_, other)| node.run.is_some() && other.run == node.run);
        if let Some((other, _)) = same {
            independent = false;
            findings.push(Finding::fail(
                format!("{address}: the same server as {other}"),
                "one server has one vote: list it once",
            ));
        }
    }
    if independent && seen.len() == count {
        findings.push(Finding::ok("the nodes are independent"));
    }
    findings
}

fn unreachable(error: &Error) -> Finding {
    let advice = match error.kind() {
        ErrorKind::Config => "check the credentials in the URL and the permissions of that user",
        _ => "check that the server runs and that the URL is correct",
    };
    Finding::fail(error.to_string(), advice)
}

/// The identity of a server.
struct Server {
    /// The run id, which is new after each start.
    run: Option<String>,
    /// The address of its master, if it is a replica.
    master: Option<String>,
}

impl Server {
    async fn check(config: &Config, address: &Address) -> (Option<Self>, Vec<Finding>) {
        let read = Report::read(config, address);
        let report = match tokio::time::timeout(config.client.connect_timeout, read).await {
            Ok(Ok(report)) => report,
            Ok(Err(error)) => return (None, vec![unreachable(&at(address, &error))]),
            Err(_) => {
                let error = unavailable("no answer in time");
                return (None, vec![unreachable(&at(address, &error))]);
            }
        };
        let mut findings = vec![Finding::ok("reachable, login accepted")];
        findings.push(report.version());
        let node = Self { run: report.info("run_id"), master: report.master() };
        match &node.master {
            Some(master) => findings.push(Finding::fail(
                format!("a replica of {master}, which cannot grant locks"),
                "use the address of the master, or redis+sentinel://",
            )),
            None => findings.push(push(config, address).await),
        }
        findings.extend([report.eviction(), report.persistence()]);
        let replicas = replicas::query_all(config, &report.info).await;
        findings.extend(report.replicas(config, &replicas));
        findings.push(report.clock());
        findings.extend(replicas::clocks(report.clock, &replicas));
        for finding in &mut findings {
            finding.what = format!("{address}: {}", finding.what);
        }
        (Some(node), findings)
    }
}

async fn open(config: &Config, address: &Address) -> Result<Session> {
    let (settings, handler) = (&config.client, &(Arc::new(NoEvents) as _));
    Opening { settings, address, before: None, handler }.open().await
}

/// Checks whether the client receives messages from the server.
async fn push(config: &Config, address: &Address) -> Finding {
    match open(config, address).await {
        Err(error) => unreachable(&error),
        Ok(session) if !session.receives_messages() => Finding::warn(
            "no messages arrive from the server: waiters poll",
            "allow the user to subscribe to channels (ACL &*), or connect without a proxy",
        ),
        Ok(session)
            if session.has_second_connection() && config.client.protocol == Protocol::Any =>
        {
            Finding::warn(
                "the server supports only RESP2: messages need a second connection",
                "Redis 6 and newer support RESP3: connect without a proxy, or set protocol=resp2",
            )
        }
        Ok(session) if session.has_second_connection() => {
            Finding::ok("RESP2 as configured, messages on a second connection")
        }
        Ok(_) => Finding::ok("RESP3, with messages on the same connection"),
    }
}

/// `INFO`, settings and clock of a server.
struct Report {
    /// Empty if the user may not run `INFO`.
    info: HashMap<String, String>,
    /// Empty if the user may not run `CONFIG GET`.
    settings: HashMap<String, String>,
    clock: Option<Clock>,
}

impl Report {
    async fn read(config: &Config, address: &Address) -> Result<Self> {
        let mut endpoints = stream::resolve(address).await?;
        if endpoints.len() > 1
            && let Ok(session) = open(config, address).await
        {
            // The master, which grants the locks.
            endpoints = vec![session.endpoint().clone()];
        }
        let server = handshake::open_plain(&config.client, address, &endpoints).await?;
        server.end_handshake();
        let text: String = match server.query(&redis::cmd("INFO")).await {
            Ok(text) => from_redis_value(text).map_err(|error| translate(error.into()))?,
            // Locks work without INFO.
            Err(error) if error.kind() == redis::ErrorKind::Server(ServerErrorKind::NoPerm) => {
                String::new()
            }
            Err(error) => return Err(translate(error)),
        };
        let lines = text.lines().filter_map(|line| line.trim_end().split_once(':'));
        let info = lines.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        let mut settings = HashMap::new();
        for name in ["maxmemory", "maxmemory-policy", "appendonly", "appendfsync", "save"] {
            let mut get = redis::cmd("CONFIG");
            let answer = server.query(get.arg("GET").arg(name)).await;
            let pair = answer.ok().and_then(|answer| from_redis_value::<Vec<String>>(answer).ok());
            if let Some([key, value]) = pair.as_deref() {
                settings.insert(key.clone(), value.clone());
            }
        }
        Ok(Self { info, settings, clock: Clock::read(&server).await })
    }

    fn info(&self, key: &str) -> Option<String> {
        self.info.get(key).cloned()
    }

    fn version(&self) -> Finding {
        if self.info.is_empty() {
            let advice = "allow the user to run INFO, or check them by hand";
            return Finding::warn("INFO is not allowed: version, role, replicas unknown", advice);
        }
        let (make, version) = match (self.info("valkey_version"), self.info("redis_version")) {
            (Some(version), _) => ("Valkey", version),
            (None, Some(version)) => ("Redis", version),
            (None, None) => {
                let advice = "a proxy may hide it: check that it is Redis 6.2 or newer, or Valkey";
                return Finding::warn("the server does not report its version", advice);
            }
        };
        let mut numbers = version.split('.').map(|part| part.parse().unwrap_or(0));
        let numbers = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        if make == "Redis" && numbers < MIN_VERSION {
            let advice = "upgrade it: the oldest supported version is 6.2";
            return Finding::fail(format!("{make} {version}"), advice);
        }
        Finding::ok(format!("{make} {version}"))
    }

    /// Returns the address of its master, if it is a replica.
    fn master(&self) -> Option<String> {
        let is_replica = self.info("role").as_deref() == Some("slave");
        let host = self.info.get("master_host").filter(|_| is_replica)?;
        Some(format!("{host}:{}", self.info("master_port").unwrap_or_default()))
    }

    fn eviction(&self) -> Finding {
        let (Some(most), Some(policy)) =
            (self.settings.get("maxmemory"), self.settings.get("maxmemory-policy"))
        else {
            let advice = "check by hand that maxmemory-policy is noeviction";
            return Finding::warn("CONFIG GET is not allowed: settings unknown", advice);
        };
        match (most.as_str(), policy.as_str()) {
            (_, "noeviction") => Finding::ok("no key is evicted (maxmemory-policy noeviction)"),
            ("0", policy) => Finding::warn(
                format!("maxmemory-policy is {policy}, and maxmemory is not set"),
                "if maxmemory is ever set, locks may be evicted: CONFIG SET maxmemory-policy noeviction",
            ),
            (_, policy) => Finding::fail(
                format!("locks may be evicted (maxmemory-policy {policy})"),
                "CONFIG SET maxmemory-policy noeviction, or use a separate server for locks",
            ),
        }
    }

    fn persistence(&self) -> Finding {
        let setting = |name: &str| self.settings.get(name).map(String::as_str);
        match (setting("appendonly"), setting("appendfsync")) {
            (Some("yes"), Some("always")) => {
                Finding::ok("every grant is flushed to disk (appendfsync always)")
            }
            (Some("yes"), fsync) => Finding::warn(
                format!("a crash may lose the last grants (appendfsync {})", fsync.unwrap_or("?")),
                "CONFIG SET appendfsync always, or check fences where it matters",
            ),
            (Some(_), _) => Finding::warn(
                "a restart loses held locks (appendonly no)",
                "CONFIG SET appendonly yes and appendfsync always, or check fences where it matters",
            ),
            (None, _) => Finding::warn(
                "persistence settings unknown: grants may not survive a restart",
                "check by hand that appendonly is yes and appendfsync always",
            ),
        }
    }

    /// Returns `None` if the number of replicas is unknown.
    fn replicas(&self, config: &Config, replicas: &[Replica]) -> Option<Finding> {
        let count = self.info("connected_slaves")?.parse().ok()?;
        Some(replicas::acknowledged(count, replicas, config))
    }

    fn clock(&self) -> Finding {
        match self.clock.map(Clock::apart) {
            None => {
                Finding::warn("the server's clock cannot be read", "allow the user to run TIME")
            }
            Some(apart) if apart > MAX_DIFFERENCE => Finding::warn(
                format!("the server's clock differs from the local clock by {apart:.1?}"),
                "leases tolerate that, but not a jump when it is corrected: synchronise both with NTP",
            ),
            Some(_) => Finding::ok("the server's clock agrees with the local clock"),
        }
    }
}

#[cfg(test)]
mod tests {
    use lockkeeper_core::Severity;

    use super::*;

    fn report(info: &[(&str, &str)]) -> Report {
        let info = info.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Report { info: info.collect(), settings: HashMap::new(), clock: None }
    }

    #[test]
    fn unsupported_versions_are_reported() {
        let severity = |info: &[(&str, &str)]| report(info).version().severity;
        for old in ["2.8.19", "5.0.14", "6.0.16", "6"] {
            assert_eq!(severity(&[("redis_version", old)]), Severity::Fail, "{old}");
        }
        for new in ["6.2.0", "6.10.1", "7.0.15", "10.0.0"] {
            assert_eq!(severity(&[("redis_version", new)]), Severity::Ok, "{new}");
        }
        // Valkey also reports the Redis version that it was forked from.
        let valkey = report(&[("redis_version", "7.2.4"), ("valkey_version", "8.1.0")]).version();
        assert_eq!((valkey.severity, valkey.what.as_str()), (Severity::Ok, "Valkey 8.1.0"));
        assert_eq!(severity(&[("role", "master")]), Severity::Warn, "no version");
    }

    #[test]
    fn clock_differences_above_two_seconds_are_reported() {
        let severity = |clock| Report { clock, ..report(&[]) }.clock().severity;
        let ahead = |micros| Some(Clock::ahead(micros));
        assert_eq!(severity(ahead(1_900_000)), Severity::Ok);
        assert_eq!(severity(ahead(2_100_000)), Severity::Warn);
        assert_eq!(severity(ahead(-2_100_000)), Severity::Warn);
        assert_eq!(severity(None), Severity::Warn);
    }
}
