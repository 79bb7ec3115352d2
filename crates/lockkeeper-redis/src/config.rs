//! Options of a store (addresses, credentials, behaviour), and the URLs that set them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Error, ErrorKind, Result};

use crate::client::settings::{Address, Servers, Settings};
use crate::client::tls::Tls;
use crate::client::unix;
use crate::error::config;
use crate::names::KeyTemplate;

mod url;

use url::{MAX_TIMEOUT, Parts, database_number, decode, duration, time};

pub use crate::client::settings::Protocol;

/// The prefix of all keys and channels.
const DEFAULT_PREFIX: &str = "lockkeeper";

/// Configuration of a store: addresses, credentials and options.
///
/// Its `Debug` output contains neither user names nor passwords.
#[derive(Clone)]
pub struct Config {
    pub(crate) servers: Servers,
    pub(crate) client: Settings,
    /// `None` for [`DEFAULT_PREFIX`].
    prefix: Option<Arc<str>>,
    /// `None` for the template of the prefix.
    template: Option<KeyTemplate>,
    pub(crate) min_replicas: u32,
    /// How long a node of a quorum must have been up before it votes.
    pub(crate) min_uptime: Option<Duration>,
}

impl Config {
    fn new(servers: Servers) -> Self {
        let client = Settings {
            username: None,
            password: None,
            sentinel_password: None,
            database: 0,
            tls: None,
            connect_timeout: Duration::from_secs(3),
            command_timeout: Duration::from_secs(5),
            protocol: Protocol::Any,
            channel_prefix: DEFAULT_PREFIX.into(),
        };
        Self { servers, client, prefix: None, template: None, min_replicas: 0, min_uptime: None }
    }

    /// Reads a URL:
    ///
    /// - `redis://[user[:password]@]host[:port][/database]`
    /// - `rediss://…`: the same over TLS (feature `tls`)
    /// - `redis+unix://[user[:password]@]/path/of/socket[?db=database]`: a Unix socket
    /// - `redis+sentinel://[user[:password]@]host,host,…/master[/database]`
    /// - `redis+cluster://[user[:password]@]host,host,…`
    ///
    /// Options follow a `?`, joined by `&`: `prefix`, `key_template`, `min_replicas`, `connect_timeout` and
    /// `command_timeout` (as in `500ms`, `3s`), `protocol` (`resp2`, `resp3`), `tls` (`true`), `ca_file`,
    /// `sentinel_password`. Special characters are percent-encoded. A user name without a password is
    /// used as the password.
    ///
    /// # Errors
    ///
    /// [`Config`](ErrorKind::Config) if the URL is invalid. The message states what to change, and quotes no part of the URL
    /// that may be a secret.
    pub fn from_url(url: &str) -> Result<Self> {
        let parts = Parts::of(url)?;
        let servers = match parts.scheme.as_str() {
            "redis" | "rediss" => match parts.hosts.as_slice() {
                [_] => Servers::One(parts.address(0, 6379)?),
                _ => {
                    return Err(config(
                        "redis:// takes one host: for several, use redis+sentinel://, redis+cluster:// or redlock://",
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
            "redis+unix" => {
                unix::check_support()?;
                Servers::One(parts.socket()?)
            }
            "redis+cluster" | "rediss+cluster" => Servers::Cluster(parts.addresses(6379)?),
            _ => {
                return Err(config(
                    "not a Redis URL: it must start with redis://, rediss://, redis+unix://, redis+sentinel:// or redis+cluster://",
                ));
            }
        };
        let mut made = Self::new(servers);
        let (database, used) = match &made.servers {
            Servers::One(Address::Unix(_)) => (None, parts.path.len()),
            Servers::One(Address::Tcp { .. }) => (parts.path.first(), 1),
            Servers::Sentinel { .. } => (parts.path.get(1), 2),
            Servers::Cluster(_) => (None, 0),
        };
        if parts.path.iter().skip(used).any(|part| !part.is_empty()) {
            return Err(config(
                "the URL has an unexpected path: only a database number may follow the host (nothing on a cluster)",
            ));
        }
        made.client.database = database_number(database)?;
        made.apply(&parts)?;
        Ok(made)
    }

    /// Parses a `redlock://host,host,host[,…]` URL to one configuration per node. Credentials, database and options are
    /// those of [`from_url`](Self::from_url) and apply to all nodes. The option `min_uptime` sets
    /// [`Config::min_uptime`].
    ///
    /// # Errors
    ///
    /// As [`from_url`](Self::from_url).
    pub fn redlock_from_url(url: &str) -> Result<Vec<Self>> {
        let parts = Parts::of(url)?;
        if parts.scheme != "redlock" {
            return Err(config("not a Redlock URL: it must start with redlock://"));
        }
        if parts.path.iter().skip(1).any(|part| !part.is_empty()) {
            return Err(config(
                "the URL has an unexpected path: only a database number may follow the hosts",
            ));
        }
        let nodes = parts.addresses(6379)?.into_iter().map(|address| {
            let mut node = Self::new(Servers::One(address));
            node.client.database = database_number(parts.path.first())?;
            node.apply(&parts)?;
            Ok(node)
        });
        nodes.collect()
    }

    /// Copies address, credentials and database from a client of the `redis` crate. The client's certificates are not
    /// accessible and are not copied.
    ///
    /// # Errors
    ///
    /// [`Config`](ErrorKind::Config) for a Unix socket on a platform without them.
    pub fn from_client(client: &redis::Client) -> Result<Self> {
        let info = client.get_connection_info();
        let (address, tls) = match info.addr() {
            redis::ConnectionAddr::Tcp(host, port) => (Address::tcp(host, *port), false),
            redis::ConnectionAddr::TcpTls { host, port, .. } => (Address::tcp(host, *port), true),
            redis::ConnectionAddr::Unix(path) => {
                unix::check_support()?;
                (Address::Unix(path.clone()), false)
            }
            _ => return Err(config("the client's kind of address is not supported")),
        };
        let mut made = Self::new(Servers::One(address));
        let settings = info.redis_settings();
        made.client.username = settings.username().map(str::to_owned);
        made.client.password = settings.password().map(str::to_owned);
        made.client.database = settings.db();
        made.client.tls = if tls { Some(Tls::new(None)?) } else { None };
        Ok(made)
    }

    /// Sets the prefix of all keys and channels (default: `lockkeeper`).
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) if it is empty or contains whitespace, a control character or a
    /// brace (a cluster would put the keys of one lock on different nodes), or if a
    /// [`key_template`](Self::key_template) is set.
    pub fn prefix(mut self, prefix: &str) -> Result<Self> {
        let bad = |c: char| c == '{' || c == '}' || c.is_whitespace() || c.is_control();
        if prefix.is_empty() || prefix.contains(bad) {
            return Err(option(
                "the prefix must not be empty or contain braces, whitespace or control characters",
            ));
        }
        if self.template.is_some() {
            return Err(option(PREFIX_AND_TEMPLATE));
        }
        self.client.channel_prefix = prefix.into();
        self.prefix = Some(prefix.into());
        Ok(self)
    }

    /// Sets the key of the exclusive holder, in which `{name}` is the place of the lock's name (default:
    /// `lockkeeper:{{name}}`). All other text is literal, including other braces. With `lock:{name}`, the holder of the lock
    /// `orders/42` is the key `lock:orders/42`.
    ///
    /// Use it to share locks with a program that acquires by `SET lock:orders/42 value NX PX ttl`: both then use the same
    /// key, and exclude each other. The key contains the name unchanged, whereas [`prefix`](Self::prefix) encodes `%` and
    /// `}`. Two kinds of names cannot be used, and fail with [`InvalidName`](ErrorKind::InvalidName): names with `%` or `}`
    /// if the template has the name in braces, and names whose key would end in `:r`, `:q`, `:i`, `:f`, `:s` or `:highest`,
    /// as the other keys of a lock do.
    ///
    /// The other keys of the lock start with this one. The channels of the client and the keys of
    /// [`Fences`](crate::Fences) still start with `lockkeeper:`.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) if the template does not contain `{name}` exactly once and other text,
    /// contains whitespace or a control character, ends as the other keys of a lock do, has no hash tag on a cluster, or if
    /// a [`prefix`](Self::prefix) is set.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockkeeper_redis::Config;
    ///
    /// # fn main() -> lockkeeper_core::Result<()> {
    /// let config = Config::from_url("redis://127.0.0.1/")?.key_template("lock:{name}")?;
    /// // A cluster hashes what is in braces. All keys of a lock must be in one slot.
    /// let cluster = Config::from_url("redis+cluster://127.0.0.1/")?;
    /// assert!(cluster.clone().key_template("lock:{name}").is_err());
    /// let cluster = cluster.key_template("lock:{{name}}")?; // lock:{orders/42}
    /// # Ok(())
    /// # }
    /// ```
    pub fn key_template(mut self, template: &str) -> Result<Self> {
        if self.prefix.is_some() {
            return Err(option(PREFIX_AND_TEMPLATE));
        }
        let template = KeyTemplate::parse(template).map_err(option)?;
        if matches!(self.servers, Servers::Cluster(_)) && !template.has_hash_tag() {
            return Err(option(
                "on a cluster, the key template needs a hash tag, so that all keys of a lock are in one slot: put braces \
                 around the name, as in \"lock:{{name}}\"",
            ));
        }
        self.template = Some(template);
        Ok(self)
    }

    /// Returns the prefix of keys that the template does not apply to.
    pub(crate) fn key_prefix(&self) -> Arc<str> {
        self.prefix.clone().unwrap_or_else(|| DEFAULT_PREFIX.into())
    }

    pub(crate) fn template(&self) -> KeyTemplate {
        self.template.clone().unwrap_or_else(|| KeyTemplate::of_prefix(&self.key_prefix()))
    }

    /// Sets how many replicas must acknowledge a grant or a renewal (default: 0). The client releases a grant that too
    /// few replicas acknowledge within a second, and reports an error.
    ///
    /// A failover preserves all grants if this is the number of all replicas that may be promoted. With fewer, it may
    /// promote a replica that has not acknowledged a grant.
    #[must_use]
    pub fn min_replicas(mut self, replicas: u32) -> Self {
        self.min_replicas = replicas;
        self
    }

    /// Sets the timeout for connecting, between 1 ms and an hour (default: 3 s).
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.client.connect_timeout = timeout.clamp(Duration::from_millis(1), MAX_TIMEOUT);
        self
    }

    /// Sets how long a server may be silent before the client closes the connection, between 1 ms and an hour (default:
    /// 5 s). The client sends a `PING` every third of this time. A timeout below the shortest TTL leaves time to renew on
    /// another connection.
    #[must_use]
    pub fn command_timeout(mut self, timeout: Duration) -> Self {
        self.client.command_timeout = timeout.clamp(Duration::from_millis(1), MAX_TIMEOUT);
        self
    }

    /// Sets how long a node of a quorum must have been up before it votes: see
    /// [`Quorum::min_uptime`](lockkeeper_core::Quorum::min_uptime). [`redlock`](crate::redlock) uses the longest
    /// `min_uptime` of its nodes. Other topologies ignore it.
    #[must_use]
    pub fn min_uptime(mut self, min_uptime: Duration) -> Self {
        self.min_uptime = Some(min_uptime);
        self
    }

    /// Sets the protocol (default: [`Protocol::Any`]).
    #[must_use]
    pub fn protocol(mut self, protocol: Protocol) -> Self {
        self.client.protocol = protocol;
        self
    }

    fn is_unix(&self) -> bool {
        matches!(self.servers, Servers::One(Address::Unix(_)))
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
                "key_template" => {
                    let made = self.clone().key_template(&value);
                    *self = made.map_err(|error| config(error.to_string()))?;
                }
                "min_replicas" => {
                    self.min_replicas = value.parse().map_err(|_| {
                        config("min_replicas must be a number, as in \"?min_replicas=1\"")
                    })?;
                }
                "connect_timeout" => self.client.connect_timeout = duration(name, &value)?,
                "command_timeout" => self.client.command_timeout = duration(name, &value)?,
                "min_uptime" if parts.scheme == "redlock" => {
                    self.min_uptime = Some(time(&value).ok_or_else(|| {
                        config("min_uptime must be a time as in \"30s\", or \"0s\" for none")
                    })?);
                }
                "protocol" => {
                    self.client.protocol = match value.as_str() {
                        "resp2" => Protocol::Resp2,
                        "resp3" => Protocol::Any,
                        _ => return Err(config("protocol must be resp2 or resp3")),
                    };
                }
                "db" if self.is_unix() => {
                    let number = value.parse().ok().filter(|number| *number >= 0);
                    self.client.database = number.ok_or_else(|| {
                        config("db must be the number of a database, as in \"?db=2\"")
                    })?;
                }
                "tls" => match value.as_str() {
                    "true" => tls = true,
                    "false" if !tls => {}
                    _ => return Err(config("tls must be true or false, and true with rediss://")),
                },
                "ca_file" => ca_file = Some(value.into()),
                "sentinel_password" if matches!(self.servers, Servers::Sentinel { .. }) => {
                    self.client.sentinel_password = Some(value);
                }
                _ => {
                    return Err(config(format!(
                        "unknown option {name:?} in the URL: valid are prefix, key_template, \
                         min_replicas, connect_timeout, command_timeout, protocol, tls, ca_file, with sentinels \
                         also sentinel_password, with redlock:// also min_uptime, with redis+unix:// \
                         also db"
                    )));
                }
            }
        }
        if tls && self.is_unix() {
            return Err(config("a Unix socket has no TLS: remove tls from the URL"));
        }
        if ca_file.is_some() && !tls {
            return Err(config("ca_file has no effect without TLS: use rediss:// or tls=true"));
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
            .field("template", &self.template())
            .field("min_replicas", &self.min_replicas)
            .finish_non_exhaustive()
    }
}

const PREFIX_AND_TEMPLATE: &str =
    "prefix and key_template exclude each other: write the prefix into the template";

fn option(message: &str) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}

#[cfg(test)]
mod tests;
