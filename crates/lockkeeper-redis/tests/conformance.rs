//! The conformance suite on every topology of Redis, on Redis 6.2 and 8.2 and on Valkey.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use lockkeeper_core::{Backend, BoxFuture};
use lockkeeper_redis::{Config, Redis, redlock};
use lockkeeper_testkit::conformance::Subject;
use lockkeeper_testkit::server::{
    RedisCluster, RedisMake, RedisSentinel, RedisServer, RedlockNodes,
};

/// Long enough for renewals on a machine that is busy with other tests.
const TTL: Duration = Duration::from_secs(2);

/// One server for all tests that run concurrently. It is terminated after the last of them.
struct Shared<T>(Mutex<Weak<T>>);

impl<T> Shared<T> {
    const fn new() -> Self {
        Self(Mutex::new(Weak::new()))
    }

    fn get(&self, start: impl FnOnce() -> T) -> Arc<T> {
        let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        slot.upgrade().unwrap_or_else(|| {
            let server = Arc::new(start());
            *slot = Arc::downgrade(&server);
            server
        })
    }
}

static ONE: Shared<RedisServer> = Shared::new();
static REDIS_62: Shared<RedisServer> = Shared::new();
static REDIS_82: Shared<RedisServer> = Shared::new();
static VALKEY: Shared<RedisServer> = Shared::new();
static SENTINEL: Shared<RedisSentinel> = Shared::new();
static CLUSTER: Shared<RedisCluster> = Shared::new();
static REDLOCK: Shared<RedlockNodes> = Shared::new();

/// Returns the path of the example `redis_helper`, which cargo builds with the tests.
fn helper() -> PathBuf {
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    path.join("examples/redis_helper")
}

/// Returns the key of a mutex.
fn key(name: &str) -> String {
    format!("lockkeeper:{{{}}}", name.replace('%', "%25").replace('}', "%7D"))
}

async fn store(url: &str) -> Arc<dyn Backend> {
    Arc::new(Redis::connect(Config::from_url(url).unwrap()).await.unwrap())
}

/// Returns a function that opens the store again.
fn another(url: &str) -> impl Fn() -> BoxFuture<'static, Arc<dyn Backend>> + Send + Sync + 'static {
    let url = url.to_owned();
    move || {
        let url = url.clone();
        Box::pin(async move { store(&url).await })
    }
}

async fn single(options: &str) -> Subject {
    on(ONE.get(RedisServer::start_or_panic), options).await
}

async fn redis_62() -> Subject {
    on(REDIS_62.get(|| start(RedisMake::Redis62)), "").await
}

async fn redis_82() -> Subject {
    on(REDIS_82.get(|| start(RedisMake::Redis82)), "").await
}

async fn valkey() -> Subject {
    on(VALKEY.get(|| start(RedisMake::Valkey)), "").await
}

fn start(make: RedisMake) -> RedisServer {
    RedisServer::builder().make(make).start_or_panic()
}

async fn on(server: Arc<RedisServer>, options: &str) -> Subject {
    let url = format!("{}{options}", server.url());
    Subject::new(store(&url).await, {
        let server = server.clone();
        move |held| {
            assert_eq!(server.command(&["DEL", &key(&held.name)]), "1");
            std::future::ready(())
        }
    })
    .ttl(TTL)
    .another(another(&url))
    .helper(helper(), url)
    .keep(server)
}

async fn resp3() -> Subject {
    single("").await
}

async fn resp2() -> Subject {
    single("?protocol=resp2").await
}

async fn sentinel() -> Subject {
    let servers = SENTINEL.get(RedisSentinel::start_or_panic);
    Subject::new(store(&servers.url()).await, {
        let servers = servers.clone();
        move |held| {
            assert_eq!(servers.master().command(&["DEL", &key(&held.name)]), "1");
            std::future::ready(())
        }
    })
    .ttl(TTL)
    .another(another(&servers.url()))
    .helper(helper(), servers.url())
    .keep(servers)
}

async fn cluster() -> Subject {
    let servers = CLUSTER.get(RedisCluster::start_or_panic);
    Subject::new(store(&servers.url()).await, {
        let servers = servers.clone();
        move |held| {
            let key = key(&held.name);
            let deleted =
                |node: &RedisServer| node.try_command(&["DEL", &key]).is_ok_and(|n| n == "1");
            assert_eq!(servers.nodes().iter().filter(|node| deleted(node)).count(), 1);
            std::future::ready(())
        }
    })
    .ttl(TTL)
    .another(another(&servers.url()))
    .helper(helper(), servers.url())
    .keep(servers)
}

async fn quorum() -> Subject {
    let servers = REDLOCK.get(|| RedlockNodes::start_or_panic(5));
    let nodes = Config::redlock_from_url(&servers.url()).unwrap();
    Subject::new(Arc::new(redlock(nodes).await.unwrap()), {
        let servers = servers.clone();
        move |held| {
            for node in servers.nodes() {
                node.command(&["DEL", &key(&held.name)]);
            }
            std::future::ready(())
        }
    })
    .another({
        let url = servers.url();
        move || {
            let nodes = Config::redlock_from_url(&url).unwrap();
            async { Arc::new(redlock(nodes).await.unwrap()) as Arc<dyn Backend> }
        }
    })
    .ttl(TTL)
    .helper(helper(), servers.url())
    .keep(servers)
}

mod on_one_node {
    lockkeeper_testkit::conformance!(super::resp3);
    mod across_processes {
        lockkeeper_testkit::conformance_across_processes!(super::super::resp3);
    }
}

mod on_one_node_with_resp2 {
    lockkeeper_testkit::conformance!(super::resp2);
    mod across_processes {
        lockkeeper_testkit::conformance_across_processes!(super::super::resp2);
    }
}

mod on_redis_6_2 {
    lockkeeper_testkit::conformance!(super::redis_62);
}

mod on_redis_8_2 {
    lockkeeper_testkit::conformance!(super::redis_82);
}

mod on_valkey {
    lockkeeper_testkit::conformance!(super::valkey);
    mod across_processes {
        lockkeeper_testkit::conformance_across_processes!(super::super::valkey);
    }
}

mod with_sentinels {
    lockkeeper_testkit::conformance!(super::sentinel);
    mod across_processes {
        lockkeeper_testkit::conformance_across_processes!(super::super::sentinel);
    }
}

mod on_a_cluster {
    lockkeeper_testkit::conformance!(super::cluster);
    mod across_processes {
        lockkeeper_testkit::conformance_across_processes!(super::super::cluster);
    }
}

mod on_a_quorum {
    lockkeeper_testkit::conformance!(super::quorum);
    mod across_processes {
        lockkeeper_testkit::conformance_across_processes!(super::super::quorum);
    }
}
