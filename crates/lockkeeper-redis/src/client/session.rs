//! A session on one server: logged in, subscribed, with its scripts loaded.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join;
use lockkeeper_core::coalescer::Coalescer;
use lockkeeper_core::{Error, ErrorKind, Result};
use redis::{Cmd, RedisError, RedisResult, Value};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::connection::Connection;
use super::events::EventHandler;
use super::handshake::{self, PushChannel};
use super::identity::{Identity, Uptime};
use super::replication::{self, ReplicaWait};
use super::resp::{Pipeline, Words};
use super::script::{Script, is_unknown_script};
use super::server_clock::ServerClock;
use super::settings::{Address, Settings};
use super::stream::{self, Endpoint};
use crate::error::{ErrorClass, at, classify, translate, unavailable, unwrapped};

/// A session on a server, usable until it is [`gone`](Self::gone).
pub(crate) struct Session {
    commands: Arc<Connection>,
    pushes: PushChannel,
    /// The channel for messages to this process. Each session has a new one, so it has no subscriber after the session
    /// is gone.
    channel: String,
    identity: Identity,
    uptime: Option<Uptime>,
    clock: ServerClock,
    /// What it is connected to.
    endpoint: Endpoint,
    gone: CancellationToken,
    /// The runtime of its read loop.
    runtime: Handle,
    replication: Coalescer<ReplicaWait>,
}

/// How to open a session.
pub(crate) struct Opening<'a> {
    pub(crate) settings: &'a Settings,
    pub(crate) address: &'a Address,
    /// The previous session. It is killed on the server before the new session is used, so that a command still buffered
    /// there cannot execute after a command of the new session.
    pub(crate) before: Option<&'a Identity>,
    pub(crate) handler: &'a Arc<dyn EventHandler>,
}

impl Opening<'_> {
    pub(crate) async fn open(&self) -> Result<Session> {
        let within = self.settings.connect_timeout;
        let opened = async { self.open_master(&stream::resolve(self.address).await?).await };
        let opened = tokio::time::timeout(within, opened).await;
        opened
            .unwrap_or_else(|_| Err(unavailable(format!("no answer within {within:?}"))))
            .map_err(|error| at(self.address, &error))
    }

    /// Connects to the addresses of a host in turn, and returns a session on the first that is a master.
    ///
    /// A name may resolve to a master and its replicas, and the order may differ each time.
    async fn open_master(&self, endpoints: &[Endpoint]) -> Result<Session> {
        // Divided, so that an address that does not reply leaves time for the others.
        let within = self.settings.connect_timeout
            / u32::try_from(endpoints.len()).unwrap_or(u32::MAX).max(1);
        let mut failed: Vec<(&Endpoint, Error)> = Vec::new();
        for endpoint in endpoints {
            let error = match tokio::time::timeout(within, self.open_at(endpoint)).await {
                Ok(Ok(session)) => return Ok(session),
                Ok(Err(error)) => error,
                Err(_) => unavailable(format!("no answer within {within:?}")),
            };
            if endpoints.len() == 1 {
                return Err(error);
            }
            failed.push((endpoint, error));
        }
        // An error that the user can fix, such as a rejected login, decides the kind.
        let kind =
            failed.iter().map(|(_, error)| error.kind()).find(|kind| *kind == ErrorKind::Config);
        let each: Vec<String> =
            failed.iter().map(|(endpoint, error)| format!("{endpoint}: {error}")).collect();
        let message =
            format!("none of its {} addresses is a master: {}", each.len(), each.join("; "));
        Err(Error::new(kind.unwrap_or(ErrorKind::Unavailable), message))
    }

    async fn open_at(&self, endpoint: &Endpoint) -> Result<Session> {
        let Self { settings, address, before, handler } = *self;
        let (commands, messages, gone) =
            handshake::connect(settings, address, endpoint, handler).await?;
        // Before the scripts: a server that requires a password closes the connection on an argument above 16 KiB
        // (github.com/redis/redis/pull/9588).
        handshake::refuse_replica(&commands).await?;
        let channel = format!("{}:wake:{:016x}", settings.channel_prefix, fastrand::u64(..));
        let pushes = match handshake::subscribe(&commands, messages, &channel).await {
            Ok(pushes) => pushes,
            Err(error) if classify(&error) == ErrorClass::Broken => {
                return Err(translate(error));
            }
            Err(error) => {
                let error = translate(error);
                tracing::warn!(%address, %error, "cannot subscribe to messages: waiters will poll");
                PushChannel::None
            }
        };
        let (loaded, (identity, uptime)) = join(
            handshake::load(&commands, handler.scripts()),
            handshake::identify(&commands, address),
        )
        .await;
        loaded?;
        if let Some(before) = before
            && let Some(client) = before.client
            && before.address == identity.address
            && before.run.is_some()
            && before.run == identity.run
        {
            let mut kill = redis::cmd("CLIENT");
            // An error reply is ignored: the session does not exist any more, or the user may not kill it.
            commands.send(kill.arg("KILL").arg("ID").arg(client)).await.map_err(translate)?;
        }
        let clock = ServerClock::read(&commands).await.map_err(translate)?;
        commands.end_handshake();
        if let PushChannel::Second(messages) = &pushes {
            messages.end_handshake();
        }
        let (commands, runtime) = (Arc::new(commands), Handle::current());
        let replication = replication::coalescer(&commands, &runtime);
        let session = Session {
            commands,
            pushes,
            channel,
            identity,
            uptime,
            clock,
            endpoint: endpoint.clone(),
            gone,
            runtime,
            replication,
        };
        Ok(session)
    }
}

impl Session {
    /// Returns the channel for messages to this process; `-` if they would not arrive.
    pub(crate) fn channel(&self) -> &str {
        match self.pushes {
            PushChannel::None => "-",
            PushChannel::Shared | PushChannel::Second(_) => &self.channel,
        }
    }

    pub(crate) fn receives_messages(&self) -> bool {
        !matches!(self.pushes, PushChannel::None)
    }

    /// Returns whether messages arrive on a second connection.
    pub(crate) fn has_second_connection(&self) -> bool {
        matches!(self.pushes, PushChannel::Second(_))
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Returns the minimum uptime of the server, if it reported one. A restart ends the session, so one reply is enough.
    pub(crate) fn uptime(&self) -> Option<Duration> {
        self.uptime.map(|uptime| uptime.reported + uptime.at.elapsed())
    }

    /// Returns what it is connected to: one of the host's addresses, or the socket.
    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Returns the runtime of its read loop.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Returns the token that is cancelled when the session can no longer be used.
    pub(crate) fn gone(&self) -> &CancellationToken {
        &self.gone
    }

    /// Sends a command and waits for its reply. The session is gone after an error of class
    /// [`Broken`](ErrorClass::Broken).
    pub(crate) async fn send(&self, command: &Cmd) -> RedisResult<Value> {
        self.commands.execute(command).await
    }

    /// Sends several commands in one write and waits for all replies. [`checked`](Self::checked) turns error replies into
    /// errors.
    pub(crate) async fn send_all(&self, commands: &Pipeline) -> RedisResult<Vec<Value>> {
        self.commands.send_all(commands).await
    }

    /// Turns an error reply into an error. If it shows that the connection is broken, the session is gone.
    pub(crate) fn checked(&self, reply: Value) -> Result<Value> {
        reply.extract_error().map_err(|error| translate(self.noted(error)))
    }

    /// Turns an error in place of a reply into an error, as [`checked`](Self::checked) does, and leaves errors within it in
    /// place.
    pub(crate) fn unchecked(&self, reply: Value) -> RedisResult<Value> {
        match reply {
            Value::ServerError(error) => Err(self.noted(error.into())),
            reply => Ok(reply),
        }
    }

    fn noted(&self, error: RedisError) -> RedisError {
        let error = unwrapped(error);
        if classify(&error) == ErrorClass::Broken {
            self.gone.cancel();
        }
        error
    }

    /// Returns the estimate of the server's clock.
    pub(crate) fn clock(&self) -> &ServerClock {
        &self.clock
    }

    /// Runs a script: `add` adds its keys and arguments.
    pub(crate) async fn run(
        &self,
        script: &Script,
        add: impl Fn(&mut Words),
    ) -> RedisResult<Value> {
        match self.call(Call::Evalsha, script, &add).await {
            Err(error) if is_unknown_script(&error) => self.call(Call::Eval, script, &add).await,
            reply => reply,
        }
    }

    /// Runs a script by its hash or by its code.
    pub(crate) async fn call(
        &self,
        call: Call,
        script: &Script,
        add: impl Fn(&mut Words),
    ) -> RedisResult<Value> {
        let mut pipeline = Pipeline::default();
        pipeline.command(|words| {
            match call {
                Call::Evalsha => words.word("EVALSHA").word(&script.hash),
                Call::Eval => words.word("EVAL").word(script.code),
            };
            add(words);
        });
        self.commands.execute_one(&pipeline).await
    }

    /// Waits until this many replicas have acknowledged the writes of this session.
    pub(crate) async fn replicated(&self, replicas: u32) -> Result<()> {
        if replicas == 0 { Ok(()) } else { self.replication.send(replicas).await }
    }

    /// Subscribes to one more channel.
    pub(crate) async fn subscribe(&self, channel: &str) -> RedisResult<()> {
        self.change_channels("SUBSCRIBE", channel).await
    }

    pub(crate) async fn unsubscribe(&self, channel: &str) -> RedisResult<()> {
        self.change_channels("UNSUBSCRIBE", channel).await
    }

    async fn change_channels(&self, command: &str, channel: &str) -> RedisResult<()> {
        let connection = match &self.pushes {
            PushChannel::Shared => &*self.commands,
            PushChannel::Second(messages) => messages,
            PushChannel::None => return Ok(()),
        };
        connection.query(redis::cmd(command).arg(channel)).await.map(drop)
    }

    /// Pings the server and returns whether it replies in time.
    pub(crate) async fn is_alive(&self, within: Duration) -> bool {
        let pings = async {
            // Not PING: the reply also corrects the estimate of the server's clock.
            let sent = tokio::time::Instant::now();
            self.clock.sample(&self.send(&self.clock.command()).await?, sent);
            if let PushChannel::Second(messages) = &self.pushes {
                messages.query(&redis::cmd("PING")).await?;
            }
            RedisResult::Ok(())
        };
        match tokio::time::timeout(within, pings).await {
            Ok(Ok(())) => true,
            // An error reply is a reply.
            Ok(Err(error)) => classify(&error) == ErrorClass::Refused,
            Err(_) => false,
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.gone.cancel();
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("identity", &self.identity).finish_non_exhaustive()
    }
}

/// How to call a script.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Call {
    /// By its hash. Fails if the server does not have the script.
    Evalsha,
    /// By its code. The server caches it.
    Eval,
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use lockkeeper_testkit::server::RedisServer;
    use lockkeeper_testkit::wait::soon;

    use super::*;
    use crate::client::events::NoEvents;
    use crate::config::Config;

    /// Opens a session on a host with these addresses.
    async fn open(ips: &[SocketAddr], options: &str) -> Result<Session> {
        let endpoints: Vec<_> = ips.iter().copied().map(Endpoint::Ip).collect();
        let config = Config::from_url(&format!("redis://name/?{options}")).unwrap();
        let address = Address::tcp("name", 6379);
        let handler: Arc<dyn EventHandler> = Arc::new(NoEvents);
        let settings = &config.client;
        let opening = Opening { settings, address: &address, before: None, handler: &handler };
        soon("a session", opening.open_master(&endpoints)).await
    }

    #[tokio::test]
    async fn of_several_addresses_the_master_is_used() {
        let master = RedisServer::start_or_panic();
        let replicas =
            [(); 2].map(|()| RedisServer::builder().replica_of(&master).start_or_panic());
        let [one, two] = [replicas[0].addr(), replicas[1].addr()];
        let closed = SocketAddr::from(([127, 0, 0, 1], 1));
        for options in ["protocol=resp3", "protocol=resp2"] {
            for ips in [[one, two, master.addr()], [closed, master.addr(), one]] {
                for _ in 0..3 {
                    let session = open(&ips, options).await.unwrap();
                    assert_eq!(*session.endpoint(), Endpoint::Ip(master.addr()));
                    assert!(session.receives_messages());
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
    async fn an_address_that_never_replies_leaves_time_for_the_others() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let master = RedisServer::start_or_panic();
        let ips = [silent.local_addr().unwrap(), master.addr()];
        let session = open(&ips, "connect_timeout=2s").await.unwrap();
        assert_eq!(*session.endpoint(), Endpoint::Ip(master.addr()));
    }
}
