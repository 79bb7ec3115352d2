//! The handshake of a connection: log in, check the role, subscribe, load scripts, identify the server.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join, join_all};
use lockkeeper_core::Result;
use redis::{ErrorKind, ProtocolVersion, RedisError, RedisResult, Value};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::connection::{Connection, OnMessage};
use super::events::EventHandler;
use super::identity::{Identity, Uptime};
use super::script::{Script, is_unknown_script};
use super::settings::{Address, Protocol, Settings};
use super::stream::Endpoint;
use crate::error::{ErrorClass, classify, translate, unavailable};

/// The connection on which messages from the server arrive.
pub(super) enum PushChannel {
    /// The connection for commands.
    Shared,
    /// A second connection, with RESP2.
    Second(Connection),
    /// None: the server, or a proxy in front of it, refuses subscriptions.
    None,
}

/// Opens a connection for commands with RESP2, and logs in.
pub(crate) async fn open_plain(
    settings: &Settings,
    address: &Address,
    endpoints: &[Endpoint],
) -> Result<Connection> {
    open(settings, address, endpoints, ProtocolVersion::RESP2, None, &CancellationToken::new())
        .await
}

/// Connects and logs in.
async fn open(
    settings: &Settings,
    address: &Address,
    endpoints: &[Endpoint],
    protocol: ProtocolVersion,
    on_message: Option<OnMessage>,
    gone: &CancellationToken,
) -> Result<Connection> {
    let opened = Connection::connect(settings, address, endpoints, protocol, on_message, gone);
    let connection = opened.await?;
    log_in(&connection, settings, protocol).await.map_err(translate)?;
    Ok(connection)
}

/// Connects to a server and logs in. Opens a second connection for messages if the server supports only RESP2.
pub(super) async fn connect(
    settings: &Settings,
    address: &Address,
    endpoint: &Endpoint,
    handler: &Arc<dyn EventHandler>,
) -> Result<(Connection, Option<Connection>, CancellationToken)> {
    let endpoints = std::slice::from_ref(endpoint);
    let on_message = || -> Option<OnMessage> {
        let handler = handler.clone();
        Some(Box::new(move |channel, message| handler.message(channel, message)))
    };
    if settings.protocol == Protocol::Any {
        let (protocol, gone) = (ProtocolVersion::RESP3, CancellationToken::new());
        let opened =
            Connection::connect(settings, address, endpoints, protocol, on_message(), &gone)
                .await?;
        match log_in(&opened, settings, protocol).await {
            Ok(()) => return Ok((opened, None, gone)),
            Err(error) if lacks_resp3(&error) => {}
            Err(error) => return Err(translate(error)),
        }
    }
    let (protocol, gone) = (ProtocolVersion::RESP2, CancellationToken::new());
    let commands = open(settings, address, endpoints, protocol, None, &gone).await?;
    let messages = open(settings, address, endpoints, protocol, on_message(), &gone).await?;
    Ok((commands, Some(messages), gone))
}

async fn log_in(
    connection: &Connection,
    settings: &Settings,
    protocol: ProtocolVersion,
) -> RedisResult<()> {
    let password = settings.password.as_deref();
    if protocol == ProtocolVersion::RESP3 {
        let mut hello = redis::cmd("HELLO");
        hello.arg(3);
        if let Some(password) = password {
            hello.arg("AUTH").arg(settings.username.as_deref().unwrap_or("default")).arg(password);
        }
        connection.query(&hello).await.map_err(|error| without_password(error, password))?;
    } else if let Some(password) = password {
        let mut auth = redis::cmd("AUTH");
        let replied = connection.query(auth.arg(&settings.username).arg(password)).await;
        replied.map_err(|error| without_password(login_error(error), Some(password)))?;
    }
    if settings.database != 0 {
        connection.query(redis::cmd("SELECT").arg(settings.database)).await?;
    }
    Ok(())
}

/// Unifies the replies of different server versions to a wrong password. Drops the text of a server that does not know
/// AUTH, because it quotes the command.
fn login_error(error: RedisError) -> RedisError {
    let text = error.to_string().to_ascii_lowercase();
    if text.contains("unknown command") {
        return (ErrorKind::AuthenticationFailed, "the server does not support AUTH").into();
    }
    if error.code() == Some("ERR") && text.contains("password") {
        return (ErrorKind::AuthenticationFailed, "the password was rejected").into();
    }
    error
}

/// Removes the password from the reply to a login. A proxy that rejects a command may quote it.
fn without_password(error: RedisError, password: Option<&str>) -> RedisError {
    let (Some(password), Some(detail)) = (password, error.detail()) else { return error };
    if password.is_empty() || !detail.contains(password) {
        return error;
    }
    let code = error.code().unwrap_or("ERR");
    let reply = format!("-{code} {}\r\n", detail.replace(password, "***"));
    match redis::parse_redis_value(reply.as_bytes()).map(Value::extract_error) {
        Ok(Err(error)) => error,
        _ => (ErrorKind::AuthenticationFailed, "the login was rejected").into(),
    }
}

/// Returns whether the error of `HELLO 3` means that the server, or a proxy in front of it, supports only RESP2.
fn lacks_resp3(error: &RedisError) -> bool {
    error.code() == Some("NOPROTO")
        || error.to_string().to_ascii_lowercase().contains("unknown command")
}

/// Subscribes to the session's channel.
pub(super) async fn subscribe(
    commands: &Connection,
    messages: Option<Connection>,
    channel: &str,
) -> RedisResult<PushChannel> {
    let connection = messages.as_ref().unwrap_or(commands);
    connection.query(redis::cmd("SUBSCRIBE").arg(channel)).await?;
    Ok(messages.map_or(PushChannel::Shared, PushChannel::Second))
}

/// Returns an error for a replica, which would refuse every lock, and for a server that requires a password. If the user
/// may not run ROLE, a replica is detected by the first lock instead.
pub(super) async fn refuse_replica(commands: &Connection) -> Result<()> {
    let role = match commands.query(&redis::cmd("ROLE")).await {
        Ok(role) => role,
        Err(error) if error.code() == Some("NOAUTH") => return Err(translate(error)),
        Err(_) => return Ok(()),
    };
    let word = role.as_sequence().and_then(<[Value]>::first);
    let is_replica =
        matches!(word, Some(Value::BulkString(word)) if word == b"slave" || word == b"replica");
    if is_replica {
        return Err(unavailable(
            "the server is a read-only replica: use the address of the master, or \
             redis+sentinel://",
        ));
    }
    Ok(())
}

/// Loads scripts, and checks that the user may run them: a lock is taken without a script, but cannot be released without
/// one. Where SCRIPT LOAD is refused, EVAL may be allowed.
pub(super) async fn load(commands: &Connection, scripts: Vec<&'static Script>) -> Result<()> {
    let load = async |script: &'static Script| {
        commands.query(redis::cmd("SCRIPT").arg("LOAD").arg(script.code)).await
    };
    for loaded in join_all(scripts.iter().copied().map(load)).await {
        if let Err(error) = loaded
            && classify(&error) == ErrorClass::Broken
        {
            return Err(translate(error));
        }
    }
    let Some(script) = scripts.first() else { return Ok(()) };
    // Without keys it does nothing.
    let mut run = redis::cmd("EVALSHA");
    let ran = match commands.query(run.arg(&script.hash).arg(0)).await {
        Err(error) if is_unknown_script(&error) => {
            commands.query(redis::cmd("EVAL").arg(script.code).arg(0)).await
        }
        ran => ran,
    };
    ran.map(drop).map_err(translate)
}

/// Queries the run id of the server, the id of this client on it, and its uptime.
pub(super) async fn identify(
    commands: &Connection,
    address: &Address,
) -> (Identity, Option<Uptime>) {
    let (mut client, mut info) = (redis::cmd("CLIENT"), redis::cmd("INFO"));
    let (client, info) =
        join(commands.query(client.arg("ID")), commands.query(info.arg("server"))).await;
    let client = match client {
        Ok(Value::Int(client)) => Some(client),
        _ => None,
    };
    let info = info.ok().and_then(|info| redis::from_redis_value::<String>(info).ok());
    let field = |name: &str| {
        let line = info.as_deref()?.lines().find_map(|line| line.strip_prefix(name));
        line.map(str::trim)
    };
    let run = field("run_id:").map(str::to_owned);
    // The server subtracts the second of its start from the current second. So it may report 1 just after its start: up
    // to one second more than it has been up.
    let seconds = field("uptime_in_seconds:").and_then(|seconds| seconds.parse::<u64>().ok());
    let at = Instant::now();
    let uptime = seconds.map(|seconds| {
        let reported = Duration::from_secs(seconds.saturating_sub(1));
        Uptime { reported, at }
    });
    (Identity { address: address.clone(), run, client }, uptime)
}
