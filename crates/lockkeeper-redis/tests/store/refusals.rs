//! Errors of servers are reported in one line, in time, and without the password.

use std::net::{Ipv4Addr, TcpListener};

use lockkeeper_core::{Error, ErrorKind, Keeper};
use lockkeeper_testkit::server::{RedisMake, RedisServer};
use lockkeeper_testkit::wait::{eventually, soon};

use crate::common::{
    all_of, got, key, lock, nothing_left, number, open, read, secs, server_of, try_open, waiter,
};

const SECRET: &str = "hunter2";

/// Asserts the kind and text of an error, and that it has one line and no secrets.
#[track_caller]
pub(crate) fn check(error: &Error, kind: ErrorKind, expected: &str) {
    assert_eq!(error.kind(), kind, "{error}");
    let text = error.to_string();
    assert!(!text.contains('\n') && text.contains(expected), "{text:?} without {expected:?}");
    let all = all_of(error);
    assert!(!all.contains(SECRET) && !all.contains("local "), "{all}");
}

async fn refused(url: &str, kind: ErrorKind, expected: &str) {
    let error = try_open(url).await.err().unwrap_or_else(|| panic!("opened, not {expected:?}"));
    check(&error, kind, expected);
}

/// Asserts that a lock is refused, on an open keeper.
async fn lock_refused(keeper: &Keeper, kind: ErrorKind, expected: &str) {
    let error = soon("the error", keeper.mutex("a").try_lock()).await.unwrap_err();
    check(&error, kind, expected);
    let text = error.to_string();
    assert!(text.starts_with("redis: lock \"a\": ") || text.starts_with("redis: "), "{text}");
}

async fn wrong_credentials_are_refused(make: RedisMake) {
    let server = RedisServer::builder().make(make).password("right").start_or_panic();
    let port = server.port();
    let wrong = "rejects the user name or the password";
    for protocol in ["resp2", "resp3"] {
        let end = format!("127.0.0.1:{port}/?protocol={protocol}");
        refused(&format!("redis://:{SECRET}@{end}"), ErrorKind::Config, wrong).await;
        refused(&format!("redis://ann:{SECRET}@{end}"), ErrorKind::Config, wrong).await;
        let missing = "requires a password";
        refused(&format!("redis://{end}"), ErrorKind::Config, missing).await;
    }
}

/// Such a server quotes the command.
async fn a_server_without_auth_is_an_error_without_the_password(make: RedisMake) {
    for unknown in [&["AUTH"][..], &["AUTH", "HELLO"]] {
        let unknown = unknown.iter().flat_map(|word| ["--rename-command", *word, ""]);
        let server = RedisServer::builder().make(make).args(&unknown.collect::<Vec<_>>());
        let server = server.start_or_panic();
        for user in ["", "ann"] {
            let url = format!("redis://{user}:{SECRET}@127.0.0.1:{}/", server.port());
            for url in [format!("{url}?protocol=resp2"), url] {
                if let Err(error) = try_open(&url).await {
                    check(&error, ErrorKind::Config, "");
                }
            }
        }
        let url = format!("redis://:{SECRET}@127.0.0.1:{}/?protocol=resp2", server.port());
        refused(&url, ErrorKind::Config, "rejects the user name or the password").await;
    }
}

async fn a_password_for_a_server_without_one_is_not_in_the_error(make: RedisMake) {
    let server = RedisServer::builder().make(make).start_or_panic();
    // Redis 6 and later accept any password for the default user.
    let url = format!("redis://:{SECRET}@127.0.0.1:{}/", server.port());
    match try_open(&url).await {
        Ok(keeper) => lock(&keeper, "a").await.release().await.map(|_| ()).unwrap(),
        Err(error) => check(&error, ErrorKind::Config, ""),
    }
    let url = format!("redis://unknown:{SECRET}@127.0.0.1:{}/", server.port());
    refused(&url, ErrorKind::Config, "rejects the user name or the password").await;
}

async fn a_user_without_permission_for_scripts_gets_a_config_error(make: RedisMake) {
    let server = RedisServer::builder().make(make).start_or_panic();
    let rules = ["~*", "&*", "+@all", "-@scripting"];
    let rule = format!(">{SECRET}");
    let mut command = vec!["ACL", "SETUSER", "ann", "on", &rule];
    command.extend(rules);
    server.command(&command);
    let url = format!("redis://ann:{SECRET}@127.0.0.1:{}/", server.port());
    // At once: a lock that was taken without a script could not be released.
    let error = try_open(&url).await.unwrap_err();
    check(&error, ErrorKind::Config, "lacks a permission that locks need");
}

/// The hand-off after a break may fail. An error would make the caller repeat the break, on the next holder.
#[tokio::test]
async fn a_break_succeeds_even_if_the_hand_off_after_it_fails() {
    let server = RedisServer::start_or_panic();
    // Only the hand-off behind dead waiters needs ZSCORE.
    let rule = format!(">{SECRET}");
    let user = ["ACL", "SETUSER", "ann", "on", &rule, "~*", "&*", "+@all", "-zscore"];
    server.command(&user);
    let keeper = open(&server.url()).await;
    let url = format!("redis://ann:{SECRET}@127.0.0.1:{}/", server.port());
    let breaker = open(&url).await;
    let guard = lock(&keeper, "a").await;
    assert_eq!(breaker.inspect().unwrap().break_lock("a").await.unwrap(), 1);
    lock(&keeper, "a").await.release().await.unwrap();
    drop(guard);
    nothing_left(&keeper, &server).await;
}

/// Tests the permissions that docs/backends/redis.md lists.
async fn the_documented_permissions_are_sufficient(make: RedisMake) {
    let server = RedisServer::builder().make(make).start_or_panic();
    let rule = format!(">{SECRET}");
    let rules = ["on", &rule, "resetchannels", "~lockkeeper:*", "&lockkeeper:*"];
    let commands =
        ["+@scripting", "+@pubsub", "+@read", "+@write", "+@connection", "+time", "+ping"];
    let more = ["+role", "+info", "+client"];
    server.command(&[&["ACL", "SETUSER", "ann"], &rules[..], &commands, &more].concat());
    let url = format!("redis://ann:{SECRET}@127.0.0.1:{}/", server.port());
    let (one, two) = (open(&url).await, open(&url).await);
    assert!(one.capabilities().push);
    let guard = one.rw_lock("a").write().await.unwrap();
    let reader = waiter(&one, "a", 1, read(&two, "a")).await;
    guard.downgrade().await.unwrap();
    let reader = got(reader).await;
    guard.extend(secs(60)).await.unwrap();
    guard.release().await.unwrap();
    reader.release().await.unwrap();
    let permit = one.semaphore("a", 2).acquire_many(2).await.unwrap();
    assert!(two.semaphore("a", 2).try_acquire().await.unwrap().is_none());
    let semaphore = two.semaphore("a", 2);
    let waiting = waiter(&one, "a", 1, async move { semaphore.acquire().await }).await;
    permit.release().await.unwrap();
    got(waiting).await.release().await.unwrap();
    let guard = lock(&one, "b").await;
    assert_eq!(two.inspect().unwrap().break_lock("b").await.unwrap(), 1);
    soon("the loss", guard.lost()).await;
    let log = server.command(&["ACL", "LOG"]);
    assert_eq!(log, "", "refused");
    nothing_left(&one, &server).await;
    nothing_left(&two, &server).await;
}

/// The user may run scripts, but not their commands.
async fn a_user_without_permission_for_a_command_of_a_script_gets_a_config_error(make: RedisMake) {
    let server = RedisServer::builder().make(make).start_or_panic();
    let rule = format!(">{SECRET}");
    for lacks in ["-set", "-get", "-del"] {
        server
            .command(&["ACL", "SETUSER", "ann", "reset", "on", &rule, "~*", "&*", "+@all", lacks]);
        let url = format!("redis://ann:{SECRET}@127.0.0.1:{}/", server.port());
        match try_open(&url).await {
            Ok(keeper) if lacks == "-set" => {
                let refused = "lacks a permission that locks need";
                lock_refused(&keeper, ErrorKind::Config, refused).await;
                nothing_left(&keeper, &server).await;
            }
            Ok(keeper) => {
                let guard = lock(&keeper, "a").await;
                let error = guard.release().await.unwrap_err();
                check(&error, ErrorKind::Config, "lacks a permission that locks need");
                server.command(&["FLUSHALL"]);
            }
            Err(error) => check(&error, ErrorKind::Config, "lacks a permission that locks need"),
        }
    }
}

async fn a_user_without_permission_for_the_keys_gets_a_config_error(make: RedisMake) {
    let server = RedisServer::builder().make(make).start_or_panic();
    let rule = format!(">{SECRET}");
    server.command(&["ACL", "SETUSER", "ann", "on", &rule, "~shop:*", "&*", "+@all"]);
    let url = format!("redis://ann:{SECRET}@127.0.0.1:{}/", server.port());
    let keeper = open(&url).await;
    lock_refused(&keeper, ErrorKind::Config, "lacks a permission that locks need").await;
    let keeper = open(&format!("{url}?prefix=shop")).await;
    lock(&keeper, "a").await.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}

async fn a_user_without_permission_for_channels_polls_and_hands_off(make: RedisMake) {
    let (server, keeper) = server_of(make).await;
    let rule = format!(">{SECRET}");
    server.command(&["ACL", "SETUSER", "ann", "on", &rule, "~*", "resetchannels", "+@all"]);
    let url = format!("redis://ann:{SECRET}@127.0.0.1:{}/", server.port());
    let mute = open(&url).await;
    assert!(!mute.capabilities().push);
    // It waits for another client of that user.
    let guard = lock(&mute, "a").await;
    let mutex = mute.mutex("a");
    let waiting = waiter(&keeper, "a", 1, async move { mutex.lock().await }).await;
    guard.release().await.unwrap();
    let guard = got(waiting).await;
    // A subscribed client waits for it.
    let mutex = keeper.mutex("a").ttl(secs(3));
    let waiting = waiter(&keeper, "a", 1, async move { mutex.lock().await }).await;
    guard.release().await.unwrap();
    let guard = got(waiting).await;
    // It waits for a subscribed client.
    let waiting = waiter(&keeper, "a", 1, read(&mute, "a")).await;
    guard.release().await.unwrap();
    got(waiting).await.release().await.unwrap();
    nothing_left(&mute, &server).await;
    nothing_left(&keeper, &server).await;
}

/// Its waiters are subscribed at first. They must poll as soon as they have reconnected.
async fn waiters_poll_when_their_user_loses_its_channels(make: RedisMake) {
    for protocol in ["resp3", "resp2"] {
        let (server, keeper) = server_of(make).await;
        let rule = format!(">{SECRET}");
        server.command(&["ACL", "SETUSER", "ann", "on", &rule, "~*", "allchannels", "+@all"]);
        let url = format!("redis://ann:{SECRET}@127.0.0.1:{}/?protocol={protocol}", server.port());
        let mute = open(&url).await.ttl(secs(36_000));
        assert!(mute.capabilities().push);
        let guard = lock(&keeper.clone().ttl(secs(36_000)), "a").await;
        let mutex = mute.mutex("a");
        let waiting = waiter(&keeper, "a", 1, async move { mutex.lock().await }).await;
        // The server also closes the subscribed connections.
        server.command(&["ACL", "SETUSER", "ann", "resetchannels"]);
        let queue = format!("{}:q", key("a"));
        eventually("a place without a channel", async || {
            server.command(&["ZRANGE", &queue, "0", "-1"]).contains(" - ")
        })
        .await;
        guard.release().await.unwrap();
        got(waiting).await.release().await.unwrap();
        nothing_left(&mute, &server).await;
        nothing_left(&keeper, &server).await;
    }
}

/// The client detects a closed subscription at once, also on the second connection of RESP2.
async fn waiters_retry_when_the_subscribed_connection_is_killed(make: RedisMake) {
    let (server, keeper) = server_of(make).await;
    let other = open(&format!("{}?protocol=resp2", server.url())).await.ttl(secs(36_000));
    let guard = lock(&keeper.clone().ttl(secs(36_000)), "a").await;
    let mutex = other.mutex("a");
    let waiting = waiter(&keeper, "a", 1, async move { mutex.lock().await }).await;
    let holder = key("a");
    // Hands the lock off without a message.
    let hand_off = format!(
        "redis.call('SET', '{holder}', redis.call('ZRANGE', '{holder}:q', 0, 0)[1], 'PX', 600000)
        return redis.call('DEL', '{holder}:q')"
    );
    server.command(&["EVAL", &hand_off, "0"]);
    server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    got(waiting).await.release().await.unwrap();
    drop(guard);
    nothing_left(&other, &server).await;
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_closed_port_is_refused() {
    // No server listens on port 1, and only root could start one.
    refused(&format!("redis://:{SECRET}@127.0.0.1:1/"), ErrorKind::Unavailable, "127.0.0.1:1: ")
        .await;
}

#[tokio::test]
async fn an_unknown_host_is_refused() {
    let url = format!("redis://:{SECRET}@no-such-host.invalid/?connect_timeout=10s");
    refused(&url, ErrorKind::Unavailable, "no-such-host.invalid:6379: ").await;
}

#[tokio::test]
async fn a_server_that_never_replies_is_a_timeout() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    for protocol in ["resp2", "resp3"] {
        let url = format!(
            "redis://:{SECRET}@127.0.0.1:{port}/?connect_timeout=300ms&protocol={protocol}"
        );
        refused(&url, ErrorKind::Unavailable, "no answer").await;
    }
}

async fn a_read_only_replica_is_refused(make: RedisMake) {
    let master = RedisServer::builder().make(make).start_or_panic();
    let replica = RedisServer::builder().make(make).replica_of(&master).start_or_panic();
    refused(&replica.url(), ErrorKind::Unavailable, "read-only replica").await;
    // A master that becomes a replica while it is used.
    let keeper = open(&master.url()).await;
    // The new master does not exist, so the replica does not start to load data.
    master.command(&["REPLICAOF", "127.0.0.1", "1"]);
    let error = soon("the error", keeper.mutex("a").try_lock()).await.unwrap_err();
    check(&error, ErrorKind::Unavailable, "read-only replica");
}

/// Makes the server refuse all commands that need memory.
fn fill_up(server: &RedisServer) {
    server.command(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    server.command(&["CONFIG", "SET", "maxmemory", "1"]);
}

async fn a_full_server_refuses_new_locks_and_serves_holders(make: RedisMake) {
    let (server, keeper) = server_of(make).await;
    let other = open(&server.url()).await;
    let held = lock(&keeper, "held").await;
    let waiting = waiter(&keeper, "held", 1, read(&other, "held")).await;
    let permit = keeper.semaphore("held", 2).acquire().await.unwrap();
    fill_up(&server);
    lock_refused(&keeper, ErrorKind::Unavailable, "out of memory").await;
    let error = keeper.rw_lock("a").try_read().await.unwrap_err();
    check(&error, ErrorKind::Unavailable, "out of memory");
    let error = keeper.semaphore("a", 2).try_acquire().await.unwrap_err();
    check(&error, ErrorKind::Unavailable, "out of memory");

    // Holders can still renew, hand off and release.
    held.extend(secs(60)).await.unwrap();
    permit.extend(secs(60)).await.unwrap();
    held.release().await.unwrap();
    let reader = got(waiting).await;
    assert_eq!(server.command(&["GET", &key("held")]), "(readers)");
    reader.extend(secs(60)).await.unwrap();
    reader.extend(secs(30)).await.unwrap();
    assert!(reader.is_held() && permit.is_held());
    permit.release().await.unwrap();
    reader.release().await.unwrap();
    nothing_left(&other, &server).await;
    nothing_left(&keeper, &server).await;
}

async fn a_full_server_still_renews_readers_of_different_ttls(make: RedisMake) {
    let (server, keeper) = server_of(make).await;
    let long = keeper.rw_lock("a").ttl(secs(600)).read().await.unwrap();
    let short = keeper.rw_lock("a").ttl(secs(60)).read().await.unwrap();
    let exclusive = lock(&keeper, "b").await;
    fill_up(&server);
    // All three in one call.
    let ttl = secs(50);
    let (one, two, three) =
        tokio::join!(short.extend(ttl), exclusive.extend(ttl), long.extend(secs(500)));
    one.unwrap();
    two.unwrap();
    three.unwrap();
    for guard in [long, short, exclusive] {
        guard.release().await.unwrap();
    }
    nothing_left(&keeper, &server).await;
}

async fn a_key_of_the_wrong_type_is_an_error(make: RedisMake) {
    let (server, keeper) = server_of(make).await;
    server.command(&["RPUSH", &key("a"), "not", "a", "lock"]);
    lock_refused(&keeper, ErrorKind::Config, "used by another program").await;
    let error = keeper.rw_lock("a").try_read().await.unwrap_err();
    check(&error, ErrorKind::Config, "used by another program");
    let error = keeper.inspect().unwrap().show("a").await.unwrap_err();
    check(&error, ErrorKind::Config, "used by another program");
    // A held lock whose key is overwritten is lost. Other locks in the same call are not affected.
    let (one, two) = (lock(&keeper, "b").await, lock(&keeper, "c").await);
    server.command(&["DEL", &key("b")]);
    server.command(&["RPUSH", &key("b"), "not", "a", "lock"]);
    let (lost, kept) = tokio::join!(one.extend(secs(30)), two.extend(secs(30)));
    assert_eq!(lost.unwrap_err().kind(), ErrorKind::Lost);
    kept.unwrap();
    two.release().await.unwrap();
    assert_eq!(number(&server, &["LLEN", &key("b")]), 3);
    assert_eq!(number(&server, &["LLEN", &key("a")]), 3);
}

async fn an_unknown_database_is_refused(make: RedisMake) {
    let server = RedisServer::builder().make(make).start_or_panic();
    let url = format!("redis://:{SECRET}@127.0.0.1:{}/16", server.port());
    refused(&url, ErrorKind::Config, "no database with that number").await;
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn a_mismatch_of_tls_and_plain_connections_is_an_error() {
    let server = RedisServer::builder().tls().start_or_panic();
    let tls_port = server.url().rsplit(':').next().unwrap().trim_end_matches('/').to_owned();
    let ca = server.ca_file();
    let ca = ca.display();
    let plain = server.port();
    let url = format!("rediss://:{SECRET}@localhost:{plain}/?ca_file={ca}&connect_timeout=2s");
    refused(&url, ErrorKind::Unavailable, &format!("localhost:{plain}: ")).await;
    let url = format!("redis://:{SECRET}@localhost:{tls_port}/?connect_timeout=2s");
    refused(&url, ErrorKind::Unavailable, &format!("localhost:{tls_port}: ")).await;
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn a_server_with_an_unknown_certificate_is_refused() {
    let server = RedisServer::builder().tls().start_or_panic();
    let other = RedisServer::builder().tls().start_or_panic();
    let wrong = format!("{}?ca_file={}", server.url(), other.ca_file().display());
    refused(&wrong, ErrorKind::Unavailable, "certificate").await;
    refused(&server.url(), ErrorKind::Unavailable, "certificate").await;
    let missing = format!("{}?ca_file=/nowhere/ca.pem", server.url());
    refused(&missing, ErrorKind::Config, "the CA file /nowhere/ca.pem").await;
}

/// Runs tests on all makes, whose error messages differ.
macro_rules! on_every_make {
    ($($test:ident)+) => {
        on_every_make! { on_redis Installed: $($test)+ }
        on_every_make! { on_redis_6_2 Redis62: $($test)+ }
        on_every_make! { on_redis_8_2 Redis82: $($test)+ }
        on_every_make! { on_valkey Valkey: $($test)+ }
    };
    ($name:ident $make:ident: $($test:ident)+) => {
        mod $name {
            use lockkeeper_testkit::server::RedisMake;
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $test() {
                    super::$test(RedisMake::$make).await;
                }
            )+
        }
    };
}

on_every_make! {
    the_documented_permissions_are_sufficient
    wrong_credentials_are_refused
    a_server_without_auth_is_an_error_without_the_password
    a_password_for_a_server_without_one_is_not_in_the_error
    a_user_without_permission_for_scripts_gets_a_config_error
    a_user_without_permission_for_a_command_of_a_script_gets_a_config_error
    a_user_without_permission_for_the_keys_gets_a_config_error
    a_user_without_permission_for_channels_polls_and_hands_off
    waiters_poll_when_their_user_loses_its_channels
    waiters_retry_when_the_subscribed_connection_is_killed
    a_read_only_replica_is_refused
    a_full_server_refuses_new_locks_and_serves_holders
    a_full_server_still_renews_readers_of_different_ttls
    a_key_of_the_wrong_type_is_an_error
    an_unknown_database_is_refused
}
