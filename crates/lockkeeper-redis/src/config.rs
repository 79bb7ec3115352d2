//! Options of a store: addresses, credentials, behaviour; and the URLs that set them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Error, ErrorKind, Result};

use crate::client::settings::{Address, Servers, Settings};
use crate::client::tls::Tls;
use crate::error::config;

mod url;

use url::{MAX_TIMEOUT, Parts, database_number, decode, duration, time};

pub use crate::client::settings::Protocol;

/// How to reach Redis, and how to keep locks there.
///
/// Neither user names nor passwords show when it is printed.
#[derive(Clone)]
pub struct Config {
    pub(crate) servers: Servers,
    pub(crate) client: Settings,
    pub(crate) prefix: Arc<str>,
    pub(crate) min_replicas: u32,
    /// How long a node of a quorum must have been up before it votes.
    pub(crate) min_uptime: Option<Duration>,
}

impl Config {
    fn new(servers: Servers) -> Self {
        let prefix: Arc<str> = "lockkeeper".into();
        let client = Settings {
            username: None,
            password: None,
            sentinel_password: None,
            database: 0,
            tls: None,
            connect_timeout: Duration::from_secs(3),
            command_timeout: Duration::from_secs(5),
            protocol: Protocol::Any,
            channel_prefix: prefix.clone(),
        };
        Self { servers, client, prefix, min_replicas: 0, min_uptime: None }
    }

    /// Reads a URL:
    ///
    /// - `redis://[user[:password]@]host[:port][/database]`
    /// - `rediss://…`: the same over TLS (feature `tls`)
    /// - `redis+sentinel://[user[:password]@]host,host,…/master[/database]`
    /// - `redis+cluster://[user[:password]@]host,host,…`
    ///
    /// with options after a `?`, joined by `&`: `prefix`, `min_replicas`, `connect_timeout` and
    /// `command_timeout` (as in `500ms`, `3s`), `protocol` (`resp2`, `resp3`), `tls` (`true`), `ca_file`,
    /// `sentinel_password`. Special characters are percent-encoded. A user name without a password is
    /// taken for a password, as `redis-cli` does.
    ///
    /// # Errors
    ///
    /// [`Config`](ErrorKind::Config), with what is right. No part of the URL is repeated that may be a
    /// secret.
    pub fn from_url(url: &str) -> Result<Self> {
        let parts = Parts::of(url)?;
        let servers = match parts.scheme.as_str() {
            "redis" | "rediss" => match parts.hosts.as_slice() {
                [_] => Servers::One(parts.address(0, 6379)?),
                _ => {
                    return Err(config(
                        "redis:// takes one host; for several there are redis+sentinel://, redis+cluster:// and redlock://",
                    ));
                }
            },
            "redis+sentinel" | "rediss+sentinel" => {
                let master = parts.path.first().filter(|master| !master.is_empty());
                let master = master.ok_or_else(|| {
                    config("redis+sentinel:// needs the master's name after the hosts, as in \"redis+sentinel://a,b,c/mymaster\"")
                })?;
                Servers::Sentinel { sentinels: parts.addresses(26379)?, master: decode(master)? }
            }
            "redis+cluster" | "rediss+cluster" => Servers::Cluster(parts.addresses(6379)?),
            _ => {
                return Err(config(
                    "not a Redis URL: it starts with redis://, rediss://, redis+sentinel:// or redis+cluster://",
                ));
            }
        };
        let mut made = Self::new(servers);
        let database = match &made.servers {
            Servers::One(_) => parts.path.first(),
            Servers::Sentinel { .. } => parts.path.get(1),
            Servers::Cluster(_) => None,
        };
        let used = database.map_or(0, |_| 1)
            + usize::from(matches!(made.servers, Servers::Sentinel { .. }));
        if parts.path.iter().skip(used).any(|part| !part.is_empty()) {
            return Err(config(
                "the URL has more after the host than it may: a database number is all (a cluster has none)",
            ));
        }
        made.client.database = database_number(database)?;
        made.apply(&parts)?;
        Ok(made)
    }

    /// Reads a `redlock://host,host,host[,…]` URL: one configuration for each node. The rest is as in
    /// [`from_url`](Self::from_url), the same for all nodes, and there is one more option: `min_uptime`, as in
    /// [`Config::min_uptime`].
    ///
    /// # Errors
    ///
    /// As [`from_url`](Self::from_url).
    pub fn redlock_from_url(url: &str) -> Result<Vec<Self>> {
        let parts = Parts::of(url)?;
        if parts.scheme != "redlock" {
            return Err(config("not a Redlock URL: it starts with redlock://"));
        }
        if parts.path.iter().skip(1).any(|part| !part.is_empty()) {
            return Err(config("the URL has more after the hosts than the number of a database"));
        }
        let nodes = parts.addresses(6379)?.into_iter().map(|address| {
            let mut node = Self::new(Servers::One(address));
            node.client.database = database_number(parts.path.first())?;
            node.apply(&parts)?;
            Ok(node)
        });
        nodes.collect()
    }

    /// Takes address, credentials and database from a client of the `redis` crate. Certificates that it
    /// was given do not show, and are not taken.
    ///
    /// # Errors
    ///
    /// [`Config`](ErrorKind::Config) for a Unix socket, which is not supported.
    pub fn from_client(client: &redis::Client) -> Result<Self> {
        let info = client.get_connection_info();
        let (host, port, tls) = match info.addr() {
            redis::ConnectionAddr::Tcp(host, port) => (host, *port, false),
            redis::ConnectionAddr::TcpTls { host, port, .. } => (host, *port, true),
            _ => return Err(config("only TCP connections are supported")),
        };
        let mut made = Self::new(Servers::One(Address { host: host.clone(), port }));
        let settings = info.redis_settings();
        made.client.username = settings.username().map(str::to_owned);
        made.client.password = settings.password().map(str::to_owned);
        made.client.database = settings.db();
        made.client.tls = if tls { Some(Tls::new(None)?) } else { None };
        Ok(made)
    }

    /// Sets what all keys start with (`lockkeeper` if not set).
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) if it is empty, contains a brace (a cluster would put
    /// the keys of one lock on different nodes) or a blank.
    pub fn prefix(mut self, prefix: &str) -> Result<Self> {
        let bad = |c: char| c == '{' || c == '}' || c.is_whitespace() || c.is_control();
        if prefix.is_empty() || prefix.contains(bad) {
            return Err(option("the prefix may not be empty, nor contain braces or blanks"));
        }
        self.prefix = prefix.into();
        self.client.channel_prefix = self.prefix.clone();
        Ok(self)
    }

    /// Counts a grant or a renewal only when so many replicas have acknowledged it (0 if not set). A
    /// grant that too few did is given back.
    ///
    /// A failover forgets no grant if this is the number of all replicas that may be promoted. With fewer, it may
    /// promote one that has not acknowledged the grant.
    #[must_use]
    pub fn min_replicas(mut self, replicas: u32) -> Self {
        self.min_replicas = replicas;
        self
    }

    /// Sets how long it may take to connect (3 s if not set).
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.client.connect_timeout = timeout.clamp(Duration::from_millis(1), MAX_TIMEOUT);
        self
    }

    /// Sets how long a server may be silent before its connection is given up (5 s if not set). It is
    /// asked for a sign of life every third of this. Shorter than the shortest ttl, it leaves time to
    /// renew on another connection.
    #[must_use]
    pub fn command_timeout(mut self, timeout: Duration) -> Self {
        self.client.command_timeout = timeout.clamp(Duration::from_millis(1), MAX_TIMEOUT);
        self
    }

    /// Sets how long a node of a quorum must have been up before it votes: see
    /// [`Quorum::min_uptime`](lockkeeper_core::Quorum::min_uptime). [`redlock`](crate::redlock) takes the longest that
    /// any node has. Has no effect elsewhere.
    #[must_use]
    pub fn min_uptime(mut self, min_uptime: Duration) -> Self {
        self.min_uptime = Some(min_uptime);
        self
    }

    /// Sets which protocol is spoken.
    #[must_use]
    pub fn protocol(mut self, protocol: Protocol) -> Self {
        self.client.protocol = protocol;
        self
    }

    fn apply(&mut self, parts: &Parts<'_>) -> Result<()> {
        (self.client.username, self.client.password) = parts.credentials()?;
        let (mut tls, mut ca_file) = (parts.scheme.starts_with("rediss"), None);
        let mut seen = Vec::new();
        for (name, value) in &parts.options {
            let value = decode(value)?;
            if seen.contains(name) {
                return Err(config(format!("the option {name:?} is in the URL twice")));
            }
            seen.push(name);
            match *name {
                "prefix" => {
                    let made = self.clone().prefix(&value);
                    *self = made.map_err(|error| config(error.to_string()))?;
                }
                "min_replicas" => {
                    self.min_replicas = value.parse().map_err(|_| {
                        config("min_replicas is a number, as in \"?min_replicas=1\"")
                    })?;
                }
                "connect_timeout" => self.client.connect_timeout = duration(name, &value)?,
                "command_timeout" => self.client.command_timeout = duration(name, &value)?,
                "min_uptime" if parts.scheme == "redlock" => {
                    self.min_uptime = Some(time(&value).ok_or_else(|| {
                        config("min_uptime is a time, as in \"30s\", or \"0s\" for none")
                    })?);
                }
                "protocol" => {
                    self.client.protocol = match value.as_str() {
                        "resp2" => Protocol::Resp2,
                        "resp3" => Protocol::Any,
                        _ => return Err(config("protocol is resp2 or resp3")),
                    };
                }
                "tls" => match value.as_str() {
                    "true" => tls = true,
                    "false" if !tls => {}
                    _ => return Err(config("tls is true or false, and true with rediss://")),
                },
                "ca_file" => ca_file = Some(value.into()),
                "sentinel_password" if matches!(self.servers, Servers::Sentinel { .. }) => {
                    self.client.sentinel_password = Some(value);
                }
                _ => {
                    return Err(config(format!(
                        "unknown option {name:?} in the URL: there are prefix, min_replicas, \
                         connect_timeout, command_timeout, protocol, tls, ca_file, with sentinels \
                         sentinel_password, and with redlock:// min_uptime"
                    )));
                }
            }
        }
        if ca_file.is_some() && !tls {
            return Err(config("ca_file is of no use without TLS: write rediss:// or tls=true"));
        }
        self.client.tls = if tls { Some(Tls::new(ca_file)?) } else { None };
        Ok(())
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("servers", &self.servers)
            .field("database", &self.client.database)
            .field("tls", &self.client.tls.is_some())
            .field("prefix", &self.prefix)
            .field("min_replicas", &self.min_replicas)
            .finish_non_exhaustive()
    }
}

fn option(message: &str) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(host: &str, port: u16) -> Address {
        Address { host: host.to_owned(), port }
    }

    #[test]
    fn a_url_gives_everything() {
        let config = Config::from_url(
            "redis://ann:p%40ss%2F%3F@db.example:7000/3?prefix=shop&min_replicas=2&\
             connect_timeout=500ms&command_timeout=2s&protocol=resp2",
        );
        let config = config.unwrap();
        assert_eq!(config.servers, Servers::One(address("db.example", 7000)));
        assert_eq!(config.client.username.as_deref(), Some("ann"));
        assert_eq!(config.client.password.as_deref(), Some("p@ss/?"));
        assert_eq!((config.client.database, config.min_replicas), (3, 2));
        assert_eq!(&*config.prefix, "shop");
        assert_eq!(config.client.connect_timeout, Duration::from_millis(500));
        assert_eq!(config.client.command_timeout, Duration::from_secs(2));
        assert_eq!(config.client.protocol, Protocol::Resp2);
    }

    #[test]
    fn defaults_are_those_of_redis() {
        for url in ["redis://host", "redis://host/", "redis://host?prefix=lockkeeper"] {
            let config = Config::from_url(url).unwrap();
            assert_eq!(config.servers, Servers::One(address("host", 6379)));
            assert_eq!(
                (config.client.username, config.client.password, config.client.database),
                (None, None, 0)
            );
        }
        let config = Config::from_url("redis://secret@[::1]:7000").unwrap();
        assert_eq!(config.servers, Servers::One(address("::1", 7000)));
        assert_eq!(config.client.password.as_deref(), Some("secret"));
        assert_eq!(
            Config::from_url("redis://:pw@h").unwrap().client.password.as_deref(),
            Some("pw")
        );
    }

    #[test]
    fn sentinels_clusters_and_redlock_take_several_hosts() {
        let config = Config::from_url("redis+sentinel://:pw@a,b:1,[::2]/mymaster/4").unwrap();
        let sentinels = vec![address("a", 26379), address("b", 1), address("::2", 26379)];
        let master = "mymaster".to_owned();
        assert_eq!(config.servers, Servers::Sentinel { sentinels, master });
        assert_eq!(config.client.database, 4);
        let config = Config::from_url("redis+cluster://a:1,b/").unwrap();
        assert_eq!(config.servers, Servers::Cluster(vec![address("a", 1), address("b", 6379)]));
        let nodes = Config::redlock_from_url("redlock://u:pw@a,b:1,c?prefix=x").unwrap();
        let servers: Vec<_> = nodes.iter().map(|node| node.servers.clone()).collect();
        let expected = [address("a", 6379), address("b", 1), address("c", 6379)];
        assert_eq!(servers, expected.map(Servers::One));
        assert!(nodes.iter().all(|node| node.client.password.as_deref() == Some("pw")));
    }

    #[test]
    fn a_bad_url_is_refused_in_one_line_without_its_secrets() {
        let bad = [
            "redis:hunter2",
            "redis://",
            "redis://:hunter2@",
            "redis://:hunter2@/0",
            "redis://u:hunter2@host:port",
            "redis://u:hunter2@host:",
            "redis://u:hunter2@host:0",
            "redis://u:hunter2@host:99999",
            "redis://u:hunter2@host/hunter2",
            "redis://u:hunter2@host/-1",
            "redis://u:hunter2@host/0/1",
            "redis://u:hun/ter2hunter2@host",
            "redis://u:hun?hunter2@host",
            "redis://u:hun#hunter2@host",
            "redis://u:hunter2@a,b",
            "redis://u:hunter2@host?nosuch=hunter2",
            "redis://u:hunter2@host?prefix",
            "redis://u:hunter2@host?prefix=",
            "redis://u:hunter2@host?prefix=a%7Bb",
            "redis://u:hunter2@host?prefix=a%20b",
            "redis://u:hunter2@host?prefix={",
            "redis://%zzhunter2@host",
            "redis://u:hunter2%@host",
            "redis://u:hunter2%4@host",
            "redis://u:hunter2@ho%GGst",
            "redis://u:hunter2@host?prefix=%zz",
            "redis://u:hunter2@host?ca_file=/hunter2",
            "redlock://:hunter2@a,b,c/0/hunter2",
            "redis://u:hunter2@host?prefix=a&prefix=b",
            "redis://u:hunter2@host?min_replicas=hunter2",
            "redis://u:hunter2@host?connect_timeout=0s",
            "redis://u:hunter2@host?connect_timeout=3",
            "redis://u:hunter2@host?connect_timeout=99999999999s",
            "redis://u:hunter2@host?protocol=4",
            "redis://u:hunter2@host?sentinel_password=hunter2",
            "redis://u:hunter2%FF@host",
            "redis://u:hunter2@[::1",
            "redis+sentinel://:hunter2@a,b",
            "redis+sentinel://:hunter2@a,b/",
            "redis+sentinel://:hunter2@a,,b/m",
            "redis+cluster://:hunter2@a/1",
            "redlock://:hunter2@a,b,c/hunter2",
            "http://:hunter2@host",
        ];
        for url in bad {
            let made = if url.starts_with("redlock") {
                Config::redlock_from_url(url).map(|_| ())
            } else {
                Config::from_url(url).map(|_| ())
            };
            let error = made.expect_err(url);
            let shown = format!("{error} {error:?}");
            assert!(!shown.contains("hunter2") && !shown.contains('\n'), "{url}: {shown}");
            assert_eq!(error.kind(), ErrorKind::Config, "{url}");
        }
    }

    #[test]
    fn a_password_is_never_printed() {
        let config = Config::from_url("redis+sentinel://ann:hunter2@h/m?sentinel_password=hunter3");
        let shown = format!("{:?} {:#?}", config.clone().unwrap(), config.unwrap());
        assert!(!shown.contains("hunter") && !shown.contains("ann"), "{shown}");
    }

    #[test]
    fn a_client_gives_its_settings() {
        let client = redis::Client::open("redis://ann:pw@host:7000/2").unwrap();
        let config = Config::from_client(&client).unwrap();
        assert_eq!(config.servers, Servers::One(address("host", 7000)));
        assert_eq!(config.client.username.as_deref(), Some("ann"));
        assert_eq!(config.client.database, 2);
    }
}
