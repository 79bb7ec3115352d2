//! Ways to a server.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod};
use lockkeeper_core::Keeper;
use lockkeeper_postgres::{AdvisoryKey, Postgres};
use lockkeeper_testkit::server::PostgresServer;
use tokio_postgres::NoTls;

use crate::common::{client, eventually, name, soon, terminate_holders, url};

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
async fn a_waiter_waits_although_the_pool_has_nothing_left() {
    let (pool, name) = (pool(2), name("pool-used-up"));
    let keeper = Keeper::new(Postgres::from_pool(pool.clone())).ttl(Duration::from_secs(4));
    let guard = keeper.mutex(name.clone()).lock().await.unwrap();
    let _others = pool.get().await.unwrap();
    let waiter = tokio::spawn({
        let mutex = keeper.mutex(name);
        async move { mutex.lock().await }
    });
    // Longer than the first ask may take.
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(!waiter.is_finished(), "{:?}", soon("its error", waiter).await);
    guard.release().await.unwrap();
    soon("the waiter", waiter).await.unwrap().unwrap().release().await.unwrap();
    keeper.close().await;
}

/// Whatever else uses the pool: a waiter needs a connection to wait on and one to confirm the wait.
#[tokio::test]
async fn a_waiter_outlasts_a_pool_that_others_have_used_up() {
    let (pool, name) = (pool(2), name("pool-shared"));
    let holder = crate::common::keeper("").mutex(name.clone()).lock().await.unwrap();
    let keeper = Keeper::new(Postgres::from_pool(pool.clone())).ttl(Duration::from_secs(2));
    let _others = pool.get().await.unwrap();
    let waiter = tokio::spawn({
        let mutex = keeper.mutex(name);
        async move { mutex.lock().await }
    });
    // Longer than a waiter bears without an answer.
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(!waiter.is_finished(), "{:?}", soon("its error", waiter).await);
    holder.release().await.unwrap();
    soon("the waiter", waiter).await.unwrap().unwrap().release().await.unwrap();
    keeper.close().await;
}

#[tokio::test]
async fn the_end_of_a_pools_connection_is_told() {
    let (pool, name) = (pool(2), name("pool-loss"));
    let keeper = Keeper::new(Postgres::from_pool(pool)).ttl(Duration::from_secs(600));
    let guard = keeper.mutex(name.clone()).lock().await.unwrap();
    terminate_holders(AdvisoryKey::of(&name)).await;
    soon("to be told", guard.lost()).await;
    soon("lock", keeper.mutex(name).lock()).await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_connection_that_was_used_for_locks_does_not_go_back_to_its_pool() {
    let pool = pool(2);
    let keeper = Keeper::new(Postgres::from_pool(pool.clone()));
    keeper.mutex(name("pool-back")).lock().await.unwrap().release().await.unwrap();
    assert_eq!(pool.status().size, 1);
    drop(keeper);
    eventually("the pool has its room back", async || pool.status().size == 0).await;
    let object = pool.get().await.unwrap();
    let timeout = object.query_one("SHOW idle_session_timeout", &[]).await.unwrap();
    assert_eq!(timeout.get::<_, &str>(0), "0");
}

#[tokio::test]
async fn the_drivers_own_configuration_will_do() {
    let keeper = Keeper::new(Postgres::from_config(url().parse().unwrap()).unwrap());
    keeper.mutex(name("config")).lock().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_unix_socket_will_do() {
    let dir = tempfile::Builder::new().prefix("lk-").tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let path = dir.path().to_str().unwrap();
    let directories = format!("unix_socket_directories={path}");
    let server = PostgresServer::with_args(&["-c", &directories]).unwrap();
    let socket = path.replace('/', "%2F");
    let url = format!("postgres://postgres@{socket}:{}/postgres", server.port());
    let keeper = Keeper::new(Postgres::connect(&url).await.unwrap());
    let mutex = keeper.mutex("a");
    let guard = mutex.lock().await.unwrap();
    // A cancel goes over the socket, too.
    assert!(mutex.try_lock_for(Duration::from_secs(2)).await.unwrap().is_none());
    guard.release().await.unwrap();
    keeper.close().await;
}

#[tokio::test]
async fn an_ordinary_role_will_do() {
    let role = name("role").replace('-', "_");
    client().await.batch_execute(&format!("CREATE ROLE {role} LOGIN")).await.unwrap();
    let url = url().replace("postgres@", &format!("{role}@"));
    let keeper = Keeper::new(Postgres::connect(&url).await.unwrap());
    let guard = keeper.mutex(name("ordinary")).lock().await.unwrap();
    assert!(guard.fence().is_some());
    guard.release().await.unwrap();
    let permit = keeper.semaphore(name("ordinary"), 2).acquire().await.unwrap();
    permit.release().await.unwrap();
}

/// A role may have timeouts of its own, and an asynchronous commit.
#[tokio::test]
async fn what_a_role_has_set_for_itself_does_not_end_a_wait() {
    let role = name("hasty").replace('-', "_");
    let sql = format!(
        "CREATE ROLE {role} LOGIN; ALTER ROLE {role} SET statement_timeout = 150; \
         ALTER ROLE {role} SET lock_timeout = 150; ALTER ROLE {role} SET synchronous_commit = off"
    );
    client().await.batch_execute(&sql).await.unwrap();
    let url = url().replace("postgres@", &format!("{role}@"));
    let (holder, keeper) = (crate::common::keeper(""), Keeper::new(Postgres::new(&url).unwrap()));
    let name = name("hasty");
    let guard = holder.mutex(name.clone()).lock().await.unwrap();
    let mutex = keeper.mutex(name.clone());
    let waiter = tokio::spawn(async move { mutex.lock().await.unwrap() });
    let (client, key) = (client().await, AdvisoryKey::of(&name));
    let waits = async || crate::common::holders_and_waiters(&client, key).await == (1, 1);
    eventually("it waits", waits).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(waits().await, "it was ended");
    guard.release().await.unwrap();
    soon("the waiter", waiter).await.unwrap().release().await.unwrap();
}
