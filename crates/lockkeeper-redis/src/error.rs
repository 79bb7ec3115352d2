//! Translation of errors of the redis crate and of servers.

use std::fmt::Write as _;

use lockkeeper_core::{Error, ErrorKind, Fence};
use redis::{ErrorKind as RedisKind, RedisError, ServerErrorKind};

/// The consequence of an error for its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ErrorClass {
    /// The connection cannot be used any more.
    Broken,
    /// The server refused this command; the next may succeed.
    Refused,
}

pub(crate) fn classify(error: &RedisError) -> ErrorClass {
    let broken = match error.kind() {
        // The server was demoted: ReadOnly and MasterDown are replies of a replica.
        RedisKind::Io
        | RedisKind::Parse
        | RedisKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown) => true,
        _ => error.is_unrecoverable_error() || error.is_connection_dropped(),
    };
    if broken { ErrorClass::Broken } else { ErrorClass::Refused }
}

/// Extracts the error of a command inside a script. Servers before 7.0 wrap it:
/// `ERR Error running script (call to f_…): @user_script:17: WRONGTYPE …`, or `@user_script: 205: -READONLY …` if
/// the script catches it.
pub(crate) fn unwrapped(error: RedisError) -> RedisError {
    let text = [error.code(), error.detail()].map(Option::unwrap_or_default).join(" ");
    let inner = text.split_once("@user_script:").and_then(|(_, rest)| rest.split_once(": "));
    let Some((line, inner)) = inner else { return error };
    if line.trim().parse::<u32>().is_err() {
        return error;
    }
    let inner = inner.strip_prefix('-').unwrap_or(inner);
    let code = inner.split(' ').next().unwrap_or_default();
    let has_code = !code.is_empty() && code.bytes().all(|byte| byte.is_ascii_uppercase());
    let reply = format!("-{}{inner}\r\n", if has_code { "" } else { "ERR " });
    match redis::parse_redis_value(reply.as_bytes()).map(redis::Value::extract_error) {
        Ok(Err(inner)) => inner,
        _ => error,
    }
}

/// Translates an error to one line. It states what to do, if the user can do something.
pub(crate) fn translate(error: RedisError) -> Error {
    let code = error.code().unwrap_or_default();
    let detail = || one_line(&error);
    let (kind, message) = match (error.kind(), code) {
        (_, "WRONGPASS") | (RedisKind::AuthenticationFailed, _) => (
            ErrorKind::Config,
            "the server rejects the user name or the password: check them in the URL".to_owned(),
        ),
        (_, "NOAUTH") => (
            ErrorKind::Config,
            "the server requires a password: add it to the URL, as in \"redis://:password@host/\""
                .to_owned(),
        ),
        (RedisKind::Server(ServerErrorKind::NoPerm), _) | (_, "NOPERM") => (
            ErrorKind::Config,
            format!("the user lacks a permission that locks need: {}", detail()),
        ),
        // The wording of Redis up to 7.0, and from 7.2.
        _ if detail().contains("user executing the script can't")
            || detail().contains("ACL failure in script") =>
        {
            (
                ErrorKind::Config,
                format!("the user lacks a permission that locks need: {}", detail()),
            )
        }
        (_, "OOM") => (
            ErrorKind::Unavailable,
            "the server is out of memory (maxmemory reached, nothing to evict): raise maxmemory, \
             or use a separate server for locks"
                .to_owned(),
        ),
        (RedisKind::Server(ServerErrorKind::ReadOnly), _) => (
            ErrorKind::Unavailable,
            "the server is a read-only replica: use the address of the master, or \
             redis+sentinel://"
                .to_owned(),
        ),
        (_, "FENCEAHEAD" | "FENCEEND") => return fence(code, &error).with_source(error),
        (_, "WRONGTYPE") => (
            ErrorKind::Config,
            "a key of this lock is used by another program (wrong type): choose another prefix or key template"
                .to_owned(),
        ),
        _ if detail().contains("DB index is out of range") => (
            ErrorKind::Config,
            "the server has no database with that number: check the number in the URL"
                .to_owned(),
        ),
        _ if error.is_timeout() => (ErrorKind::Unavailable, "no answer in time".to_owned()),
        _ => (ErrorKind::Unavailable, detail()),
    };
    Error::new(kind, message).with_source(error)
}

/// Translates the error of a script that refuses a floor or cannot grant a higher fence.
fn fence(code: &str, error: &RedisError) -> Error {
    let detail = error.detail().unwrap_or_default();
    let mut numbers = detail.split(' ').map_while(|word| word.parse().ok());
    let fence = numbers.next().and_then(Fence::new).unwrap_or(Fence::MAX);
    match (code, numbers.next()) {
        ("FENCEAHEAD", Some(clock)) => fence.refused(clock),
        _ => fence.exhausted(),
    }
}

/// Returns the first line of an error. Further lines may quote the script.
fn one_line(error: &RedisError) -> String {
    let text = error.to_string();
    let text = text.split(['\n', '\r']).next().unwrap_or_default();
    let mut text: String = text.chars().take(300).collect();
    if text.is_empty() {
        text.push_str("the connection failed");
    }
    text
}

/// Translates an error of the operating system.
pub(crate) fn io(error: std::io::Error) -> Error {
    translate(error.into())
}

/// Adds the address of the server that an error is about.
pub(crate) fn at(address: &impl std::fmt::Display, error: &Error) -> Error {
    Error::new(error.kind(), format!("{address}: {error}")).with_source(error.clone())
}

/// Returns the error for a reply that no version of the script sends. Quotes its start: it may be as long as a reply may be.
pub(crate) fn unexpected(reply: &redis::Value) -> Error {
    let mut text = Start("unexpected reply: ".to_owned());
    // It is an error if there was more.
    let more = if write!(text, "{reply:?}").is_err() { "…" } else { "" };
    unavailable(text.0 + more)
}

/// The start of a text. Refuses to be longer than [`MAX_QUOTED`](Self::MAX_QUOTED).
struct Start(String);

impl Start {
    const MAX_QUOTED: usize = 300;
}

impl std::fmt::Write for Start {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        for letter in text.chars() {
            if self.0.len() >= Self::MAX_QUOTED {
                return Err(std::fmt::Error);
            }
            self.0.push(letter);
        }
        Ok(())
    }
}

pub(crate) fn unavailable(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unavailable, message)
}

pub(crate) fn config(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, message)
}

#[cfg(test)]
mod tests {
    use redis::Value;

    use super::*;

    #[test]
    fn an_unexpected_reply_is_quoted_up_to_a_limit() {
        assert_eq!(unexpected(&Value::Int(7)).to_string(), "unexpected reply: int(7)");
        for byte in [b'x', 0xff] {
            let reply = Value::Array(vec![Value::BulkString(vec![byte; 1 << 20]); 10]);
            let text = unexpected(&reply).to_string();
            assert!(text.len() < 310 && text.ends_with('…'), "{text}");
        }
    }

    fn reply(text: &str) -> RedisError {
        let value = redis::parse_redis_value(format!("-{text}\r\n").as_bytes()).unwrap();
        value.extract_error().unwrap_err()
    }

    /// In the wording of Redis 6.2.14.
    #[test]
    fn an_error_in_a_script_becomes_the_error_of_its_command() {
        let wrong = "WRONGTYPE Operation against a key holding the wrong kind of value";
        let read_only = "READONLY You can't write against a read only replica.";
        let call =
            "ERR Error running script (call to f_b7a9ed689266db78b464659a20466a7f779beceb): ";
        let no_such = "ERR Unknown Redis command called from Lua script";
        for (wrapped, inner) in [
            (format!("{call}@user_script:17: {wrong}"), wrong),
            (format!("@user_script: 205: -{read_only}"), read_only),
            (
                format!("{call}@user_script: 17: Unknown Redis command called from Lua script"),
                no_such,
            ),
        ] {
            assert_eq!(unwrapped(reply(&wrapped)), reply(inner), "{wrapped}");
        }
        assert_eq!(
            classify(&unwrapped(reply(&format!("@user_script: 1: -{read_only}")))),
            ErrorClass::Broken
        );
        // Newer servers append the script's position. A text that only mentions a script is unchanged.
        for same in
            [&format!("{wrong} script: b7a9, on @user_script:17."), "ERR @user_script: none", wrong]
        {
            assert_eq!(unwrapped(reply(same)), reply(same));
        }
    }
}
