//! What these tests share.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use lockkeeper_core::{ErrorKind, Guard, Keeper, Mutex};
use lockkeeper_redis::{Config, Redis};
use lockkeeper_testkit::history::History;
use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::{RedisServer, RedlockNodes};
use lockkeeper_testkit::wait::{eventually, soon};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::task::JoinHandle;

/// A ttl that no test outlives: what happens does not happen because a lease has ended.
pub(crate) const LONG: Duration = Duration::from_secs(600);

pub(crate) fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

pub(crate) fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A keeper with a connection of its own. With short timeouts a busy machine may need a second try.
pub(crate) async fn keeper(url: &str) -> Keeper {
    let connecting = async {
        loop {
            match Redis::connect(Config::from_url(url).unwrap()).await {
                Ok(store) => return Keeper::new(store).ttl(LONG),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}"),
            }
        }
    };
    soon("a connection", connecting).await
}

/// Waits until all releases are done.
pub(crate) async fn close(keeper: &Keeper) {
    soon("all releases", keeper.close()).await;
}

/// Locks, however often the store cannot be reached on the way.
pub(crate) async fn lock(mutex: &Mutex) -> Guard {
    loop {
        match mutex.lock().await {
            Ok(guard) => return guard,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}"),
        }
        tokio::time::sleep(millis(20)).await;
    }
}

/// Somebody who waits, in a task of its own.
pub(crate) fn waiting(mutex: Mutex) -> JoinHandle<Guard> {
    tokio::spawn(async move { lock(&mutex).await })
}

/// Somebody who waits, holds for a moment and gives back, and notes it.
pub(crate) fn passing(mutex: Mutex, history: &History) -> JoinHandle<()> {
    let history = history.clone();
    tokio::spawn(async move {
        let guard = lock(&mutex).await;
        let open = history.begin(guard.name(), guard.owner(), guard.mode(), guard.fence());
        tokio::time::sleep(millis(2)).await;
        open.end();
        // Where the answer is lost, the release is sent again in the background.
        let _ = guard.release().await;
    })
}

/// The key of a mutex.
pub(crate) fn key(name: &str) -> String {
    format!("lockkeeper:{{{name}}}")
}

/// Waits until so many stand in the queue.
pub(crate) async fn until_queued(server: &RedisServer, name: &str, count: usize) {
    let (key, count) = (format!("{}:q", key(name)), count.to_string());
    eventually(&format!("{count} wait"), async || server.command(&["ZCARD", &key]) == count).await;
}

/// Waits until so many stand in the queue, and the server can tell each of them when its turn comes.
pub(crate) async fn until_all_hear(server: &RedisServer, name: &str, count: usize) {
    let (queue, info) = (format!("{}:q", key(name)), format!("{}:i", key(name)));
    eventually(&format!("{count} hear"), async || {
        let owners = server.command(&["ZRANGE", &queue, "0", "-1"]);
        let hears = |owner: &str| {
            let record = server.command(&["HGET", &info, owner]);
            let channel = record.split(' ').find(|word| word.contains(":wake:"));
            channel.is_some_and(|channel| {
                server.command(&["PUBSUB", "NUMSUB", channel]).ends_with("\n1")
            })
        };
        owners.lines().count() == count && owners.lines().all(hears)
    })
    .await;
}

/// Waits until so many processes listen.
pub(crate) async fn until_listening(server: &RedisServer, count: usize) {
    eventually(&format!("{count} listen"), async || {
        server.command(&["PUBSUB", "CHANNELS", "*:wake:*"]).lines().count() == count
    })
    .await;
}

/// Waits until the server has no key any more.
pub(crate) async fn until_empty(server: &RedisServer) {
    eventually("no key is left", async || server.command(&["DBSIZE"]) == "0").await;
}

/// A cable to each node, and the `redlock://` address, without options, for a client behind them.
pub(crate) async fn cables(servers: &RedlockNodes) -> (Vec<Proxy>, String) {
    let mut cables = Vec::new();
    for node in servers.nodes() {
        cables.push(Proxy::start(node.addr()).await.unwrap());
    }
    let addresses: Vec<_> = cables.iter().map(|cable| cable.addr().to_string()).collect();
    let url = format!("redlock://{}", addresses.join(","));
    (cables, url)
}

/// The example beside the tests, which cargo builds with them.
fn helper() -> PathBuf {
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    path.join("examples/redis_helper")
}

/// A process that takes locks. Killed when dropped.
pub(crate) struct Process {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    pub(crate) fn start(url: &str, name: &str, ttl: Duration, task: &[&str]) -> Self {
        let mut command = Command::new(helper());
        command.arg(url).arg(name).arg(ttl.as_millis().to_string()).args(task);
        // What it complains of is what is done to it.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.kill_on_drop(true).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// Its next line; `None` if it has ended.
    pub(crate) async fn next_line(&mut self) -> Option<String> {
        self.lines.next_line().await.unwrap()
    }

    /// The rest of its next line, which starts with this word.
    pub(crate) async fn expect(&mut self, word: &str) -> String {
        let line = soon("the helper's next line", self.next_line()).await;
        let rest = line.as_deref().and_then(|line| line.strip_prefix(word));
        rest.unwrap_or_else(|| panic!("the helper said {line:?} and not {word:?}"))
            .trim()
            .to_owned()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        // One that has ended by itself needs no signal.
        if let Some(pid) = self.child.id().and_then(|pid| Pid::from_raw(pid.cast_signed())) {
            kill_process(pid, signal).unwrap();
        }
    }

    /// Ends its standard input, which tells it to end.
    pub(crate) fn end_input(&mut self) {
        drop(self.child.stdin.take());
    }

    pub(crate) async fn kill9(&mut self) {
        self.child.kill().await.unwrap();
    }
}
