//! The plugin trait: the same cases on every kind of store, leases and sessions.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod cases;

use std::sync::Arc;
use std::time::{Duration, Instant};

use lockkeeper::backend::{Backend, Quorum};
use lockkeeper::plugin::{KeeperPlugin, LockPlugin};
use lockkeeper::{Keeper, Memory, ReleaseOutcome};
use lockkeeper_testkit::server::{PostgresServer, RedisServer};
use lockkeeper_testkit::{Fault, Faulty, Flock, Op};

use crate::cases::{Store, check};

#[test]
fn all_cases_pass_on_memory() {
    let memory = Memory::new();
    let plugin =
        || -> Box<dyn LockPlugin> { Box::new(KeeperPlugin::new(Keeper::new(memory.clone()))) };
    check(&Store { plugin: &plugin, leases: true });
}

#[tokio::test(flavor = "current_thread")]
async fn all_cases_pass_with_a_keeper_of_a_blocked_runtime() {
    let keeper = Keeper::new(Memory::new());
    let plugin = || -> Box<dyn LockPlugin> { Box::new(KeeperPlugin::new(keeper.clone())) };
    check(&Store { plugin: &plugin, leases: true });
}

#[test]
fn all_cases_pass_on_a_quorum() {
    let nodes = [Memory::new(), Memory::new(), Memory::new()];
    let plugin = || -> Box<dyn LockPlugin> {
        let nodes = nodes.clone().map(|node| Arc::new(node) as Arc<dyn Backend>);
        Box::new(KeeperPlugin::new(Keeper::new(Quorum::new(nodes.to_vec()).unwrap())))
    };
    check(&Store { plugin: &plugin, leases: true });
}

#[test]
fn all_cases_pass_on_locked_files() {
    let dir = tempfile::tempdir().unwrap();
    let plugin = || -> Box<dyn LockPlugin> {
        let store: Arc<dyn Backend> = Arc::new(Flock::new(dir.path()));
        Box::new(KeeperPlugin::new(Keeper::from_backend(store)))
    };
    check(&Store { plugin: &plugin, leases: false });
}

fn on(url: &str) -> Box<dyn LockPlugin> {
    Box::new(KeeperPlugin::new(lockkeeper::blocking::open(url).unwrap()))
}

#[test]
fn all_cases_pass_on_redis_and_a_dead_server_is_an_error() {
    let mut server = RedisServer::start_or_panic();
    let plugin = || on(&server.url());
    check(&Store { plugin: &plugin, leases: true });
    assert_eq!(server.command(&["DBSIZE"]).trim().trim_start_matches(':'), "0", "a key is left");
    let plugin = plugin();
    server.kill9();
    let error = plugin.try_lock("a", Duration::from_secs(2)).unwrap_err();
    assert!(error.starts_with("redis: lock \"a\": "), "{error}");
}

#[test]
fn all_cases_pass_on_postgres_and_a_dead_server_is_an_error() {
    let mut server = PostgresServer::with_args(&["-c", "fsync=off"]).unwrap();
    let plugin = || on(&server.url());
    check(&Store { plugin: &plugin, leases: false });
    let plugin = plugin();
    server.kill9();
    let error = plugin.try_lock("a", Duration::from_secs(2)).unwrap_err();
    assert!(error.starts_with("postgres: lock \"a\": "), "{error}");
}

#[test]
fn a_store_that_is_down_is_an_error_not_contention_or_loss() {
    let (store, faults) = Faulty::new(Memory::new());
    let plugin = KeeperPlugin::new(Keeper::new(store));
    let ttl = Duration::from_secs(60);
    let handle = plugin.try_lock("a", ttl).unwrap().unwrap();
    faults.everything(Fault::Refused);
    let refused = |error: String| {
        assert!(error.contains("connection refused") && !error.contains('\n'), "{error}");
    };
    refused(plugin.try_lock("b", ttl).unwrap_err());
    refused(plugin.renew(&handle, ttl).unwrap_err());
    faults.none();
    assert_eq!(plugin.try_lock("a", ttl).unwrap(), None, "still held");
    faults.everything(Fault::Refused);
    refused(plugin.release(handle).unwrap_err());
}

#[test]
fn a_release_sends_no_renewal_and_a_failed_release_does_not_extend_the_lease() {
    let memory = Memory::new();
    let (store, faults) = Faulty::new(memory.clone());
    let plugin = KeeperPlugin::new(Keeper::new(store));
    let handle = plugin.try_lock("a", Duration::from_secs(60)).unwrap().unwrap();
    assert_eq!(plugin.release(handle.clone()).unwrap(), ReleaseOutcome::Released);
    assert_eq!(plugin.release(handle).unwrap(), ReleaseOutcome::AlreadyLost);
    assert_eq!(faults.asked(Op::Renew), 0);
    assert_eq!(faults.asked(Op::Release), 2);

    let ttl = Duration::from_secs(5);
    let handle = plugin.try_lock("a", ttl).unwrap().unwrap();
    faults.always(Op::Release, Fault::Refused);
    let error = plugin.release(handle).unwrap_err();
    assert!(error.starts_with("memory: release \"a\": connection refused"), "{error}");
    let shown = Keeper::new(memory).inspect().unwrap().blocking_show("a").unwrap();
    let remaining = shown.first().map(|info| info.holders[0].remaining.unwrap());
    assert!(remaining.is_none_or(|remaining| remaining <= ttl), "{remaining:?}");
    assert_eq!(faults.asked(Op::Renew), 0);
}

#[test]
fn a_failed_release_is_retried_in_the_background() {
    let (store, faults) = Faulty::new(Memory::new());
    let plugin = KeeperPlugin::new(Keeper::new(store));
    let ttl = Duration::from_secs(60);
    let handle = plugin.try_lock("a", ttl).unwrap().unwrap();
    faults.once(Op::Release, Fault::Refused);
    plugin.release(handle).unwrap_err();
    let start = Instant::now();
    while plugin.try_lock("a", ttl).unwrap().is_none() {
        assert!(start.elapsed() < Duration::from_secs(30), "not released");
        std::thread::sleep(Duration::from_millis(10));
    }
}
