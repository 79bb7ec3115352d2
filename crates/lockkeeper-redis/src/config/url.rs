//! Parser for URLs with lists of hosts, which the `url` crate does not support.

use std::time::Duration;

use lockkeeper_core::Result;
use percent_encoding::percent_decode_str;

use crate::client::settings::Address;
use crate::error::config;

/// The longest timeout.
pub(super) const MAX_TIMEOUT: Duration = Duration::from_secs(3600);

/// Parses the number of a database. Returns 0 if the URL has none.
pub(super) fn database_number(database: Option<&&str>) -> Result<i64> {
    let Some(number) = database.filter(|number| !number.is_empty()) else { return Ok(0) };
    let number = number.parse().ok().filter(|number| *number >= 0);
    number.ok_or_else(|| {
        config("the path after the host must be the number of a database, as in \"redis://host/0\"")
    })
}

/// The parts of a URL, still percent-encoded.
pub(super) struct Parts<'a> {
    pub(super) scheme: String,
    pub(super) credentials: Option<&'a str>,
    pub(super) hosts: Vec<&'a str>,
    pub(super) path: Vec<&'a str>,
    pub(super) options: Vec<(&'a str, &'a str)>,
}

impl<'a> Parts<'a> {
    pub(super) fn of(url: &'a str) -> Result<Self> {
        let (scheme, rest) = url
            .split_once("://")
            .ok_or_else(|| config("a Redis URL has \"://\" after its scheme"))?;
        if rest.contains('#') {
            return Err(config("a Redis URL has no \"#\": write %23 if it is part of a password"));
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (credentials, hosts) = match authority.rsplit_once('@') {
            Some((credentials, hosts)) => (Some(credentials), hosts),
            None => (None, authority),
        };
        let options = query.split('&').filter(|option| !option.is_empty());
        let options = options.map(|option| {
            // The message does not quote the text: it may be the rest of a password that contains a "?".
            option.split_once('=').ok_or_else(|| config("an option in the URL has no value: write \"?name=value\", and %3F for a \"?\" in a password"))
        });
        Ok(Self {
            scheme: scheme.to_ascii_lowercase(),
            credentials,
            hosts: hosts.split(',').collect(),
            path: path.split('/').collect(),
            options: options.collect::<Result<_>>()?,
        })
    }

    pub(super) fn address(&self, which: usize, default_port: u16) -> Result<Address> {
        let text = self.hosts[which];
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, after) = rest.split_once(']').ok_or_else(|| {
                    config("a host in the URL starts with \"[\" and lacks the \"]\"")
                })?;
                (host, after.strip_prefix(':').or(after.is_empty().then_some("")))
            }
            None => match text.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, Some("")),
            },
        };
        let port = match port {
            Some("") if !text.ends_with(':') => Some(default_port),
            Some(port) => port.parse().ok().filter(|port| *port != 0),
            None => None,
        };
        // The message does not quote the text: it may be part of a password that contains a "/".
        let port = port.ok_or_else(|| {
            config("the port in the URL is not a number from 1 to 65535 (or a password has a \"/\", \"?\" or \"@\" that is not percent-encoded)")
        })?;
        if host.is_empty() {
            return Err(config("the URL has no host: write it as in \"redis://127.0.0.1:6379/\""));
        }
        Ok(Address::tcp(decode(host)?, port))
    }

    pub(super) fn addresses(&self, default_port: u16) -> Result<Vec<Address>> {
        (0..self.hosts.len()).map(|which| self.address(which, default_port)).collect()
    }

    /// Returns the path of a Unix socket. The URL has no host.
    pub(super) fn socket(&self) -> Result<Address> {
        // The message does not quote the host: it may be part of a password that contains a "/".
        if self.hosts != [""] {
            return Err(config(
                "redis+unix:// takes a path and no host: write three slashes, as in \"redis+unix:///run/redis.sock\" \
                 (and %2F for a \"/\" in a password)",
            ));
        }
        let path = format!("/{}", decode(&self.path.join("/"))?);
        if path.ends_with('/') || path.contains('\0') {
            return Err(config(
                "redis+unix:// needs the path of a socket, as in \"redis+unix:///run/redis.sock\"",
            ));
        }
        Ok(Address::Unix(path.into()))
    }

    pub(super) fn credentials(&self) -> Result<(Option<String>, Option<String>)> {
        let Some(credentials) = self.credentials.filter(|text| !text.is_empty()) else {
            return Ok((None, None));
        };
        Ok(match credentials.split_once(':') {
            Some(("", password)) => (None, Some(decode(password)?)),
            Some((user, password)) => (Some(decode(user)?), Some(decode(password)?)),
            None => (None, Some(decode(credentials)?)),
        })
    }
}

/// Decodes `%41` to `A`. Rejects a `%` without two hexadecimal digits, which the decoder would keep.
pub(super) fn decode(text: &str) -> Result<String> {
    let is_encoded = |after: &str| {
        after
            .as_bytes()
            .first_chunk::<2>()
            .is_some_and(|code| code.iter().all(u8::is_ascii_hexdigit))
    };
    if !text.split('%').skip(1).all(is_encoded) {
        return Err(config(
            "a \"%\" in the URL is not followed by two hexadecimal digits: write %25 for a \"%\"",
        ));
    }
    let decoded = percent_decode_str(text).decode_utf8();
    decoded
        .map(Into::into)
        .map_err(|_| config("the URL has a percent-encoded part that is not UTF-8"))
}

pub(super) fn time(text: &str) -> Option<Duration> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let number = digits.parse::<u32>().ok().map(u64::from)?;
    match &text[digits.len()..] {
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        _ => None,
    }
}

pub(super) fn duration(option: &str, text: &str) -> Result<Duration> {
    time(text).filter(|duration| !duration.is_zero() && *duration <= MAX_TIMEOUT).ok_or_else(|| {
        config(format!(
            "{option} must be above zero and at most an hour, as in \"500ms\" or \"3s\""
        ))
    })
}
