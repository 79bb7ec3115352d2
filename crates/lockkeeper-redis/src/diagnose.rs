//! Checks of the servers for problems that make locks unsafe.

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

/// How far the clocks of server and client may be apart.
const MAX_DIFFERENCE: Duration = Duration::from_secs(2);
/// The oldest version that the scripts support.
const MIN_VERSION: (u32, u32) = (6, 2);

/// Checks the servers of a URL for problems that make locks unsafe: `redis://` and its variants, `redlock://`.
///
/// # Errors
///
/// [`Config`](lockkeeper_core::ErrorKind::Config) for a wrong URL. All else is a finding.
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
        let advice = "give three or five: an even number survives no more failures than one fewer";
        findings.push(Finding::warn(format!("there are {count} nodes"), advice));
    }
    let mut independent = true;
    for (at, (address, node)) in seen.iter().enumerate() {
        if let Some(master) = &node.master {
            independent = false;
            findings.push(Finding::fail(
                format!("{address}: a replica of {master}"),
                "nodes of a quorum must know nothing of each other: make it a master",
            ));
        }
        let same = seen[..at].iter().find(|(_, other)| node.run.is_some() && other.run == node.run);
        if let Some((other, _)) = same {
            independent = false;
            findings.push(Finding::fail(
                format!("{address}: the same server as {other}"),
                "one server has one vote: name it once",
            ));
        }
    }
    if independent && seen.len() == count {
        findings.push(Finding::ok("the nodes know nothing of each other"));
    }
    findings
}

fn unreachable(error: &Error) -> Finding {
    let advice = match error.kind() {
        ErrorKind::Config => "see that the login of the URL is right, and what that user may do",
        _ => "see that the server runs and that the URL is right",
    };
    Finding::fail(error.to_string(), advice)
}

/// The identity of a server.
struct Server {
    /// The run id, which changes with each start.
    run: Option<String>,
    /// The master that it is a replica of.
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
        let mut findings = vec![Finding::ok("reachable, and the login is right")];
        findings.push(report.version());
        let node = Self { run: report.info("run_id"), master: report.master() };
        match &node.master {
            Some(master) => findings.push(Finding::fail(
                format!("a replica of {master}, which takes no locks"),
                "give the address of the master, or use redis+sentinel://",
            )),
            None => findings.push(push(config, address).await),
        }
        findings.extend([report.eviction(), report.persistence()]);
        let replicas = replicas::ask_all(config, &report.info).await;
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

/// Whether messages from the server arrive.
async fn push(config: &Config, address: &Address) -> Finding {
    match open(config, address).await {
        Err(error) => unreachable(&error),
        Ok(session) if !session.receives_messages() => Finding::warn(
            "no messages come through: waiters ask again and again",
            "let the user subscribe to channels (ACL &*), or reach the server without a proxy",
        ),
        Ok(session)
            if session.has_second_connection() && config.client.protocol == Protocol::Any =>
        {
            Finding::warn(
                "the server speaks only RESP2: messages need a second connection",
                "Redis 6 and newer speak RESP3: is there a proxy in between?",
            )
        }
        Ok(session) if session.has_second_connection() => {
            Finding::ok("RESP2 as asked for, messages on a second connection")
        }
        Ok(_) => Finding::ok("RESP3, with messages on the same connection"),
    }
}

/// What a server reports about itself.
struct Report {
    /// Empty if it may not be read.
    info: HashMap<String, String>,
    /// Empty if they may not be read.
    settings: HashMap<String, String>,
    /// Its clock, if it can be read.
    clock: Option<Clock>,
}

impl Report {
    async fn read(config: &Config, address: &Address) -> Result<Self> {
        let mut ips = stream::resolve(address).await?;
        if ips.len() > 1
            && let Ok(session) = open(config, address).await
        {
            // The one that locks are on.
            ips = vec![session.ip()];
        }
        let server = handshake::open_plain(&config.client, address, &ips).await?;
        server.end_handshake();
        let text: String = match server.query(&redis::cmd("INFO")).await {
            Ok(text) => from_redis_value(text).map_err(|error| translate(error.into()))?,
            // It can still keep locks.
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
            let advice = "let the user run INFO, or see to these yourself";
            return Finding::warn("INFO is not allowed: version, role, replicas unknown", advice);
        }
        let (make, version) = match (self.info("valkey_version"), self.info("redis_version")) {
            (Some(version), _) => ("Valkey", version),
            (None, Some(version)) => ("Redis", version),
            (None, None) => {
                let advice = "a proxy may hide it: Redis 6.2 and newer is what it is made for";
                return Finding::warn("the version is not known", advice);
            }
        };
        let mut numbers = version.split('.').map(|part| part.parse().unwrap_or(0));
        let numbers = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        if make == "Redis" && numbers < MIN_VERSION {
            let advice = "6.2 is the oldest that it is made for: upgrade it";
            return Finding::fail(format!("{make} {version}"), advice);
        }
        Finding::ok(format!("{make} {version}"))
    }

    /// The master that it is a replica of.
    fn master(&self) -> Option<String> {
        let is_replica = self.info("role").as_deref() == Some("slave");
        let host = self.info.get("master_host").filter(|_| is_replica)?;
        Some(format!("{host}:{}", self.info("master_port").unwrap_or_default()))
    }

    fn eviction(&self) -> Finding {
        let (Some(most), Some(policy)) =
            (self.settings.get("maxmemory"), self.settings.get("maxmemory-policy"))
        else {
            let advice = "see yourself that maxmemory-policy is noeviction";
            return Finding::warn("CONFIG GET is not allowed: settings are not known", advice);
        };
        match (most.as_str(), policy.as_str()) {
            (_, "noeviction") => Finding::ok("no key is evicted (maxmemory-policy noeviction)"),
            ("0", policy) => Finding::warn(
                format!("maxmemory-policy is {policy}, though there is no maxmemory yet"),
                "with a maxmemory, locks would be evicted: CONFIG SET maxmemory-policy noeviction",
            ),
            (_, policy) => Finding::fail(
                format!("locks may be evicted (maxmemory-policy {policy})"),
                "CONFIG SET maxmemory-policy noeviction, or give locks a server of their own",
            ),
        }
    }

    fn persistence(&self) -> Finding {
        let setting = |name: &str| self.settings.get(name).map(String::as_str);
        match (setting("appendonly"), setting("appendfsync")) {
            (Some("yes"), Some("always")) => {
                Finding::ok("every grant is on disk (appendfsync always)")
            }
            (Some("yes"), fsync) => Finding::warn(
                format!(
                    "a crash may forget the last grants (appendfsync {})",
                    fsync.unwrap_or("?")
                ),
                "CONFIG SET appendfsync always, or check fences where it matters",
            ),
            (Some(_), _) => Finding::warn(
                "a restart forgets locks that are held (appendonly no)",
                "CONFIG SET appendonly yes and appendfsync always, or check fences where it matters",
            ),
            (None, _) => Finding::warn(
                "it is not known whether grants survive a restart",
                "see yourself that appendonly is yes and appendfsync always",
            ),
        }
    }

    /// `None` if their number is not known.
    fn replicas(&self, config: &Config, replicas: &[Replica]) -> Option<Finding> {
        let count = self.info("connected_slaves")?.parse().ok()?;
        Some(replicas::acknowledged(count, replicas, config))
    }

    fn clock(&self) -> Finding {
        match self.clock.map(Clock::apart) {
            None => Finding::warn("the server's clock cannot be read", "see that TIME is allowed"),
            Some(apart) if apart > MAX_DIFFERENCE => Finding::warn(
                format!("the server's clock is {apart:.1?} from the one here"),
                "leases survive that, but not a jump when it is corrected: let NTP set both",
            ),
            Some(_) => Finding::ok("the server's clock agrees with the one here"),
        }
    }
}

#[cfg(test)]
mod tests {
    use lockkeeper_core::Severity;

    use super::*;

    fn says(info: &[(&str, &str)]) -> Report {
        let info = info.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Report { info: info.collect(), settings: HashMap::new(), clock: None }
    }

    #[test]
    fn servers_that_are_too_old_are_found() {
        let severity = |info: &[(&str, &str)]| says(info).version().severity;
        for old in ["2.8.19", "5.0.14", "6.0.16", "6"] {
            assert_eq!(severity(&[("redis_version", old)]), Severity::Fail, "{old}");
        }
        for new in ["6.2.0", "6.10.1", "7.0.15", "10.0.0"] {
            assert_eq!(severity(&[("redis_version", new)]), Severity::Ok, "{new}");
        }
        // It calls itself a Redis of the version that it came from.
        let valkey = says(&[("redis_version", "7.2.4"), ("valkey_version", "8.1.0")]).version();
        assert_eq!((valkey.severity, valkey.what.as_str()), (Severity::Ok, "Valkey 8.1.0"));
        assert_eq!(severity(&[("role", "master")]), Severity::Warn, "it does not say");
    }

    #[test]
    fn clocks_may_be_two_seconds_apart() {
        let severity = |clock| Report { clock, ..says(&[]) }.clock().severity;
        let ahead = |micros| Some(Clock::ahead(micros));
        assert_eq!(severity(ahead(1_900_000)), Severity::Ok);
        assert_eq!(severity(ahead(2_100_000)), Severity::Warn);
        assert_eq!(severity(ahead(-2_100_000)), Severity::Warn);
        assert_eq!(severity(None), Severity::Warn);
    }
}
