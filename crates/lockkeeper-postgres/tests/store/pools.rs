//! Connections from a pool of the user.

use std::time::Duration;

use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod};
use lockkeeper_core::{Fence, FenceRegister, Keeper};
use lockkeeper_postgres::{AdvisoryKey, Fences, Postgres};
use tokio_postgres::NoTls;

use crate::common::{eventually, name, soon, terminate_holders, url};

fn pool(size: usize) -> Pool {
    let config = ManagerConfig { recycling_method: RecyclingMethod::Fast };
    let manager = Manager::from_config(url().parse().unwrap(), NoTls, config);
    Pool::builder(manager).max_size(size).build().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_of_any_size_is_enough() {
    for size in [1, 3] {
        let keeper = Keeper::new(Postgres::from_pool(pool(size)));
        let name = name("pool");
        let mutex = keeper.mutex(name.clone());
        let guard = mutex.lock().await.unwrap();
        assert!(mutex.try_lock().await.unwrap().is_none());
        let other = keeper.mutex(format!("{name}/other")).lock().await.unwrap();
        let waiters: Vec<_> = (0..4)
            .map(|_| {
                let mutex = mutex.clone();
                tokio::spawn(async move { mutex.lock().await.unwrap().release().await.unwrap() })
            })
            .collect();
        guard.release().await.unwrap();
        for waiter in waiters {
            soon("a waiter", waiter).await.unwrap();
        }
        other.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_waiter_without_a_free_connection_in_the_pool_polls() {
    let (pool, name) = (pool(2), name("pool-used-up"));
    let keeper = Keeper::new(Postgres::from_pool(pool.clone())).ttl(Duration::from_secs(4));
    let guard = keeper.mutex(name.clone()).lock().await.unwrap();
    let _others = pool.get().await.unwrap();
    let waiter = tokio::spawn({
        let mutex = keeper.mutex(name);
        async move { mutex.lock().await }
    });
    // Longer than a TTL.
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(!waiter.is_finished(), "{:?}", soon("its error", waiter).await);
    guard.release().await.unwrap();
    soon("the waiter", waiter).await.unwrap().unwrap().release().await.unwrap();
    keeper.close().await;
}

/// A waiter needs one connection to wait on and one to confirm the wait, and other users of the pool may have taken the
/// second.
#[tokio::test]
async fn a_waiter_without_a_connection_to_confirm_its_wait_does_not_fail() {
    let (pool, name) = (pool(2), name("pool-shared"));
    let holder = crate::common::keeper("").mutex(name.clone()).lock().await.unwrap();
    let keeper = Keeper::new(Postgres::from_pool(pool.clone())).ttl(Duration::from_secs(2));
    let _others = pool.get().await.unwrap();
    let waiter = tokio::spawn({
        let mutex = keeper.mutex(name);
        async move { mutex.lock().await }
    });
    // Longer than the TTL, after which a waiter without an answer fails.
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(!waiter.is_finished(), "{:?}", soon("its error", waiter).await);
    holder.release().await.unwrap();
    soon("the waiter", waiter).await.unwrap().unwrap().release().await.unwrap();
    keeper.close().await;
}

#[tokio::test]
async fn the_end_of_a_pooled_connection_is_a_loss() {
    let (pool, name) = (pool(2), name("pool-loss"));
    let keeper = Keeper::new(Postgres::from_pool(pool)).ttl(Duration::from_secs(600));
    let guard = keeper.mutex(name.clone()).lock().await.unwrap();
    terminate_holders(AdvisoryKey::of(&name)).await;
    soon("the loss", guard.lost()).await;
    soon("lock", keeper.mutex(name).lock()).await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_connection_that_was_used_for_locks_is_not_returned_to_its_pool() {
    let pool = pool(2);
    let keeper = Keeper::new(Postgres::from_pool(pool.clone()));
    keeper.mutex(name("pool-back")).lock().await.unwrap().release().await.unwrap();
    assert_eq!(pool.status().size, 1);
    drop(keeper);
    eventually("the pool is empty", async || pool.status().size == 0).await;
    let object = pool.get().await.unwrap();
    let timeout = object.query_one("SHOW idle_session_timeout", &[]).await.unwrap();
    assert_eq!(timeout.get::<_, &str>(0), "0");
}

#[tokio::test]
async fn a_fence_register_returns_its_connections_to_the_pool() {
    let pool = pool(1);
    let fences = Fences::from_pool(pool.clone());
    soon("the table", fences.create_table()).await.unwrap();
    let (register, name) = (FenceRegister::new(fences), name("pool-fences"));
    for number in [3, 5, 7] {
        let fence = Fence::new(number).unwrap();
        assert!(soon("a check", register.check(&*name, fence)).await.unwrap().is_passed());
    }
    assert!(!register.check(&*name, Fence::new(6).unwrap()).await.unwrap().is_passed());
    assert_eq!((pool.status().size, pool.status().available), (1, 1));
}
