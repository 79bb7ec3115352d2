//! One connection to one server, from the first word to the last.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::{join, join_all};
use lockkeeper_core::{Error, ErrorKind, Result};
use redis::{Cmd, ProtocolVersion, RedisError, RedisResult, ServerErrorKind, Value};
use tokio::runtime::Handle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::{Address, Config, Protocol};
use crate::error::{Verdict, translate, unavailable, unwrapped, verdict};
use crate::mailbox::Mailboxes;
use crate::renewals::millis;
use crate::scripts::{self, Script};
use crate::stream;
use crate::wire::{Hear, Wire, unquoted};

/// How long replicas have to acknowledge. The connection waits for nothing else in the meantime.
const REPLICAS_WITHIN: Duration = Duration::from_secs(1);

/// A connection that answers, until it is [`gone`](Self::gone).
pub(crate) struct Connection {
    requests: Wire,
    ears: Ears,
    /// Where the server tells this process what it is to know: new for each connection, so that nobody
    /// listens there any more when this one is gone.
    channel: String,
    identity: Identity,
    uptime: Option<Uptime>,
    /// Which of the host's addresses it is connected to.
    place: SocketAddr,
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
    Second(Wire),
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

/// How long a server had been up at least when it was asked, and when its answer came.
#[derive(Debug, Clone, Copy)]
struct Uptime {
    reported: Duration,
    at: Instant,
}

impl Identity {
    /// Which run of the server it is.
    pub(crate) fn run(&self) -> Option<&str> {
        self.run.as_deref()
    }

    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    #[cfg(test)]
    pub(crate) fn of(host: &str, run: Option<&str>) -> Self {
        let address = Address { host: host.to_owned(), port: 6379 };
        Self { address, run: run.map(str::to_owned), client: None }
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
        let within = config.connect_timeout;
        let opened = async {
            let places = stream::resolve(address).await?;
            Self::open_master(config, address, &places, before, mailboxes).await
        };
        let opened = tokio::time::timeout(within, opened).await;
        opened
            .unwrap_or_else(|_| Err(unavailable(format!("no answer within {within:?}"))))
            .map_err(|error| at(address, &error))
    }

    /// Connects to the first of a host's addresses, in their order, that is a master.
    ///
    /// A name may stand for a master and its replicas. The first to answer may be a replica, and a different one each time.
    async fn open_master(
        config: &Config,
        address: &Address,
        places: &[SocketAddr],
        before: Option<&Identity>,
        mailboxes: &Arc<Mailboxes>,
    ) -> Result<Self> {
        // An address that does not answer leaves time for the others.
        let within =
            config.connect_timeout / u32::try_from(places.len()).unwrap_or(u32::MAX).max(1);
        let mut failed: Vec<(SocketAddr, Error)> = Vec::new();
        for place in places {
            let opened = Self::shake_hands(config, address, *place, before, mailboxes);
            let error = match tokio::time::timeout(within, opened).await {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(error)) => error,
                Err(_) => unavailable(format!("no answer within {within:?}")),
            };
            if places.len() == 1 {
                return Err(error);
            }
            failed.push((*place, error));
        }
        // If one refuses the login, that is what to mend.
        let kind =
            failed.iter().map(|(_, error)| error.kind()).find(|kind| *kind == ErrorKind::Config);
        let each: Vec<String> =
            failed.iter().map(|(place, error)| format!("{place}: {error}")).collect();
        let message =
            format!("none of its {} addresses is a master: {}", each.len(), each.join("; "));
        Err(Error::new(kind.unwrap_or(ErrorKind::Unavailable), message))
    }

    async fn shake_hands(
        config: &Config,
        address: &Address,
        place: SocketAddr,
        before: Option<&Identity>,
        mailboxes: &Arc<Mailboxes>,
    ) -> Result<Self> {
        let (requests, second, gone) = connect(config, address, place, mailboxes).await?;
        // First of all: a server that wants a password hangs up when it is sent a long script without.
        refuse_replica(&requests).await?;
        let channel = format!("{}:wake:{:016x}", config.prefix, fastrand::u64(..));
        let ears = match subscribe(&requests, second, &channel).await {
            Ok(ears) => ears,
            Err(error) if verdict(&error) == Verdict::Broken => return Err(translate(error)),
            Err(error) => {
                let error = translate(error);
                tracing::warn!(%address, %error, "no messages from this server: waiters will poll");
                Ears::None
            }
        };
        let (loaded, (identity, uptime)) =
            join(load(&requests), identify(&requests, address)).await;
        loaded?;
        if let Some(before) = before
            && let Some(client) = before.client
            && before.address == identity.address
            && before.run.is_some()
            && before.run == identity.run
        {
            let mut end = redis::cmd("CLIENT");
            let ended = requests.send(end.arg("KILL").arg("ID").arg(client)).await;
            if let Err(error) = ended {
                return Err(translate(error));
            }
            // Refused or not there any more: there is nothing further that could be done.
        }
        requests.end_handshake();
        if let Ears::Second(wire) = &ears {
            wire.end_handshake();
        }
        let (written, replication) = (AtomicU64::new(0), tokio::sync::Mutex::default());
        let runtime = Handle::current();
        Ok(Self {
            requests,
            ears,
            channel,
            identity,
            uptime,
            place,
            gone,
            runtime,
            written,
            replication,
        })
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

    /// How long the server has been up at least, where it tells. A restart ends the connection, so one answer is
    /// good for as long as that lives.
    pub(crate) fn uptime(&self) -> Option<Duration> {
        self.uptime.map(|uptime| uptime.reported + uptime.at.elapsed())
    }

    /// Which of the host's addresses it is connected to.
    pub(crate) fn place(&self) -> SocketAddr {
        self.place
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
        self.judge(self.requests.send(command).await)
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
        let answer = answer.map_err(unwrapped);
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
        self.about_channels("SUBSCRIBE", channel).await
    }

    pub(crate) async fn unsubscribe(&self, channel: &str) -> RedisResult<()> {
        self.about_channels("UNSUBSCRIBE", channel).await
    }

    async fn about_channels(&self, what: &str, channel: &str) -> RedisResult<()> {
        let wire = match &self.ears {
            Ears::Same => &self.requests,
            Ears::Second(wire) => wire,
            Ears::None => return Ok(()),
        };
        wire.ask(redis::cmd(what).arg(channel)).await.map(drop)
    }

    /// Whether the server is still there.
    pub(crate) async fn is_alive(&self, within: Duration) -> bool {
        let pings = async {
            self.send(&redis::cmd("PING")).await?;
            if let Ears::Second(wire) = &self.ears {
                wire.ask(&redis::cmd("PING")).await?;
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

/// An error that says which server it is about.
pub(crate) fn at(address: &Address, error: &Error) -> Error {
    Error::new(error.kind(), format!("{address}: {error}")).with_source(error.clone())
}

/// The connection, and a second one for messages if it has to be.
async fn connect(
    config: &Config,
    address: &Address,
    place: SocketAddr,
    mailboxes: &Arc<Mailboxes>,
) -> Result<(Wire, Option<Wire>, CancellationToken)> {
    let hear = || -> Option<Hear> {
        let mailboxes = mailboxes.clone();
        Some(Box::new(move |channel, message| mailboxes.deliver(channel, message)))
    };
    if config.protocol == Protocol::Any {
        let (protocol, gone) = (ProtocolVersion::RESP3, CancellationToken::new());
        let wire = Wire::connect(config, address, &[place], protocol, hear(), &gone).await?;
        match wire.log_in(config, protocol).await {
            Ok(()) => return Ok((wire, None, gone)),
            Err(error) if knows_no_resp3(&error) => {}
            Err(error) => return Err(translate(unquoted(error, config))),
        }
    }
    let (protocol, gone) = (ProtocolVersion::RESP2, CancellationToken::new());
    let requests = Wire::open(config, address, &[place], protocol, None, &gone).await?;
    let messages = Wire::open(config, address, &[place], protocol, hear(), &gone).await?;
    Ok((requests, Some(messages), gone))
}

/// Whether a server, or what stands before it, speaks only RESP2.
fn knows_no_resp3(error: &RedisError) -> bool {
    error.code() == Some("NOPROTO")
        || error.to_string().to_ascii_lowercase().contains("unknown command")
}

async fn subscribe(requests: &Wire, second: Option<Wire>, channel: &str) -> RedisResult<Ears> {
    let listener = second.as_ref().unwrap_or(requests);
    listener.ask(redis::cmd("SUBSCRIBE").arg(channel)).await?;
    Ok(second.map_or(Ears::Same, Ears::Second))
}

/// A replica would refuse every lock, and so would a server that wants a password: better to say so at
/// once. (Where ROLE is not allowed, the first lock tells.)
async fn refuse_replica(requests: &Wire) -> Result<()> {
    let role = match requests.ask(&redis::cmd("ROLE")).await {
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

/// Makes the scripts known.
async fn load(requests: &Wire) -> Result<()> {
    let load = async |script: &Script| {
        requests.ask(redis::cmd("SCRIPT").arg("LOAD").arg(script.code)).await
    };
    for loaded in join_all(scripts::all().map(load)).await {
        // Where that is refused, EVAL may not be.
        if let Err(error) = loaded
            && verdict(&error) == Verdict::Broken
        {
            return Err(translate(error));
        }
    }
    Ok(())
}

async fn identify(requests: &Wire, address: &Address) -> (Identity, Option<Uptime>) {
    let (mut client, mut info) = (redis::cmd("CLIENT"), redis::cmd("INFO"));
    let asked = join(requests.ask(client.arg("ID")), requests.ask(info.arg("server")));
    let (client, info) = asked.await;
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
    // The server subtracts the second in which it started from the present one. So it says 1 a moment after its start,
    // if its clock shows another second then: up to one more than it has been up.
    let reported = field("uptime_in_seconds:").and_then(|seconds| seconds.parse::<u64>().ok());
    let at = Instant::now();
    let uptime = reported
        .map(|seconds| Uptime { reported: Duration::from_secs(seconds.saturating_sub(1)), at });
    (Identity { address: address.clone(), run, client }, uptime)
}

#[cfg(test)]
mod tests {
    use lockkeeper_testkit::server::RedisServer;
    use lockkeeper_testkit::wait::soon;

    use super::*;

    /// Opens a connection to a host with these addresses.
    async fn open(places: &[SocketAddr], options: &str) -> Result<Connection> {
        let config = Config::from_url(&format!("redis://name/?{options}")).unwrap();
        let address = Address { host: "name".into(), port: 6379 };
        let mailboxes = Arc::default();
        soon("an answer", Connection::open_master(&config, &address, places, None, &mailboxes))
            .await
    }

    #[tokio::test]
    async fn a_name_with_several_addresses_leads_to_the_master() {
        let master = RedisServer::start_or_panic();
        let replicas =
            [(); 2].map(|()| RedisServer::builder().replica_of(&master).start_or_panic());
        let [one, two] = [replicas[0].addr(), replicas[1].addr()];
        let closed = SocketAddr::from(([127, 0, 0, 1], 1));
        for options in ["protocol=resp3", "protocol=resp2"] {
            for places in [[one, two, master.addr()], [closed, master.addr(), one]] {
                for _ in 0..3 {
                    let connection = open(&places, options).await.unwrap();
                    assert_eq!(connection.place(), master.addr());
                    assert!(connection.hears());
                }
            }
            let error = open(&[one, closed, two], options).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable);
            let text = error.to_string();
            assert!(text.contains("none of its 3 addresses is a master"), "{text}");
            assert!(text.contains("read-only replica"), "{text}");
        }
    }

    #[tokio::test]
    async fn an_address_that_never_answers_leaves_time_for_the_others() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let master = RedisServer::start_or_panic();
        let places = [silent.local_addr().unwrap(), master.addr()];
        let connection = open(&places, "connect_timeout=2s").await.unwrap();
        assert_eq!(connection.place(), master.addr());
    }
}
