//! A session on one server: logged in, subscribed, with its scripts loaded.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join;
use lockkeeper_core::coalescer::Coalescer;
use lockkeeper_core::{Error, ErrorKind, Result};
use redis::{Cmd, RedisError, RedisResult, ServerErrorKind, Value};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::connection::Connection;
use super::events::EventHandler;
use super::handshake::{self, PushChannel};
use super::identity::{Identity, Uptime};
use super::replication::{self, ReplicaWait};
use super::script::Script;
use super::settings::{Address, Settings};
use super::stream;
use crate::error::{ErrorClass, at, classify, translate, unavailable};

/// A session, until it is [`gone`](Self::gone).
pub(crate) struct Session {
    commands: Arc<Connection>,
    pushes: PushChannel,
    /// The channel that messages for this process are published on. It is new for each session, so it has no subscriber
    /// when this session is gone.
    channel: String,
    identity: Identity,
    uptime: Option<Uptime>,
    /// Which of the host's addresses it is connected to.
    ip: SocketAddr,
    gone: CancellationToken,
    /// The runtime of its read loop.
    runtime: Handle,
    replication: Coalescer<ReplicaWait>,
}

/// How to open a session.
pub(crate) struct Opening<'a> {
    pub(crate) settings: &'a Settings,
    pub(crate) address: &'a Address,
    /// A session that was given up: it is ended on the server first, so that no command that was sent there and not yet
    /// read can take effect after a command of the new one.
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

    /// Connects to the first of a host's addresses, in their order, that is a master.
    ///
    /// A name may resolve to a master and its replicas. The first to answer may be a replica, and a different one each time.
    async fn open_master(&self, ips: &[SocketAddr]) -> Result<Session> {
        // An address that does not answer leaves time for the others.
        let within =
            self.settings.connect_timeout / u32::try_from(ips.len()).unwrap_or(u32::MAX).max(1);
        let mut failed: Vec<(SocketAddr, Error)> = Vec::new();
        for ip in ips {
            let error = match tokio::time::timeout(within, self.open_at(*ip)).await {
                Ok(Ok(session)) => return Ok(session),
                Ok(Err(error)) => error,
                Err(_) => unavailable(format!("no answer within {within:?}")),
            };
            if ips.len() == 1 {
                return Err(error);
            }
            failed.push((*ip, error));
        }
        // A refused login is what the user can fix.
        let kind =
            failed.iter().map(|(_, error)| error.kind()).find(|kind| *kind == ErrorKind::Config);
        let each: Vec<String> = failed.iter().map(|(ip, error)| format!("{ip}: {error}")).collect();
        let message =
            format!("none of its {} addresses is a master: {}", each.len(), each.join("; "));
        Err(Error::new(kind.unwrap_or(ErrorKind::Unavailable), message))
    }

    async fn open_at(&self, ip: SocketAddr) -> Result<Session> {
        let Self { settings, address, before, handler } = *self;
        let (commands, messages, gone) = handshake::connect(settings, address, ip, handler).await?;
        // Before the scripts: a server that wants a password closes the connection when it gets a long script.
        handshake::refuse_replica(&commands).await?;
        let channel = format!("{}:wake:{:016x}", settings.channel_prefix, fastrand::u64(..));
        let pushes = match handshake::subscribe(&commands, messages, &channel).await {
            Ok(pushes) => pushes,
            Err(error) if classify(&error) == ErrorClass::Broken => {
                return Err(translate(error));
            }
            Err(error) => {
                let error = translate(error);
                tracing::warn!(%address, %error, "no messages from this server: waiters will poll");
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
            // An error reply says that it is refused or that the session is not there: nothing more can be done.
            commands.send(kill.arg("KILL").arg("ID").arg(client)).await.map_err(translate)?;
        }
        commands.end_handshake();
        if let PushChannel::Second(messages) = &pushes {
            messages.end_handshake();
        }
        let (commands, runtime) = (Arc::new(commands), Handle::current());
        let replication = replication::coalescer(&commands, &runtime);
        Ok(Session { commands, pushes, channel, identity, uptime, ip, gone, runtime, replication })
    }
}

impl Session {
    /// The channel to publish messages for this process on; `-` if they would not arrive.
    pub(crate) fn channel(&self) -> &str {
        match self.pushes {
            PushChannel::None => "-",
            PushChannel::Shared | PushChannel::Second(_) => &self.channel,
        }
    }

    pub(crate) fn receives_messages(&self) -> bool {
        !matches!(self.pushes, PushChannel::None)
    }

    /// Whether messages arrive on a second connection.
    pub(crate) fn has_second_connection(&self) -> bool {
        matches!(self.pushes, PushChannel::Second(_))
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// How long the server has been up at least, if it reported that. A restart ends the session, so one reply is valid for its
    /// whole life.
    pub(crate) fn uptime(&self) -> Option<Duration> {
        self.uptime.map(|uptime| uptime.reported + uptime.at.elapsed())
    }

    /// Which of the host's addresses it is connected to.
    pub(crate) fn ip(&self) -> SocketAddr {
        self.ip
    }

    /// The runtime that reads its connections.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Cancelled when the session can no longer be used.
    pub(crate) fn gone(&self) -> &CancellationToken {
        &self.gone
    }

    /// Sends a command and waits for its reply. If that shows that the connection is broken, the session is gone.
    pub(crate) async fn send(&self, command: &Cmd) -> RedisResult<Value> {
        self.commands.execute(command).await
    }

    /// Runs a script: `add` adds its keys and arguments.
    pub(crate) async fn run(&self, script: &Script, add: impl Fn(&mut Cmd)) -> RedisResult<Value> {
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
        add: impl Fn(&mut Cmd),
    ) -> RedisResult<Value> {
        let mut command = match call {
            Call::Evalsha => redis::cmd("EVALSHA").arg(&script.hash).take(),
            Call::Eval => redis::cmd("EVAL").arg(script.code).take(),
        };
        add(&mut command);
        self.send(&command).await
    }

    /// Waits until so many replicas have acknowledged what was written in this session.
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

    /// Whether the server answers a ping.
    pub(crate) async fn is_alive(&self, within: Duration) -> bool {
        let pings = async {
            self.send(&redis::cmd("PING")).await?;
            if let PushChannel::Second(messages) = &self.pushes {
                messages.query(&redis::cmd("PING")).await?;
            }
            RedisResult::Ok(())
        };
        match tokio::time::timeout(within, pings).await {
            Ok(Ok(())) => true,
            // A refusal is an answer.
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

/// How a script is named in a call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Call {
    /// By its hash: the server should know it.
    Evalsha,
    /// By its code, which makes it known.
    Eval,
}

/// Whether the server does not know a script: it restarted, or its scripts were flushed.
pub(crate) fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ServerErrorKind::NoScript.into()
}

#[cfg(test)]
mod tests {
    use lockkeeper_testkit::server::RedisServer;
    use lockkeeper_testkit::wait::soon;

    use super::*;
    use crate::client::events::NoEvents;
    use crate::config::Config;

    /// Opens a connection to a host with these addresses.
    async fn open(ips: &[SocketAddr], options: &str) -> Result<Session> {
        let config = Config::from_url(&format!("redis://name/?{options}")).unwrap();
        let address = Address { host: "name".into(), port: 6379 };
        let handler: Arc<dyn EventHandler> = Arc::new(NoEvents);
        let settings = &config.client;
        let opening = Opening { settings, address: &address, before: None, handler: &handler };
        soon("an answer", opening.open_master(ips)).await
    }

    #[tokio::test]
    async fn a_name_with_several_addresses_leads_to_the_master() {
        let master = RedisServer::start_or_panic();
        let replicas =
            [(); 2].map(|()| RedisServer::builder().replica_of(&master).start_or_panic());
        let [one, two] = [replicas[0].addr(), replicas[1].addr()];
        let closed = SocketAddr::from(([127, 0, 0, 1], 1));
        for options in ["protocol=resp3", "protocol=resp2"] {
            for ips in [[one, two, master.addr()], [closed, master.addr(), one]] {
                for _ in 0..3 {
                    let session = open(&ips, options).await.unwrap();
                    assert_eq!(session.ip(), master.addr());
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
    async fn an_address_that_never_answers_leaves_time_for_the_others() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let master = RedisServer::start_or_panic();
        let ips = [silent.local_addr().unwrap(), master.addr()];
        let session = open(&ips, "connect_timeout=2s").await.unwrap();
        assert_eq!(session.ip(), master.addr());
    }
}
