//! Helpers for these tests.

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

/// A TTL that no test outlives, so that no lease expires.
pub(crate) const LONG: Duration = Duration::from_secs(600);

pub(crate) fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

pub(crate) fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Opens a keeper with a separate connection. Retries, because short timeouts may expire on a busy machine.
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

/// Locks, and retries while the store is unavailable.
pub(crate) async fn lock(mutex: &Mutex) -> Guard {
    loop {
        match mutex.lock().await {
            Ok(guard) => return guard,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}"),
        }
        tokio::time::sleep(millis(20)).await;
    }
}

/// Spawns a task that waits for the lock.
pub(crate) fn waiting(mutex: Mutex) -> JoinHandle<Guard> {
    tokio::spawn(async move { lock(&mutex).await })
}

/// Spawns a task that waits for the lock, holds it for 2 ms, records the hold and releases.
pub(crate) fn passing(mutex: Mutex, history: &History) -> JoinHandle<()> {
    let history = history.clone();
    tokio::spawn(async move {
        let guard = lock(&mutex).await;
        let open = history.begin(guard.name(), guard.owner(), guard.mode(), guard.fence());
        tokio::time::sleep(millis(2)).await;
        open.end();
        // If the reply is lost, the release is retried in the background.
        let _ = guard.release().await;
    })
}

/// Returns the key of a mutex.
pub(crate) fn key(name: &str) -> String {
    format!("lockkeeper:{{{name}}}")
}

/// Waits until the queue has this many waiters.
pub(crate) async fn until_queued(server: &RedisServer, name: &str, count: usize) {
    let (key, count) = (format!("{}:q", key(name)), count.to_string());
    eventually(&format!("{count} waiters"), async || server.command(&["ZCARD", &key]) == count)
        .await;
}

/// Waits until the queue has this many waiters, and each of them is subscribed to its channel.
pub(crate) async fn until_all_hear(server: &RedisServer, name: &str, count: usize) {
    let queue = format!("{}:q", key(name));
    eventually(&format!("{count} hear"), async || {
        let records = server.command(&["ZRANGE", &queue, "0", "-1"]);
        let hears = |record: &str| {
            let channel = record.split(' ').find(|word| word.contains(":wake:"));
            channel.is_some_and(|channel| {
                server.command(&["PUBSUB", "NUMSUB", channel]).ends_with("\n1")
            })
        };
        records.lines().count() == count && records.lines().all(hears)
    })
    .await;
}

/// Waits until this many sessions are subscribed.
pub(crate) async fn until_subscribers(server: &RedisServer, count: usize) {
    eventually(&format!("{count} subscribers"), async || {
        server.command(&["PUBSUB", "CHANNELS", "*:wake:*"]).lines().count() == count
    })
    .await;
}

/// Waits until the server has no keys.
pub(crate) async fn until_empty(server: &RedisServer) {
    eventually("no key is left", async || server.command(&["DBSIZE"]) == "0").await;
}

/// Starts a proxy for each node. Returns the proxies and their `redlock://` URL without options.
pub(crate) async fn proxies(servers: &RedlockNodes) -> (Vec<Proxy>, String) {
    let mut proxies = Vec::new();
    for node in servers.nodes() {
        proxies.push(Proxy::start(node.addr()).await.unwrap());
    }
    let addresses: Vec<_> = proxies.iter().map(|proxy| proxy.addr().to_string()).collect();
    let url = format!("redlock://{}", addresses.join(","));
    (proxies, url)
}

/// Returns the path of the example `redis_helper`, which cargo builds with the tests.
fn helper() -> PathBuf {
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    path.join("examples/redis_helper")
}

/// A helper process that acquires locks. Dropping it kills the process.
pub(crate) struct Process {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    pub(crate) fn start(url: &str, name: &str, ttl: Duration, task: &[&str]) -> Self {
        let mut command = Command::new(helper());
        command.arg(url).arg(name).arg(ttl.as_millis().to_string()).args(task);
        // Its errors are expected: tests make it fail.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.kill_on_drop(true).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// Returns its next line; `None` after its end.
    pub(crate) async fn next_line(&mut self) -> Option<String> {
        self.lines.next_line().await.unwrap()
    }

    /// Reads its next line, which must start with this word, and returns the rest.
    pub(crate) async fn expect(&mut self, word: &str) -> String {
        let line = soon("the helper's next line", self.next_line()).await;
        let rest = line.as_deref().and_then(|line| line.strip_prefix(word));
        rest.unwrap_or_else(|| panic!("the helper printed {line:?} instead of {word:?}"))
            .trim()
            .to_owned()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        // A process that has exited has no id.
        if let Some(pid) = self.child.id().and_then(|pid| Pid::from_raw(pid.cast_signed())) {
            kill_process(pid, signal).unwrap();
        }
    }

    /// Closes its standard input, which makes it release and exit.
    pub(crate) fn end_input(&mut self) {
        drop(self.child.stdin.take());
    }

    pub(crate) async fn kill9(&mut self) {
        self.child.kill().await.unwrap();
    }
}
