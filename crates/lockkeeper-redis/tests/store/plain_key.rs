//! The holder is a plain key, which other clients understand.

use lockkeeper_core::{Mode, ReleaseOutcome};
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::soon;

use crate::common::{got, key, lock, nothing_left, number, read, secs, server, waiter};

/// The second half of the usual recipe.
const COMPARE_AND_DELETE: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end";

/// What a client of another make does.
fn foreign_lock(server: &RedisServer, name: &str, ttl: &str) -> bool {
    server.command(&["SET", &key(name), "somebody else", "NX", "PX", ttl]) == "OK"
}

fn foreign_release(server: &RedisServer, name: &str, value: &str) -> bool {
    number(server, &["EVAL", COMPARE_AND_DELETE, "1", &key(name), value]) == 1
}

#[tokio::test]
async fn get_shows_the_owner_and_pttl_the_lease() {
    let (server, keeper) = server().await;
    let guard = keeper.mutex("orders/42").ttl(secs(100)).lock().await.unwrap();
    assert_eq!(server.command(&["GET", "lockkeeper:{orders/42}"]), guard.owner().to_string());
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
    assert!(!foreign_release(&server, "a", "somebody else"));
    assert!(guard.is_held());
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    assert!(foreign_lock(&server, "a", "60000"));
    assert!(foreign_release(&server, "a", "somebody else"));
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
    assert!(foreign_release(&server, "a", "somebody else"));
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
    assert_eq!(server.command(&["GET", &key("a")]), "somebody else");
    assert!(foreign_release(&server, "a", "somebody else"));
    lock(&keeper, "a").await.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn waiters_find_the_release_of_a_foreign_holder() {
    let (server, keeper) = server().await;
    assert!(foreign_lock(&server, "a", "600000"));
    // A waiter looks again after a third of its ttl.
    let keeper = keeper.ttl(secs(3));
    let mutex = keeper.mutex("a");
    let writer = waiter(&keeper, "a", 1, async move { mutex.lock().await }).await;
    let reader = waiter(&keeper, "a", 2, read(&keeper, "a")).await;
    assert!(foreign_release(&server, "a", "somebody else"));
    got(writer).await.release().await.unwrap();
    got(reader).await.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn waiters_enter_when_the_lease_of_a_foreign_holder_ends() {
    let (server, keeper) = server().await;
    assert!(foreign_lock(&server, "a", "300"));
    // Its own ttl is an hour: it cannot be the refresh that finds it.
    let mutex = keeper.mutex("a").ttl(secs(3600));
    soon("the end of the lease", mutex.lock()).await.unwrap().release().await.unwrap();
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_foreign_holder_without_an_expiry_holds_until_it_releases() {
    let (server, keeper) = server().await;
    assert_eq!(server.command(&["SET", &key("a"), "for ever", "NX"]), "OK");
    assert!(keeper.mutex("a").try_lock().await.unwrap().is_none());
    let keeper = keeper.ttl(secs(3));
    let mutex = keeper.mutex("a");
    let writer = waiter(&keeper, "a", 1, async move { mutex.lock().await }).await;
    let info = keeper.inspect().unwrap().show("a").await.unwrap();
    assert_eq!(info[0].holders[0].remaining, None);
    assert!(foreign_release(&server, "a", "for ever"));
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
    assert_eq!((holder.who(), holder.mode), ("somebody else", Mode::Exclusive));
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
async fn a_foreign_client_that_takes_over_is_not_taken_for_who_held_before() {
    let (server, keeper) = server().await;
    let guard = keeper.mutex("a").label("the one before").lock().await.unwrap();
    server.command(&["DEL", &key("a")]);
    assert!(foreign_lock(&server, "a", "600000"));
    let infos = keeper.inspect().unwrap().show("a").await.unwrap();
    let [holder] = infos[0].holders.as_slice() else { panic!("{infos:?}") };
    assert_eq!((holder.who(), holder.fence), ("somebody else", None));
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::AlreadyLost);
    assert_eq!(server.command(&["GET", &key("a")]), "somebody else");
    assert!(foreign_release(&server, "a", "somebody else"));
}

#[tokio::test]
async fn a_value_that_is_no_text_is_still_a_holder() {
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
async fn a_foreign_client_that_says_nothing_of_itself_has_no_label() {
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

/// As a client of another version, or of another make, could write it.
#[tokio::test]
async fn a_record_whose_label_cannot_be_shown_has_none_and_not_that_of_who_looks() {
    let (server, keeper) = server().await;
    let guard = keeper.mutex("a").label("billing").lock().await.unwrap();
    for label in ["'two\\nlines'", "string.rep('x', 257)"] {
        let command = format!(
            "local record = string.gsub(redis.call('GET', KEYS[1]), 'billing', {label})
             return redis.call('SET', KEYS[1], record, 'KEEPTTL', 'GET')"
        );
        let record = format!("{}:x", key("a"));
        let before = server.command(&["EVAL", &command, "1", &record]);
        let infos = keeper.inspect().unwrap().show("a").await.unwrap();
        let [holder] = infos[0].holders.as_slice() else { panic!("{infos:?}") };
        assert_eq!((holder.label.as_ref(), holder.owner), (None, Some(guard.owner())), "{label}");
        server.command(&["SET", &record, &before, "KEEPTTL"]);
    }
    guard.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}
