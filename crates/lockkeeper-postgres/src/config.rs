//! Settings of a store, parsed from a URL.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use lockkeeper_core::Result;
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};

use crate::error::config;

/// The default limit of connections.
const DEFAULT_MAX_CONNECTIONS: usize = 16;
/// The default table of names.
const DEFAULT_NAMES_TABLE: &str = "lockkeeper_names";
/// The default sequence of fences.
const DEFAULT_FENCE_SEQUENCE: &str = "lockkeeper_fence";
/// The default timeout for connecting, including the handshake.
const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The settings of a store.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) driver: Config,
    pub(crate) options: Options,
    /// A file with the root certificates to trust.
    pub(crate) root: Option<PathBuf>,
}

/// The settings of the store, as opposed to those of the driver.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) fences: FenceSource,
    /// The sequence of [`FenceSource::Sequence`].
    pub(crate) fence_sequence: ObjectName,
    /// Whether a name such as `pg:42` is the advisory key 42. If not, such names are refused.
    pub(crate) foreign_keys: bool,
    /// The table of names, unless it is off.
    pub(crate) names_table: Option<ObjectName>,
    pub(crate) max_connections: usize,
    pub(crate) connect_timeout: Duration,
    /// The application name in the URL. It takes precedence over labels.
    pub(crate) application_name: Option<String>,
}

/// Where fences come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FenceSource {
    /// Claims have no fences.
    Off,
    /// The id of the transaction that locks the key.
    TransactionIds,
    /// A sequence.
    Sequence,
}

/// The name of a sequence or a table, with its schema. Its characters need no escaping in a quoted identifier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ObjectName {
    pub(crate) schema: String,
    pub(crate) name: String,
}

impl ObjectName {
    /// Parses `name` or `schema.name`, the value of `option`. The case of letters matters.
    pub(crate) fn parse(option: &str, text: &str) -> Result<Self> {
        // Longer identifiers are truncated by the server.
        const MAX_LEN: usize = 63;
        let is_plain = |part: &str| {
            (1..=MAX_LEN).contains(&part.len())
                && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_$-".contains(&byte))
        };
        let (schema, name) = text.split_once('.').unwrap_or(("public", text));
        if !is_plain(schema) || !is_plain(name) {
            return Err(config(format!(
                "{option} must be a name or schema.name, each of at most 63 letters, digits and _ $ - in ASCII"
            )));
        }
        Ok(Self { schema: schema.to_owned(), name: name.to_owned() })
    }
}

impl ObjectName {
    fn in_public(name: &str) -> Self {
        Self { schema: "public".to_owned(), name: name.to_owned() }
    }
}

/// Writes the name as a quoted identifier.
impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\".\"{}\"", self.schema, self.name)
    }
}

impl Options {
    pub(crate) fn of(driver: &Config) -> Self {
        Self {
            fences: FenceSource::Sequence,
            fence_sequence: ObjectName::in_public(DEFAULT_FENCE_SEQUENCE),
            foreign_keys: false,
            names_table: Some(ObjectName::in_public(DEFAULT_NAMES_TABLE)),
            max_connections: DEFAULT_MAX_CONNECTIONS,
            connect_timeout: driver
                .get_connect_timeout()
                .copied()
                .unwrap_or(DEFAULT_CONNECT_TIMEOUT),
            application_name: driver.get_application_name().map(str::to_owned),
        }
    }
}

impl Settings {
    pub(crate) fn parse(url: &str) -> Result<Self> {
        let (scheme, rest) = url.split_once("://").unwrap_or_default();
        if !["postgres", "postgresql"].contains(&scheme.to_ascii_lowercase().as_str()) {
            return Err(config(
                "not a PostgreSQL URL: expected postgres://user:password@host/database",
            ));
        }
        // A password may contain a question mark: the parameters start after the first @, if there is one.
        let host = rest.find('@').unwrap_or(0);
        let end = rest[host..].find('?').map_or(rest.len(), |at| host + at);
        let (place, parameters) = rest.split_at(end);
        let parameters = parameters.strip_prefix('?').unwrap_or_default();
        let mut driver_url = format!("postgres://{place}?");
        let mut own = Vec::new();
        for parameter in parameters.split('&').filter(|parameter| !parameter.is_empty()) {
            match parameter.split_once('=') {
                Some((
                    name @ ("fence" | "fence_sequence" | "foreign_keys" | "names_table"
                    | "max_connections" | "sslrootcert"),
                    value,
                )) => own.push((name, value)),
                // Certificates are always verified.
                Some(("sslmode", "verify-full" | "verify-ca")) => {
                    driver_url.push_str("sslmode=require&");
                }
                _ => driver_url.extend([parameter, "&"]),
            }
        }
        let driver = driver_url.parse().map_err(|error| bad_url(&error))?;
        let mut settings = Self::new(driver)?;
        for (name, value) in own {
            settings.set(name, value)?;
        }
        Ok(settings)
    }

    pub(crate) fn new(mut driver: Config) -> Result<Self> {
        let nameless = |host: &Host| matches!(host, Host::Tcp(name) if name.is_empty());
        let no_hosts = driver.get_hosts().is_empty() && driver.get_hostaddrs().is_empty();
        if no_hosts || driver.get_hosts().iter().any(nameless) {
            return Err(config(
                "the URL names no host: expected postgres://user@host/database, or \
                 postgres://user@%2Frun%2Fpostgresql/database for a socket",
            ));
        }
        let options = Options::of(&driver);
        if driver.get_hosts().len() > 1
            && driver.get_target_session_attrs() == TargetSessionAttrs::Any
        {
            // Only the primary can grant locks.
            driver.target_session_attrs(TargetSessionAttrs::ReadWrite);
        }
        if !driver.get_hosts().is_empty() && driver.get_hosts().iter().all(is_socket) {
            // A socket needs no encryption, and has no host name to verify.
            driver.ssl_mode(SslMode::Disable);
        }
        driver.connect_timeout(options.connect_timeout);
        Ok(Self { driver, options, root: None })
    }

    /// Returns whether an attacker between client and server can turn TLS off.
    pub(crate) fn can_be_downgraded(&self) -> bool {
        let local = |host: &Host| match host {
            Host::Tcp(name) => {
                let address = name.parse::<IpAddr>();
                name == "localhost" || address.is_ok_and(|address| address.is_loopback())
            }
            #[cfg(unix)]
            Host::Unix(_) => true,
        };
        let is_local = self.driver.get_hosts().iter().all(local)
            && self.driver.get_hostaddrs().iter().all(IpAddr::is_loopback);
        self.driver.get_ssl_mode() == SslMode::Prefer && !is_local
    }

    fn set(&mut self, name: &str, value: &str) -> Result<()> {
        match (name, value) {
            ("fence", "sequence") => self.options.fences = FenceSource::Sequence,
            ("fence", "xid") => self.options.fences = FenceSource::TransactionIds,
            ("fence", "off") => self.options.fences = FenceSource::Off,
            ("fence", _) => return Err(config("fence must be sequence, xid or off")),
            ("fence_sequence", name) => {
                self.options.fence_sequence = ObjectName::parse("fence_sequence", name)?;
            }
            ("foreign_keys", "on") => self.options.foreign_keys = true,
            ("foreign_keys", "off") => self.options.foreign_keys = false,
            ("foreign_keys", _) => return Err(config("foreign_keys must be on or off")),
            ("names_table", "off") => self.options.names_table = None,
            ("names_table", table) => {
                self.options.names_table = Some(ObjectName::parse(name, table)?);
            }
            ("max_connections", number) => {
                let number = number.parse().ok().filter(|number| *number >= 1);
                self.options.max_connections = number
                    .ok_or_else(|| config("max_connections must be a number of at least 1"))?;
            }
            _ => self.root = Some(PathBuf::from(value)),
        }
        Ok(())
    }
}

/// Returns the hosts and ports of a configuration, for errors: `a:5432,b:5433`, or the directory of a socket.
pub(crate) fn address(driver: &Config) -> String {
    const DEFAULT_PORT: u16 = 5432;
    let hosts: Vec<String> = if driver.get_hosts().is_empty() {
        driver.get_hostaddrs().iter().map(ToString::to_string).collect()
    } else {
        driver.get_hosts().iter().map(host_name).collect()
    };
    let ports = driver.get_ports();
    let addresses = hosts.iter().enumerate().map(|(place, host)| {
        // A single port applies to all hosts.
        let port = ports.get(place).or(ports.first()).copied().unwrap_or(DEFAULT_PORT);
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    });
    addresses.collect::<Vec<_>>().join(",")
}

fn host_name(host: &Host) -> String {
    match host {
        Host::Tcp(name) => name.clone(),
        #[cfg(unix)]
        Host::Unix(directory) => directory.display().to_string(),
    }
}

#[cfg(unix)]
fn is_socket(host: &Host) -> bool {
    matches!(host, Host::Unix(_))
}

#[cfg(not(unix))]
fn is_socket(_: &Host) -> bool {
    false
}

/// Describes a malformed URL without quoting any part of it, because that may be a password.
fn bad_url(error: &tokio_postgres::Error) -> lockkeeper_core::Error {
    let cause = std::error::Error::source(error).map(ToString::to_string).unwrap_or_default();
    let message = if cause.starts_with("invalid value") {
        format!("not a PostgreSQL URL: {cause}")
    } else {
        "not a PostgreSQL URL: a parameter is unknown, or a character must be percent-encoded; see \
         docs/backends/postgres.md for the parameters"
            .to_owned()
    };
    config(message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockkeeper_core::ErrorKind;

    #[test]
    fn a_url_has_parameters_of_the_driver_and_of_the_store() {
        let url = "PostgreSQL://me:pw@db:5433/app?fence=off&connect_timeout=3&max_connections=2\
                   &sslmode=verify-full&application_name=x&sslrootcert=/ca.pem";
        let settings = Settings::parse(url).unwrap();
        assert_eq!(settings.driver.get_dbname(), Some("app"));
        assert_eq!(settings.driver.get_ports(), [5433]);
        assert_eq!(settings.driver.get_ssl_mode(), tokio_postgres::config::SslMode::Require);
        assert_eq!(settings.root, Some(PathBuf::from("/ca.pem")));
        let options = settings.options;
        assert_eq!(options.fences, FenceSource::Off);
        assert!(!options.foreign_keys);
        assert_eq!(options.max_connections, 2);
        assert_eq!(options.connect_timeout, Duration::from_secs(3));
        assert_eq!(options.application_name.as_deref(), Some("x"));
        assert_eq!(options.names_table.unwrap().to_string(), "\"public\".\"lockkeeper_names\"");
        let options = Settings::parse("postgres://a/app?names_table=Ops.n$1").unwrap().options;
        assert_eq!(options.names_table.unwrap().to_string(), "\"Ops\".\"n$1\"");
        let off = Settings::parse("postgres://a/app?names_table=off").unwrap().options;
        assert_eq!(off.names_table, None);
        let settings = Settings::parse("postgres://a,b/app").unwrap();
        assert_eq!(settings.driver.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
    }

    #[test]
    fn a_sequence_is_a_name_that_may_have_a_schema() {
        let settings = Settings::parse("postgres://h/d?fence_sequence=Locks.my-fence").unwrap();
        assert_eq!(settings.options.fences, FenceSource::Sequence);
        assert_eq!(settings.options.fence_sequence.to_string(), "\"Locks\".\"my-fence\"");
        let name = ObjectName::parse("fence_sequence", "f").unwrap();
        assert_eq!(name.to_string(), "\"public\".\"f\"");
        let long = "a".repeat(64);
        for name in ["", ".", "a.", ".a", "a.b.c", "a\"b", "a b", "a'", "a;", "ä", &long] {
            assert!(ObjectName::parse("fence_sequence", name).is_err(), "{name}");
        }
    }

    #[test]
    fn tls_that_is_only_preferred_can_be_downgraded() {
        for url in
            ["postgres://u@db/x", "postgres://u@db/x?sslmode=prefer", "postgres://u@127.0.0.1,db/x"]
        {
            assert!(Settings::parse(url).unwrap().can_be_downgraded(), "{url}");
        }
        for url in [
            "postgres://u@db/x?sslmode=require",
            "postgres://u@db/x?sslmode=verify-full",
            "postgres://u@db/x?sslmode=disable",
            "postgres://u@localhost,127.0.0.1,[::1]/x",
            "postgres://u@%2Frun%2Fpostgresql/x",
        ] {
            assert!(!Settings::parse(url).unwrap().can_be_downgraded(), "{url}");
        }
    }

    #[test]
    fn the_host_of_a_url_can_be_written_in_several_ways() {
        for url in [
            "postgres://h",
            "postgres://u@h:1/db",
            "postgres:///db?host=h",
            "postgres:///db?hostaddr=192.0.2.1",
            "postgres://u@%2Frun%2Fpostgresql/db",
        ] {
            assert!(Settings::parse(url).is_ok(), "{url}");
        }
    }

    #[test]
    fn an_address_names_every_host_with_its_port() {
        for (url, expected) in [
            ("postgres://u:hunter2@db/x", "db:5432"),
            ("postgres://u@a:1,b:2/x", "a:1,b:2"),
            ("postgres://u@[::1]:5/x", "[::1]:5"),
            ("postgres:///x?hostaddr=192.0.2.1", "192.0.2.1:5432"),
            ("postgres://u@%2Frun%2Fpostgresql/x", "/run/postgresql:5432"),
        ] {
            assert_eq!(address(&Settings::parse(url).unwrap().driver), expected, "{url}");
        }
        assert_eq!(address(Config::new().host("a").host("b").port(7)), "a:7,b:7");
    }

    #[test]
    fn a_bad_url_is_refused_without_quoting_it() {
        let urls = [
            "postgres:hunter2",
            "postgres://",
            "postgres:///db",
            "postgres://u:hunter2@",
            "postgres://u:hunter2@/db",
            "postgres://u:hunter2@/db?connect_timeout=3",
            "postgres://u:hunter2@a,,b/db",
            "redis://u:hunter2@h/",
            "postgres://u:hunter2@h/?nosuch=hunter2",
            "postgres://u:hunter2@h/?hunter2",
            "postgres://u:hunter2@h:hunter2/",
            "postgres://u:hunter2@h/?fence=hunter2",
            "postgres://u:hunter2@h/?fence_sequence=hunter2.hunter2.hunter2",
            "postgres://u:hunter2@h/?foreign_keys=hunter2",
            "postgres://u:hunter2@h/?max_connections=0",
            "postgres://u:hunter2@h/?names_table=a.hunter2.c",
            "postgres://u:hunter2@h/?names_table=hunter2\";",
            "postgres://u:hunter2@h/?names_table=",
            "postgres://u:hunter2@h/?sslmode=hunter2",
            "postgres://u:hunter2@h/%ff",
        ];
        for url in urls {
            let Err(error) = Settings::parse(url) else { panic!("{url} was accepted") };
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
        }
    }
}
