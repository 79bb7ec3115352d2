//! One connection to one server, from the first word to the last.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt as _;
use lockkeeper_core::{Error, Result};
use redis::aio::{MultiplexedConnection, PubSubSink};
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, IntoConnectionInfo as _, ProtocolVersion,
    PushInfo, PushKind, RedisConnectionInfo, RedisError, RedisResult, ServerErrorKind, Value,
};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::config::{Address, Config, Protocol};
use crate::error::{Verdict, translate, unavailable, verdict};
use crate::mailbox::Mailboxes;
use crate::renewals::millis;
use crate::scripts::{self, Script};

/// How long replicas have to acknowledge. The connection waits for nothing else in the meantime.
const REPLICAS_WITHIN: Duration = Duration::from_secs(1);

/// A connection that answers, until it is [`gone`](Self::gone).
pub(crate) struct Connection {
    requests: MultiplexedConnection,
    ears: Ears,
    /// Where the server tells this process what it is to know: new for each connection, so that nobody
    /// listens there any more when this one is gone.
    channel: String,
    identity: Identity,
    gone: CancellationToken,
    /// What reads and writes it.
    runtime: Handle,
    /// How many have asked for what they wrote to be replicated.
    written: AtomicU64,
    /// The last answer about that, and up to which of them it is for.
    replication: tokio::sync::Mutex<Option<(u64, Result<()>)>>,
}

/// Where what the server tells comes in.
enum Ears {
    /// On the connection itself.
    Same,
    /// With RESP2: on a second one.
    Second(PubSubSink),
    /// Nowhere: what is between us and the server lets no messages through.
    None,
}

/// Which connection to which server this is, to be able to end it from another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    address: Address,
    /// Changes when the server is started again.
    run: Option<String>,
    client: Option<i64>,
}

impl Identity {
    /// Which run of the server it is.
    pub(crate) fn run(&self) -> Option<&str> {
        self.run.as_deref()
    }

    pub(crate) fn address(&self) -> &Address {
        &self.address
    }
}

impl Connection {
    /// Connects. `before` is a connection that was given up: it is ended on the server first, so that
    /// nothing that was sent on it and not yet read can take effect after what is sent on this one.
    pub(crate) async fn open(
        config: &Config,
        address: &Address,
        before: Option<&Identity>,
        mailboxes: &Arc<Mailboxes>,
    ) -> Result<Self> {
        let opened = Self::shake_hands(config, address, before, mailboxes);
        let within = config.connect_timeout;
        let opened = tokio::time::timeout(within, opened).await;
        opened
            .unwrap_or_else(|_| Err(unavailable(format!("no answer within {within:?}"))))
            .map_err(|error| at(address, &error))
    }

    async fn shake_hands(
        config: &Config,
        address: &Address,
        before: Option<&Identity>,
        mailboxes: &Arc<Mailboxes>,
    ) -> Result<Self> {
        let gone = CancellationToken::new();
        // If it comes to nothing, the task that reads the second connection is to end.
        let undo = gone.clone().drop_guard();
        let (mut requests, ears) = connect(config, address, mailboxes, &gone).await?;
        let channel = format!("{}:wake:{:016x}", config.prefix, fastrand::u64(..));
        let ears = match subscribe(&mut requests, ears, &channel).await {
            Ok(ears) => ears,
            Err(error) if verdict(&error) == Verdict::Broken => return Err(translate(error)),
            Err(error) => {
                tracing::warn!(%address, %error, "no messages from this server: waiters will poll");
                Ears::None
            }
        };
        let mut setup = redis::pipe();
        for script in scripts::all() {
            setup.cmd("SCRIPT").arg("LOAD").arg(script.code);
        }
        // Where that is refused, EVAL may not be.
        let loaded = requests.send_packed_commands(&setup, 0, scripts::all().len()).await;
        if let Err(error) = loaded
            && verdict(&error) == Verdict::Broken
        {
            return Err(translate(error));
        }
        refuse_replica(&mut requests).await?;
        let identity = identify(&mut requests, address).await;
        if let Some(before) = before
            && let Some(client) = before.client
            && before.address == identity.address
            && before.run.is_some()
            && before.run == identity.run
        {
            let mut end = redis::cmd("CLIENT");
            let ended = requests.send_packed_command(end.arg("KILL").arg("ID").arg(client)).await;
            if let Err(error) = ended {
                return Err(translate(error));
            }
            // Refused or not there any more: there is nothing further that could be done.
        }
        undo.disarm();
        let (written, replication) = (AtomicU64::new(0), tokio::sync::Mutex::default());
        let runtime = Handle::current();
        Ok(Self { requests, ears, channel, identity, gone, runtime, written, replication })
    }

    /// The channel for a waiter's record; `-` if nobody could hear it.
    pub(crate) fn channel(&self) -> &str {
        match self.ears {
            Ears::None => "-",
            Ears::Same | Ears::Second(_) => &self.channel,
        }
    }

    pub(crate) fn hears(&self) -> bool {
        !matches!(self.ears, Ears::None)
    }

    /// Whether messages come on a connection of their own.
    pub(crate) fn has_second(&self) -> bool {
        matches!(self.ears, Ears::Second(_))
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The runtime that it lives in.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Cancelled when the connection is of no use any more.
    pub(crate) fn gone(&self) -> &CancellationToken {
        &self.gone
    }

    /// Sends a command and awaits its answer. A connection that turns out to be broken is gone after it.
    pub(crate) async fn send(&self, command: &Cmd) -> RedisResult<Value> {
        let mut requests = self.requests.clone();
        let answer = self.while_it_lives(requests.send_packed_command(command)).await;
        self.judge(answer)
    }

    /// Runs a script: `add` adds its keys and arguments.
    pub(crate) async fn run(&self, script: &Script, add: impl Fn(&mut Cmd)) -> RedisResult<Value> {
        let answer = self.run_known(script, &add).await;
        if is_unknown_script(&answer) { self.run_anew(script, &add).await } else { answer }
    }

    /// Runs a script that the server should know.
    pub(crate) async fn run_known(
        &self,
        script: &Script,
        add: impl Fn(&mut Cmd),
    ) -> RedisResult<Value> {
        let mut command = redis::cmd("EVALSHA");
        command.arg(&script.hash);
        add(&mut command);
        self.send(&command).await
    }

    /// Runs a script that the server does not know, and makes it known.
    pub(crate) async fn run_anew(
        &self,
        script: &Script,
        add: impl Fn(&mut Cmd),
    ) -> RedisResult<Value> {
        let mut command = redis::cmd("EVAL");
        command.arg(script.code);
        add(&mut command);
        self.send(&command).await
    }

    fn judge(&self, answer: RedisResult<Value>) -> RedisResult<Value> {
        let answer = answer.and_then(|answer| match answer {
            Value::ServerError(error) => Err(error.into()),
            // What several steps share may fail for one of them only.
            Value::Array(mut answers) if matches!(answers.as_slice(), [Value::ServerError(_)]) => {
                answers.remove(0).extract_error()
            }
            answer => Ok(answer),
        });
        if answer.as_ref().is_err_and(|error| verdict(error) == Verdict::Broken) {
            self.gone.cancel();
        }
        answer
    }

    /// Waits until so many replicas have what was written on this connection.
    ///
    /// Those who wait at the same time share an answer: while the server waits for its replicas it answers
    /// nothing else on this connection.
    pub(crate) async fn replicated(&self, replicas: u32) -> Result<()> {
        if replicas == 0 {
            return Ok(());
        }
        let number = self.written.fetch_add(1, Ordering::Relaxed) + 1;
        let mut last = self.replication.lock().await;
        if let Some((upto, answer)) = &*last
            && *upto >= number
        {
            return answer.clone();
        }
        let upto = self.written.load(Ordering::Relaxed);
        let answer = self.wait_for(replicas).await;
        *last = Some((upto, answer.clone()));
        answer
    }

    async fn wait_for(&self, replicas: u32) -> Result<()> {
        let mut wait = redis::cmd("WAIT");
        wait.arg(replicas).arg(millis(REPLICAS_WITHIN));
        let count = match self.send(&wait).await.map_err(translate)? {
            Value::Int(count) => count,
            _ => 0,
        };
        if count >= i64::from(replicas) {
            return Ok(());
        }
        Err(unavailable(format!(
            "{count} of {replicas} replicas acknowledged it within {REPLICAS_WITHIN:?}: it does not count"
        )))
    }

    /// Listens on a channel, too.
    pub(crate) async fn subscribe(&self, channel: &str) -> RedisResult<()> {
        let subscribe = async {
            match &self.ears {
                Ears::Same => self.requests.clone().subscribe(channel).await,
                Ears::Second(sink) => sink.clone().subscribe(channel).await,
                Ears::None => Ok(()),
            }
        };
        self.while_it_lives(subscribe).await
    }

    pub(crate) async fn unsubscribe(&self, channel: &str) -> RedisResult<()> {
        let unsubscribe = async {
            match &self.ears {
                Ears::Same => self.requests.clone().unsubscribe(channel).await,
                Ears::Second(sink) => sink.clone().unsubscribe(channel).await,
                Ears::None => Ok(()),
            }
        };
        self.while_it_lives(unsubscribe).await
    }

    /// The answer, unless the connection is given up before.
    async fn while_it_lives<T>(
        &self,
        answer: impl Future<Output = RedisResult<T>>,
    ) -> RedisResult<T> {
        tokio::select! {
            biased;
            answer = answer => answer,
            () = self.gone.cancelled() => Err(lost()),
        }
    }

    /// Whether the server is still there.
    pub(crate) async fn is_alive(&self, within: Duration) -> bool {
        let pings = async {
            self.send(&redis::cmd("PING")).await?;
            if let Ears::Second(sink) = &self.ears {
                sink.clone().ping::<Value>().await?;
            }
            RedisResult::Ok(())
        };
        match tokio::time::timeout(within, pings).await {
            Ok(Ok(())) => true,
            // It answers, if only to refuse.
            Ok(Err(error)) => verdict(&error) == Verdict::Refused,
            Err(_) => false,
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Ends the task that reads the second connection.
        self.gone.cancel();
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("identity", &self.identity).finish_non_exhaustive()
    }
}

/// Whether the scripts were flushed, or the server was started again.
pub(crate) fn is_unknown_script(answer: &RedisResult<Value>) -> bool {
    answer.as_ref().is_err_and(|error| error.kind() == ServerErrorKind::NoScript.into())
}

fn lost() -> RedisError {
    std::io::Error::new(std::io::ErrorKind::ConnectionReset, "the connection is lost").into()
}

/// An error that says which server it is about.
pub(crate) fn at(address: &Address, error: &Error) -> Error {
    Error::new(error.kind(), format!("{address}: {error}")).with_source(error.clone())
}

/// The connection, and a second one for messages if it has to be.
async fn connect(
    config: &Config,
    address: &Address,
    mailboxes: &Arc<Mailboxes>,
    gone: &CancellationToken,
) -> Result<(MultiplexedConnection, Option<PubSubSink>)> {
    if config.protocol == Protocol::Any {
        let client = client(config, address, ProtocolVersion::RESP3)?;
        let (mailboxes, gone) = (mailboxes.clone(), gone.clone());
        let hear = move |push: PushInfo| {
            match (&push.kind, push.data.as_slice()) {
                (PushKind::Message, [Value::BulkString(channel), Value::BulkString(message)]) => {
                    mailboxes.deliver(channel, message);
                }
                (PushKind::Disconnection, _) => gone.cancel(),
                _ => {}
            }
            Ok::<(), std::convert::Infallible>(())
        };
        let settings = settings(config).set_push_sender(hear);
        match client.get_multiplexed_async_connection_with_config(&settings).await {
            Ok(connection) => return Ok((connection, None)),
            Err(error) if knows_no_resp3(&error) => {}
            Err(error) => return Err(translate(error)),
        }
    }
    let client = client(config, address, ProtocolVersion::RESP2)?;
    let requests = client.get_multiplexed_async_connection_with_config(&settings(config)).await;
    let requests = requests.map_err(translate)?;
    let messages = client.get_async_pubsub().await.map_err(translate)?;
    let (sink, mut stream) = messages.split();
    let (mailboxes, gone) = (mailboxes.clone(), gone.clone());
    tokio::spawn(async move {
        loop {
            let message = tokio::select! {
                message = stream.next() => message,
                () = gone.cancelled() => None,
            };
            let Some(message) = message else { break };
            mailboxes.deliver(message.get_channel_name().as_bytes(), message.get_payload_bytes());
        }
        gone.cancel();
    });
    Ok((requests, Some(sink)))
}

fn settings(config: &Config) -> AsyncConnectionConfig {
    // Whether a server is silent for too long is seen to by its link, once for all requests.
    AsyncConnectionConfig::new()
        .set_connection_timeout(Some(config.connect_timeout))
        .set_response_timeout(None)
}

/// A client for one server, as the configuration says.
pub(crate) fn client(
    config: &Config,
    address: &Address,
    protocol: ProtocolVersion,
) -> Result<Client> {
    let mut login = RedisConnectionInfo::default().set_db(config.database).set_protocol(protocol);
    if let Some(username) = &config.username {
        login = login.set_username(username);
    }
    if let Some(password) = &config.password {
        login = login.set_password(password);
    }
    let (host, port) = (address.host.clone(), address.port);
    let place = if config.tls {
        ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None }
    } else {
        ConnectionAddr::Tcp(host, port)
    };
    let info = place.into_connection_info().map_err(translate)?;
    let tcp = redis::io::tcp::TcpSettings::default().set_nodelay(true);
    open(config, info.set_redis_settings(login).set_tcp_settings(tcp))
}

#[cfg(feature = "tls")]
fn open(config: &Config, info: redis::ConnectionInfo) -> Result<Client> {
    if !config.tls {
        return Client::open(info).map_err(translate);
    }
    // If there is one already, the program has chosen, and that is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let root_cert = match &config.ca_file {
        Some(path) => Some(std::fs::read(path).map_err(|error| {
            crate::error::config(format!("the CA file {}: {error}", path.display()))
        })?),
        None => None,
    };
    let certificates = redis::TlsCertificates { client_tls: None, root_cert };
    Client::build_with_tls(info, certificates).map_err(translate)
}

#[cfg(not(feature = "tls"))]
fn open(_config: &Config, info: redis::ConnectionInfo) -> Result<Client> {
    Client::open(info).map_err(translate)
}

/// Whether a server, or what stands before it, speaks only RESP2.
fn knows_no_resp3(error: &RedisError) -> bool {
    error.kind() == redis::ErrorKind::RESP3NotSupported
        || error.code() == Some("NOPROTO")
        || error.to_string().to_ascii_lowercase().contains("unknown command")
}

async fn subscribe(
    requests: &mut MultiplexedConnection,
    second: Option<PubSubSink>,
    channel: &str,
) -> RedisResult<Ears> {
    match second {
        None => {
            requests.subscribe(channel).await?;
            Ok(Ears::Same)
        }
        Some(mut sink) => {
            sink.subscribe(channel).await?;
            Ok(Ears::Second(sink))
        }
    }
}

/// A replica would refuse every lock, and so would a server that wants a password: better to say so at
/// once. (Where ROLE is not allowed, the first lock tells.)
async fn refuse_replica(requests: &mut MultiplexedConnection) -> Result<()> {
    let role = requests.send_packed_command(&redis::cmd("ROLE")).await;
    let role = match role.and_then(Value::extract_error) {
        Ok(role) => role,
        Err(error) if error.code() == Some("NOAUTH") => return Err(translate(error)),
        Err(_) => return Ok(()),
    };
    let word = role.as_sequence().and_then(<[Value]>::first);
    let is_replica =
        matches!(word, Some(Value::BulkString(word)) if word == b"slave" || word == b"replica");
    if is_replica {
        return Err(unavailable(
            "the server is a read-only replica: give the address of the master, or use \
             redis+sentinel://",
        ));
    }
    Ok(())
}

async fn identify(requests: &mut MultiplexedConnection, address: &Address) -> Identity {
    let mut ask = redis::cmd("CLIENT");
    let client = match requests.send_packed_command(ask.arg("ID")).await {
        Ok(Value::Int(client)) => Some(client),
        _ => None,
    };
    let info = requests.send_packed_command(redis::cmd("INFO").arg("server")).await;
    let info = info.ok().and_then(|info| redis::from_redis_value::<String>(info).ok());
    let run = info.as_deref().and_then(|info| {
        let line = info.lines().find_map(|line| line.strip_prefix("run_id:"));
        line.map(|run| run.trim().to_owned())
    });
    Identity { address: address.clone(), run, client }
}
