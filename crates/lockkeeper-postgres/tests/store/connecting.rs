//! Ways to connect to a server.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use lockkeeper_core::Keeper;
use lockkeeper_postgres::{AdvisoryKey, Postgres};
use lockkeeper_testkit::server::PostgresServer;

use crate::common::{client, eventually, name, soon, url};

#[tokio::test]
async fn a_store_can_be_created_from_the_drivers_configuration() {
    let keeper = Keeper::new(Postgres::from_config(url().parse().unwrap()).unwrap());
    keeper.mutex(name("config")).lock().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_store_can_connect_over_a_unix_socket() {
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
    // The cancel request is sent over the socket, too.
    assert!(mutex.try_lock_for(Duration::from_secs(2)).await.unwrap().is_none());
    guard.release().await.unwrap();
    keeper.close().await;
}

#[tokio::test]
async fn a_role_without_privileges_can_lock() {
    // A role with more privileges has created the sequence of fences.
    let owner = crate::common::keeper("");
    owner.mutex(name("first")).lock().await.unwrap().release().await.unwrap();
    let role = name("role").replace('-', "_");
    client().await.batch_execute(&format!("CREATE ROLE {role} LOGIN")).await.unwrap();
    // It may draw fences from the sequence, and not create it.
    drop(crate::common::keeper("").mutex(name("first")).lock().await.unwrap());
    let url = url().replace("postgres@", &format!("{role}@"));
    let keeper = Keeper::new(Postgres::connect(&url).await.unwrap());
    let guard = keeper.mutex(name("ordinary")).lock().await.unwrap();
    assert!(guard.fence().is_some());
    guard.release().await.unwrap();
    let permit = keeper.semaphore(name("ordinary"), 2).acquire().await.unwrap();
    permit.release().await.unwrap();
}

#[tokio::test]
async fn timeouts_in_the_settings_of_a_role_do_not_end_a_wait() {
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
    assert!(waits().await, "the wait was ended");
    guard.release().await.unwrap();
    soon("the waiter", waiter).await.unwrap().release().await.unwrap();
}
