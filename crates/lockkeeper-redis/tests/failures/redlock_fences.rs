//! When the fence of a Redlock reaches its nodes.

use lockkeeper_core::{Fence, Guard, Keeper};
use lockkeeper_redis::{Config, redlock};
use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::{RedisServer, RedlockNodes, ServerClock};
use lockkeeper_testkit::wait::{eventually, soon};

use crate::common::{LONG, close, proxies, secs};

async fn keeper_at(url: &str) -> Keeper {
    let nodes = Config::redlock_from_url(url).unwrap();
    Keeper::new(soon("a majority", redlock(nodes)).await.unwrap()).ttl(LONG)
}

/// Returns how often a server has run a command, also in scripts.
fn calls(server: &RedisServer, command: &str) -> u64 {
    let stats = server.command(&["INFO", "commandstats"]);
    let start = format!("cmdstat_{command}:calls=");
    let line = stats.lines().find_map(|line| line.strip_prefix(&start));
    line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_uncontended_lock_and_its_release_are_two_requests_to_each_node() {
    let servers = RedlockNodes::start_or_panic(5);
    let nodes = Config::redlock_from_url(&servers.url()).unwrap();
    let quorum = soon("a majority", redlock(nodes)).await.unwrap();
    // An attempt without a script has one `SET`, and everything else is a script.
    let requests = |node| (calls(node, "set"), calls(node, "evalsha") + calls(node, "eval"));
    let all = || servers.nodes().iter().map(requests).collect::<Vec<_>>();
    // Connects to all nodes, which runs a script, too.
    let keeper = Keeper::new(quorum.clone()).ttl(LONG);
    eventually("all nodes respond", async || {
        keeper.mutex("warm").lock().await.unwrap().release().await.unwrap();
        all().iter().all(|(attempts, _)| *attempts > 0)
    })
    .await;
    close(&keeper).await;
    let keeper = Keeper::new(quorum).ttl(LONG);
    let before = all();
    for i in 1..=20 {
        let guard = keeper.mutex(format!("a{i}")).lock().await.unwrap();
        guard.release().await.unwrap();
        // Releases that are still in flight would share a call with the next ones.
        let mut sent = Vec::new();
        eventually("each node has executed the release", async || {
            let now = all().into_iter().zip(&before);
            sent = now.map(|(now, before)| (now.0 - before.0, now.1 - before.1)).collect();
            sent.iter().all(|(_, releases)| *releases >= i)
        })
        .await;
        assert_eq!(sent, [(i, i); 5]);
    }
    close(&keeper).await;
}

/// Three nodes. The clock of the first is ahead of the others by more than the test takes, and by less than a quarter of
/// the TTL.
struct Skewed {
    _servers: RedlockNodes,
    proxies: Vec<Proxy>,
    url: String,
}

impl Skewed {
    async fn start() -> Self {
        let builders = [100, 0, 0].map(|seconds| {
            let clock = ServerClock::new().unwrap();
            clock.set_ahead(seconds * 1_000_000);
            RedisServer::builder().clock(&clock)
        });
        let servers = RedlockNodes::from_builders(builders.into()).unwrap();
        let (proxies, url) = proxies(&servers).await;
        Self { _servers: servers, proxies, url: format!("{url}?min_uptime=0s") }
    }

    /// Returns a keeper that remembers no fence, and reaches all nodes but one.
    async fn without(&self, node: usize) -> Keeper {
        self.proxies.iter().for_each(Proxy::heal);
        self.proxies[node].cut();
        keeper_at(&self.url).await
    }

    /// Acquires a lock from the first two nodes: its fence is ahead of the clock of the second.
    async fn lock(&self, name: &str) -> (Keeper, Guard, Option<Fence>) {
        let keeper = self.without(2).await;
        let guard = soon("the lock", keeper.mutex(name).lock()).await.unwrap();
        let fence = guard.fence();
        (keeper, guard, fence)
    }

    /// Acquires a lock from the last two nodes.
    async fn next(&self, name: &str) -> Option<Fence> {
        let keeper = self.without(0).await;
        let guard = soon("the next lock", crate::common::lock(&keeper.mutex(name))).await;
        let fence = guard.fence();
        guard.release().await.unwrap();
        fence
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_tells_the_fence_to_nodes_whose_clocks_are_behind() {
    let skewed = Skewed::start().await;
    let (_keeper, guard, first) = skewed.lock("release").await;
    guard.release().await.unwrap();
    let next = skewed.next("release").await;
    assert!(next > first, "{next:?} after {first:?}");
    // They differ by the clocks, not by the release: without it the next fence would be lower.
    let other = skewed.next("other").await;
    assert!(other < first, "{other:?}: the clocks are not skewed as they should be");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_downgrade_tells_the_fence_to_nodes_whose_clocks_are_behind() {
    let skewed = Skewed::start().await;
    let keeper = skewed.without(2).await;
    let guard = soon("the lock", keeper.rw_lock("a").write()).await.unwrap();
    guard.downgrade().await.unwrap();
    let other = skewed.without(0).await;
    let reader = soon("a reader", other.rw_lock("a").read()).await.unwrap();
    assert!(reader.fence() >= guard.fence(), "{:?} beside {:?}", reader.fence(), guard.fence());
    reader.release().await.unwrap();
    let first = guard.fence();
    skewed.proxies.iter().for_each(Proxy::heal);
    guard.release().await.unwrap();
    let next = skewed.next("a").await;
    assert!(next > first, "{next:?} after {first:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_release_of_a_ticket_tells_its_fence_within_limits() {
    let skewed = Skewed::start().await;
    for adopts in [false, true] {
        let name = format!("ticket {adopts}");
        let (_keeper, guard, first) = skewed.lock(&name).await;
        let ticket = guard.detach().unwrap();
        let other = skewed.without(2).await;
        if adopts {
            other.adopt(ticket).await.unwrap().release().await.unwrap();
        } else {
            other.release_ticket(ticket).await.unwrap();
        }
        let next = skewed.next(&name).await;
        assert!(next > first, "{next:?} after {first:?} (adopted: {adopts})");
    }
    let (_keeper, guard, first) = skewed.lock("forged").await;
    let mut ticket = guard.detach().unwrap();
    ticket.fence = Fence::new((1 << 53) - 2);
    skewed.without(2).await.release_ticket(ticket).await.unwrap();
    let next = skewed.next("forged").await.unwrap().get();
    let micros = |time: std::time::Duration| u64::try_from(time.as_micros()).unwrap();
    let most = first.unwrap().get() + micros(LONG / 2) - micros(secs(50));
    assert!(next < most, "{next} must be at most half of the TTL ahead: {most}");
}
