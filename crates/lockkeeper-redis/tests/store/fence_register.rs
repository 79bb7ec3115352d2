//! Fence registers.

use std::time::Duration;

use lockkeeper_core::{ErrorKind, Fence, FenceRegister};
use lockkeeper_redis::{Config, Fences, Redis};
use lockkeeper_testkit::fences::check_register;
use lockkeeper_testkit::server::{RedisCluster, RedisServer};
use lockkeeper_testkit::wait::{eventually, soon};

use crate::common::{number, open, secs};

const KEY: &str = "lockkeeper:fence:{a}:highest";

async fn fences(url: &str) -> Fences {
    let config = Config::from_url(url).unwrap();
    Fences::new(soon("a connection", Redis::connect(config)).await.unwrap())
}

async fn register(url: &str) -> FenceRegister {
    FenceRegister::new(fences(url).await)
}

fn fence(number: u64) -> Fence {
    Fence::new(number).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_register_works_over_several_connections() {
    let server = RedisServer::start_or_panic();
    let url = server.url();
    check_register(&[register(&url).await, register(&url).await, register(&url).await]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_register_works_on_a_cluster() {
    let cluster = RedisCluster::start_or_panic();
    let url = cluster.url();
    check_register(&[register(&url).await, register(&url).await]).await;
}

#[tokio::test]
async fn the_highest_fence_is_a_plain_key_with_an_expiry() {
    let server = RedisServer::start_or_panic();
    let fences = fences(&server.url()).await;
    let register = FenceRegister::new(fences.clone());
    assert!(register.check("a", fence(7)).await.unwrap().is_passed());
    assert_eq!(server.command(&["GET", KEY]), "7");
    let month = 30 * 24 * 60 * 60 * 1000;
    assert!((month - 60_000..=month).contains(&number(&server, &["PTTL", KEY])));
    assert!(!register.check("a", fence(6)).await.unwrap().is_passed());
    assert_eq!(server.command(&["KEYS", "*"]), KEY);

    // Each check that passes renews the expiry, also with the same fence. A check that fails changes nothing.
    let hour = FenceRegister::new(fences.clone().keep_for(secs(3600)));
    assert!(!hour.check("a", fence(6)).await.unwrap().is_passed());
    assert!(number(&server, &["PTTL", KEY]) > 3_600_000);
    assert!(hour.check("a", fence(7)).await.unwrap().is_passed());
    assert!((3_500_000..=3_600_000).contains(&number(&server, &["PTTL", KEY])));
    for bad in [Duration::ZERO, Duration::from_nanos(1), Duration::MAX] {
        let register = FenceRegister::new(fences.clone().keep_for(bad));
        let error = register.check("a", fence(8)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{bad:?}");
    }
}

#[tokio::test]
async fn inspection_does_not_list_registers() {
    let server = RedisServer::start_or_panic();
    let register = register(&server.url()).await;
    assert!(register.check("a", fence(7)).await.unwrap().is_passed());
    let keeper = open(&server.url()).await;
    assert_eq!(keeper.inspect().unwrap().list("").await.unwrap(), []);
    // The lock of that name is free, and breaking it does not change the register.
    let guard = keeper.mutex("a").try_lock().await.unwrap().unwrap();
    assert_eq!(keeper.inspect().unwrap().break_lock("a").await.unwrap(), 1);
    drop(guard);
    assert!(!register.check("a", fence(6)).await.unwrap().is_passed());
    keeper.close().await;
}

#[tokio::test]
async fn a_register_works_after_the_scripts_are_flushed_and_after_a_restart() {
    let mut server = RedisServer::builder().persistent().start_or_panic();
    let register = register(&server.url()).await;
    assert!(register.check("a", fence(7)).await.unwrap().is_passed());
    server.command(&["SCRIPT", "FLUSH"]);
    assert!(!register.check("a", fence(6)).await.unwrap().is_passed());
    server.restart().unwrap();
    eventually("a reconnect", async || match register.check("a", fence(6)).await {
        Ok(checked) => !checked.is_passed(),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            false
        }
    })
    .await;
}

#[tokio::test]
async fn a_check_fails_if_the_server_is_down() {
    let mut server = RedisServer::start_or_panic();
    let register = register(&server.url()).await;
    server.kill9();
    let error = soon("the error", register.check("a", fence(7))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().starts_with("redis: check the fence of \"a\": "), "{error}");
}

#[tokio::test]
async fn a_key_with_foreign_content_is_an_error_and_is_not_changed() {
    let server = RedisServer::start_or_panic();
    let register = register(&server.url()).await;
    for other in [["RPUSH", KEY, "x"], ["SET", KEY, "x"], ["SET", KEY, "-1"], ["SET", KEY, ""]] {
        server.command(&["DEL", KEY]);
        server.command(&other);
        let error = register.check("a", Fence::MAX).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    }
    assert_eq!(server.command(&["GET", KEY]), "");
}

#[tokio::test]
async fn a_check_that_no_replica_acknowledges_is_an_error() {
    let server = RedisServer::start_or_panic();
    let url = format!("{}?min_replicas=1", server.url());
    let error = soon("the error", register(&url).await.check("a", fence(7))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("0 of 1 replicas"), "{error}");
}
