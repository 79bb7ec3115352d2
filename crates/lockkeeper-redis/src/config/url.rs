//! URLs with lists of hosts.

use std::time::Duration;

use lockkeeper_core::Result;
use percent_encoding::percent_decode_str;

use crate::client::settings::Address;
use crate::error::config;

/// The longest timeout.
pub(super) const MAX_TIMEOUT: Duration = Duration::from_secs(3600);

/// Reads the number of a database; 0 if there is none.
pub(super) fn database_number(database: Option<&&str>) -> Result<i64> {
    let Some(number) = database.filter(|number| !number.is_empty()) else { return Ok(0) };
    let number = number.parse().ok().filter(|number| *number >= 0);
    number.ok_or_else(|| {
        config("the path after the host must be the number of a database, as in \"redis://host/0\"")
    })
}

/// The parts of a URL. `url::Url` knows no list of hosts.
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
            // Not repeated in the message: it may be the rest of a password with a "?" in it.
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
                let (host, after) = rest
                    .split_once(']')
                    .ok_or_else(|| config("a host starts with \"[\" and has no \"]\""))?;
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
        // The text is not repeated: with a "/" in a password it may be a part of that.
        let port = port.ok_or_else(|| {
            config("the port in the URL is no number from 1 to 65535 (or a password has a \"/\", \"?\" or \"@\" that is not percent-encoded)")
        })?;
        if host.is_empty() {
            return Err(config("the URL names no host, as in \"redis://127.0.0.1:6379/\""));
        }
        Ok(Address { host: decode(host)?, port })
    }

    pub(super) fn addresses(&self, default_port: u16) -> Result<Vec<Address>> {
        (0..self.hosts.len()).map(|which| self.address(which, default_port)).collect()
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

/// Decodes `%41` to `A`. The decoder itself passes on a `%` that no two hexadecimal digits follow.
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
    decoded.map(Into::into).map_err(|_| config("something percent-encoded in the URL is not UTF-8"))
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
        config(format!("{option} is a time of at most an hour, as in \"500ms\" or \"3s\""))
    })
}
