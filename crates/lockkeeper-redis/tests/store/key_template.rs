//! Locks on the keys of another program, by a key template.

use lockkeeper_core::{ErrorKind, Keeper, ReleaseOutcome};
use lockkeeper_redis::{Config, redlock};
use lockkeeper_testkit::server::{RedisCluster, RedisServer, RedlockNodes};
use lockkeeper_testkit::wait::{eventually, soon};

use crate::common::{got, lock, nothing_left, number, open, read, secs, waiter, write};

/// The release of the plain recipe.
const COMPARE_AND_DELETE: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end";

/// A program that uses `SET lock:NAME VALUE NX PX TTL`.
struct Foreign<'a>(&'a RedisServer);

impl Foreign<'_> {
    fn lock(&self, name: &str) -> bool {
        let key = format!("lock:{name}");
        self.0.command(&["SET", &key, "their value", "NX", "PX", "600000"]) == "OK"
    }

    fn release(&self, name: &str) -> bool {
        let key = format!("lock:{name}");
        number(self.0, &["EVAL", COMPARE_AND_DELETE, "1", &key, "their value"]) == 1
    }
}

async fn server() -> (RedisServer, Keeper) {
    let server = RedisServer::start_or_panic();
    let keeper = open(&format!("{}?key_template=lock:%7Bname%7D", server.url())).await;
    (server, keeper)
}

#[tokio::test]
async fn a_holder_excludes_a_foreign_client_with_the_same_key() {
    let (server, keeper) = server().await;
    let foreign = Foreign(&server);
    for name in ["orders:42", "a%7D", "{a}", "lock:x", "a:qq", "🔒"] {
        let guard = lock(&keeper, name).await;
        assert_eq!(server.command(&["KEYS", "*"]), format!("lock:{name}"));
        assert!(!foreign.lock(name) && !foreign.release(name));
        assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
        let guard = keeper.rw_lock(name).read().await.unwrap();
        assert!(!foreign.lock(name) && !foreign.release(name));
        guard.release().await.unwrap();
        assert!(foreign.lock(name) && foreign.release(name));
    }
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_foreign_holder_with_the_same_key_excludes_and_its_release_frees_the_lock() {
    let (server, keeper) = server().await;
    // A waiter polls after a third of its TTL.
    let (keeper, foreign) = (keeper.ttl(secs(3)), Foreign(&server));
    for name in ["orders:42", "50%", "}a{"] {
        assert!(foreign.lock(name));
        assert!(keeper.mutex(name).try_lock().await.unwrap().is_none());
        assert!(keeper.rw_lock(name).try_read().await.unwrap().is_none());
        let writer = waiter(&keeper, name, 1, write(&keeper, name)).await;
        let reader = waiter(&keeper, name, 2, read(&keeper, name)).await;
        assert!(foreign.release(name));
        let writer = got(writer).await;
        assert!(!foreign.lock(name));
        writer.release().await.unwrap();
        got(reader).await.release().await.unwrap();
    }
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn inspection_finds_the_locks_of_a_template_and_no_other_keys() {
    for template in ["lock:{name}", "{name}:lock", "lock:{{name}}", "*[{name}]"] {
        let server = RedisServer::start_or_panic();
        let config = Config::from_url(&server.url()).unwrap().key_template(template).unwrap();
        let keeper = Keeper::new(lockkeeper_redis::Redis::connect(config).await.unwrap());
        for key in ["lock", "lock:", "other:{a}", "other:lock:x:q", "a", "lockkeeper:{a}"] {
            server.command(&["SET", key, "1"]);
        }
        // A lock of the other program. Its name is refused if nothing follows it in the key.
        server.command(&["SET", &template.replace("{name}", "x:q:q"), "1"]);
        server.command(&["HSET", &template.replace("{name}", "hash"), "a", "b"]);
        let keys = server.command(&["DBSIZE"]);

        let (a, b) = (lock(&keeper, "a").await, lock(&keeper, "b/1").await);
        let permit = soon("a permit", keeper.semaphore("b/2", 2).acquire()).await.unwrap();
        let waiting = waiter(&keeper, "a", 1, write(&keeper, "a")).await;
        let inspect = keeper.inspect().unwrap();
        let names = async |start: &str| {
            let infos = inspect.list(start).await.unwrap();
            infos.iter().map(|info| info.name.to_string()).collect::<Vec<_>>()
        };
        let all: &[&str] = match template {
            "lock:{name}" => &["a", "b/1", "b/2"],
            _ => &["a", "b/1", "b/2", "x:q:q"],
        };
        assert_eq!(names("").await, all, "{template}");
        assert_eq!(names("b").await, ["b/1", "b/2"], "{template}");
        let shown = inspect.show("a").await.unwrap();
        assert_eq!((shown[0].holders.len(), shown[0].waiters.len()), (1, 1), "{template}");

        assert_eq!(inspect.break_lock("a").await.unwrap(), 1, "{template}");
        soon("the loss", a.lost()).await;
        got(waiting).await.release().await.unwrap();
        b.release().await.unwrap();
        permit.release().await.unwrap();
        drop(a);
        soon("the releases", keeper.close()).await;
        assert_eq!(server.command(&["DBSIZE"]), keys, "{template}");
    }
}

#[tokio::test]
async fn a_name_whose_key_could_be_another_key_of_a_lock_is_refused_everywhere() {
    let (server, keeper) = server().await;
    let guard = lock(&keeper, "a").await;
    let waiting = waiter(&keeper, "a", 1, write(&keeper, "a")).await;
    let inspect = keeper.inspect().unwrap();
    for name in ["a:q", "a:r", "a:i", "a:f", "a:s", "a:highest"] {
        let errors = [
            keeper.mutex(name).try_lock().await.unwrap_err(),
            keeper.rw_lock(name).read().await.unwrap_err(),
            keeper.semaphore(name, 2).acquire().await.unwrap_err(),
            inspect.show(name).await.unwrap_err(),
            inspect.break_lock(name).await.unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::InvalidName, "{error}");
            let text = error.to_string();
            assert!(text.contains("choose another name") && !text.contains('\n'), "{text}");
        }
    }
    guard.release().await.unwrap();
    got(waiting).await.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}

/// Scripts fail on a cluster if their keys are in different slots.
#[tokio::test]
async fn all_keys_of_a_lock_are_in_one_slot_of_a_cluster() {
    let cluster = RedisCluster::start_or_panic();
    for template in ["lock:{{name}}", "{lock:{name}}", "{locks}:{name}"] {
        let keeper = open(&format!("{}?key_template={template}", cluster.url())).await;
        for name in ["a", "orders/42", "{a", "a:b"] {
            let guard = lock(&keeper, name).await;
            let waiting = waiter(&keeper, name, 1, read(&keeper, name)).await;
            let permit = soon("a permit", keeper.semaphore(name, 2).acquire()).await.unwrap();
            assert_eq!(keeper.inspect().unwrap().list("").await.unwrap().len(), 2);
            guard.release().await.unwrap();
            got(waiting).await.release().await.unwrap();
            permit.release().await.unwrap();
        }
        soon("the releases", keeper.close()).await;
        assert_eq!(cluster.dbsize(), 0);
    }
}

/// The nodes are not a cluster, so a template without a hash tag is valid.
#[tokio::test]
async fn a_quorum_uses_the_template_on_every_node() {
    let nodes = RedlockNodes::start_or_panic(3);
    let url = format!("{}&key_template=lock:{{name}}", nodes.url());
    let keeper = Keeper::new(redlock(Config::redlock_from_url(&url).unwrap()).await.unwrap());
    let guard = lock(&keeper, "a").await;
    let held = nodes.nodes().iter().filter(|node| node.command(&["KEYS", "*"]) == "lock:a");
    assert!(held.count() >= 2);
    assert!(keeper.mutex("a").try_lock().await.unwrap().is_none());
    let error = keeper.mutex("a:q").try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidName, "{error}");
    // Returns when a majority has confirmed. The release of the last node continues in the background.
    guard.release().await.unwrap();
    eventually("free keys", async || {
        nodes.nodes().iter().all(|node| node.command(&["KEYS", "*"]).is_empty())
    })
    .await;
    // A majority of foreign locks, as of a plain Redlock client.
    assert!(nodes.nodes()[..2].iter().all(|node| Foreign(node).lock("a")));
    let refused = keeper.mutex("a").try_lock().await;
    assert!(!matches!(refused, Ok(Some(_))), "{refused:?}");
    soon("the releases", keeper.close()).await;
}
