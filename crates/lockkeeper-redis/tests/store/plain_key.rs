//! Interoperation with clients that follow the plain recipe on the holder key.

use lockkeeper_core::{Mode, ReleaseOutcome};
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::soon;

use crate::common::{got, key, lock, nothing_left, number, read, secs, server, waiter};

/// The release of the plain recipe.
const COMPARE_AND_DELETE: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end";

/// Acquires as a client that follows the plain recipe.
fn foreign_lock(server: &RedisServer, name: &str, ttl: &str) -> bool {
    server.command(&["SET", &key(name), "another client", "NX", "PX", ttl]) == "OK"
}

fn foreign_release(server: &RedisServer, name: &str, value: &str) -> bool {
    number(server, &["EVAL", COMPARE_AND_DELETE, "1", &key(name), value]) == 1
}

#[tokio::test]
async fn get_returns_the_owner_and_pttl_the_lease() {
    let (server, keeper) = server().await;
    let guard = keeper.mutex("orders/42").ttl(secs(100)).lock().await.unwrap();
    let value = server.command(&["GET", "lockkeeper:{orders/42}"]);
    assert!(value.starts_with(&format!("{} x 1 1 100000 ", guard.owner())), "{value}");
    assert!(value.ends_with(guard.label().as_str()), "{value}");
    assert_eq!(server.command(&["KEYS", "*"]), "lockkeeper:{orders/42}");
    assert_eq!(server.command(&["TYPE", "lockkeeper:{orders/42}"]), "string");
    let left = number(&server, &["PTTL", "lockkeeper:{orders/42}"]);
    assert!((60_000..=100_000).contains(&left), "{left}");
    guard.extend(secs(1000)).await.unwrap();
    let left = number(&server, &["PTTL", "lockkeeper:{orders/42}"]);
    assert!((900_000..=1_000_000).contains(&left), "{left}");
    guard.release().await.unwrap();
    assert_eq!(server.command(&["GET", "lockkeeper:{orders/42}"]), "(nil)");
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_foreign_client_is_excluded_by_a_holder() {
    let (server, keeper) = server().await;
    let guard = lock(&keeper, "a").await;
    assert!(!foreign_lock(&server, "a", "60000"));
    assert!(!foreign_release(&server, "a", "another client"));
    assert!(guard.is_held());
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    assert!(foreign_lock(&server, "a", "60000"));
    assert!(foreign_release(&server, "a", "another client"));
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_foreign_client_is_excluded_by_readers() {
    let (server, keeper) = server().await;
    let first = keeper.rw_lock("a").read().await.unwrap();
    let second = keeper.rw_lock("a").read().await.unwrap();
    assert_eq!(server.command(&["GET", &key("a")]), "(readers)");
    assert!(number(&server, &["PTTL", &key("a")]) > 10_000);
    assert!(!foreign_lock(&server, "a", "60000"));
    first.release().await.unwrap();
    assert!(!foreign_lock(&server, "a", "60000"));
    second.release().await.unwrap();
    assert!(foreign_lock(&server, "a", "60000"));
    assert!(foreign_release(&server, "a", "another client"));
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_foreign_holder_excludes_readers_and_writers() {
    let (server, keeper) = server().await;
    assert!(foreign_lock(&server, "a", "60000"));
    assert!(keeper.mutex("a").try_lock().await.unwrap().is_none());
    assert!(keeper.rw_lock("a").try_read().await.unwrap().is_none());
    assert!(keeper.rw_lock("a").try_write().await.unwrap().is_none());
    let timed_out = keeper.mutex("a").try_lock_for(secs(0)).await.unwrap();
    assert!(timed_out.is_none());
    assert_eq!(server.command(&["GET", &key("a")]), "another client");
    assert!(foreign_release(&server, "a", "another client"));
    lock(&keeper, "a").await.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn waiters_acquire_after_the_release_of_a_foreign_holder() {
    let (server, keeper) = server().await;
    assert!(foreign_lock(&server, "a", "600000"));
    // A waiter polls after a third of its TTL.
    let keeper = keeper.ttl(secs(3));
    let mutex = keeper.mutex("a");
    let writer = waiter(&keeper, "a", 1, async move { mutex.lock().await }).await;
    let reader = waiter(&keeper, "a", 2, read(&keeper, "a")).await;
    assert!(foreign_release(&server, "a", "another client"));
    got(writer).await.release().await.unwrap();
    got(reader).await.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn waiters_acquire_when_the_lease_of_a_foreign_holder_ends() {
    let (server, keeper) = server().await;
    assert!(foreign_lock(&server, "a", "300"));
    // With a TTL of an hour, the waiter's next poll would be too late.
    let mutex = keeper.mutex("a").ttl(secs(3600));
    soon("the end of the lease", mutex.lock()).await.unwrap().release().await.unwrap();
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_foreign_holder_without_an_expiry_holds_until_it_releases() {
    let (server, keeper) = server().await;
    assert_eq!(server.command(&["SET", &key("a"), "without expiry", "NX"]), "OK");
    assert!(keeper.mutex("a").try_lock().await.unwrap().is_none());
    let keeper = keeper.ttl(secs(3));
    let mutex = keeper.mutex("a");
    let writer = waiter(&keeper, "a", 1, async move { mutex.lock().await }).await;
    let info = keeper.inspect().unwrap().show("a").await.unwrap();
    assert_eq!(info[0].holders[0].remaining, None);
    assert!(foreign_release(&server, "a", "without expiry"));
    got(writer).await.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn inspection_shows_a_foreign_holder_and_can_break_it() {
    let (server, keeper) = server().await;
    assert!(foreign_lock(&server, "a", "600000"));
    let inspect = keeper.inspect().unwrap();
    let infos = inspect.list("").await.unwrap();
    assert_eq!(infos.len(), 1);
    assert_eq!(infos[0].name.as_str(), "a");
    let [holder] = infos[0].holders.as_slice() else { panic!("{infos:?}") };
    assert_eq!((holder.owner, holder.fence, holder.age), (None, None, None));
    assert_eq!((holder.who(), holder.mode), ("another client", Mode::Exclusive));
    let left = holder.remaining.unwrap();
    assert!(left > secs(500) && left <= secs(600), "{left:?}");

    let mutex = keeper.mutex("a");
    let writer = waiter(&keeper, "a", 1, async move { mutex.lock().await }).await;
    assert_eq!(inspect.break_lock("a").await.unwrap(), 1);
    got(writer).await.release().await.unwrap();
    assert_eq!(inspect.break_lock("a").await.unwrap(), 0);
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_foreign_holder_is_not_shown_with_the_label_of_the_previous_holder() {
    let (server, keeper) = server().await;
    let guard = keeper.mutex("a").label("previous").lock().await.unwrap();
    server.command(&["DEL", &key("a")]);
    assert!(foreign_lock(&server, "a", "600000"));
    let infos = keeper.inspect().unwrap().show("a").await.unwrap();
    let [holder] = infos[0].holders.as_slice() else { panic!("{infos:?}") };
    assert_eq!((holder.who(), holder.fence), ("another client", None));
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::AlreadyLost);
    assert_eq!(server.command(&["GET", &key("a")]), "another client");
    assert!(foreign_release(&server, "a", "another client"));
}

#[tokio::test]
async fn a_holder_whose_value_is_not_utf8_excludes_and_can_be_broken() {
    let (server, keeper) = server().await;
    let command = "return redis.call('SET', KEYS[1], '\\255\\254\\n\\0', 'PX', '60000')";
    server.command(&["EVAL", command, "1", &key("a")]);
    assert!(keeper.mutex("a").try_lock().await.unwrap().is_none());
    let infos = keeper.inspect().unwrap().show("a").await.unwrap();
    assert_eq!(infos[0].holders.len(), 1);
    assert_eq!(keeper.inspect().unwrap().break_lock("a").await.unwrap(), 1);
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_foreign_holder_with_an_empty_value_has_no_label() {
    let (server, keeper) = server().await;
    for value in ["''", "'\\n\\0\\27'"] {
        let command = format!("return redis.call('SET', KEYS[1], {value}, 'NX', 'PX', '60000')");
        assert_eq!(server.command(&["EVAL", &command, "1", &key("a")]), "OK");
        let infos = keeper.inspect().unwrap().show("a").await.unwrap();
        let [holder] = infos[0].holders.as_slice() else { panic!("{infos:?}") };
        assert_eq!((holder.label.as_ref(), holder.who()), (None, "(unknown)"), "{value}");
        server.command(&["DEL", &key("a")]);
    }
    nothing_left(&keeper, &server).await;
}

/// A client of another version could write such a label.
#[tokio::test]
async fn a_holder_with_an_invalid_label_is_shown_without_one() {
    let (server, keeper) = server().await;
    let guard = keeper.mutex("a").label("billing").lock().await.unwrap();
    for label in ["'two\\nlines'", "string.rep('x', 257)"] {
        let command = format!(
            "local record = string.gsub(redis.call('GET', KEYS[1]), 'billing', {label})
             return redis.call('SET', KEYS[1], record, 'KEEPTTL', 'GET')"
        );
        let record = key("a");
        let before = server.command(&["EVAL", &command, "1", &record]);
        let infos = keeper.inspect().unwrap().show("a").await.unwrap();
        let [holder] = infos[0].holders.as_slice() else { panic!("{infos:?}") };
        assert_eq!((holder.label.as_ref(), holder.owner), (None, Some(guard.owner())), "{label}");
        server.command(&["SET", &record, &before, "KEEPTTL"]);
    }
    guard.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}
