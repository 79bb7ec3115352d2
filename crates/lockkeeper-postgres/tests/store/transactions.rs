//! Locks that belong to a transaction of the caller.

use std::time::Duration;

use lockkeeper_postgres::TransactionLock;
use tokio_postgres::Transaction;

use crate::common::{client, eventually, holders_and_waiters, keeper, name, soon};

async fn timeouts(transaction: &Transaction<'_>) -> (String, String) {
    let sql = "SELECT current_setting('lock_timeout'), current_setting('statement_timeout')";
    let row = transaction.query_one(sql, &[]).await.unwrap();
    (row.get(0), row.get(1))
}

#[tokio::test]
async fn a_lock_ends_with_its_transaction() {
    let (keeper, name) = (keeper(""), name("ends"));
    let mut client = client().await;
    for commit in [true, false] {
        let transaction = client.transaction().await.unwrap();
        TransactionLock::new(&name).lock(&transaction).await.unwrap();
        assert!(keeper.mutex(name.clone()).try_lock().await.unwrap().is_none());
        if commit {
            transaction.commit().await.unwrap();
        } else {
            transaction.rollback().await.unwrap();
        }
        let guard = keeper.mutex(name.clone()).try_lock().await.unwrap().expect("free again");
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_wait_that_ends_without_the_lock_leaves_the_transaction_unchanged() {
    let (keeper, name) = (keeper(""), name("over"));
    let mut client = client().await;
    client.batch_execute("CREATE TEMP TABLE written (n int)").await.unwrap();
    let guard = keeper.mutex(name.clone()).lock().await.unwrap();
    let transaction = client.transaction().await.unwrap();
    let set = "SET lock_timeout = '77s'; SET LOCAL statement_timeout = '88s'";
    transaction.batch_execute(set).await.unwrap();
    transaction.execute("INSERT INTO written VALUES (1)", &[]).await.unwrap();
    let lock = TransactionLock::new(&name);
    assert!(!lock.try_lock(&transaction).await.unwrap());
    assert!(!lock.try_lock_for(&transaction, Duration::ZERO).await.unwrap());
    // Rounded down to zero, this would be a wait without limit.
    let shortest = lock.try_lock_for(&transaction, Duration::from_nanos(1));
    assert!(!soon("the shortest wait", shortest).await.unwrap());
    let start = std::time::Instant::now();
    let wait = Duration::from_millis(300);
    assert!(!lock.shared().try_lock_for(&transaction, wait).await.unwrap());
    assert!(start.elapsed() >= wait);
    assert_eq!(timeouts(&transaction).await, ("77s".into(), "88s".into()));
    guard.release().await.unwrap();
    assert!(lock.try_lock_for(&transaction, Duration::from_secs(60)).await.unwrap());
    assert_eq!(timeouts(&transaction).await, ("77s".into(), "88s".into()));
    transaction.commit().await.unwrap();
    let row =
        client.query_one("SELECT count(*), current_setting('lock_timeout') FROM written", &[]);
    let row = row.await.unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, &str>(1)), (1, "77s"));
}

#[tokio::test]
async fn the_timeouts_of_the_transaction_do_not_end_a_wait() {
    let (keeper, name) = (keeper(""), name("patient"));
    let guard = keeper.mutex(name.clone()).lock().await.unwrap();
    let mut client = client().await;
    client.batch_execute("SET lock_timeout = 200; SET statement_timeout = 200").await.unwrap();
    let waiting = tokio::spawn({
        let name = name.clone();
        async move {
            let transaction = client.transaction().await.unwrap();
            TransactionLock::new(&name).lock(&transaction).await.unwrap();
            assert_eq!(timeouts(&transaction).await, ("200ms".into(), "200ms".into()));
            transaction.commit().await.unwrap();
        }
    });
    let (watch, key) = (crate::common::client().await, lockkeeper_postgres::AdvisoryKey::of(&name));
    eventually("it waits", async || holders_and_waiters(&watch, key).await == (1, 1)).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    guard.release().await.unwrap();
    soon("the transaction", waiting).await.unwrap();
}

#[tokio::test]
async fn shared_locks_of_transactions_are_shared() {
    let (keeper, name) = (keeper(""), name("shared"));
    let (mut one, mut two) = (client().await, client().await);
    let (one, two) = (one.transaction().await.unwrap(), two.transaction().await.unwrap());
    let lock = TransactionLock::new(&name);
    lock.shared().lock(&one).await.unwrap();
    assert!(lock.shared().try_lock(&two).await.unwrap());
    assert!(!lock.try_lock_for(&two, Duration::from_millis(50)).await.unwrap());
    drop(keeper.rw_lock(name.clone()).try_read().await.unwrap().expect("readers share"));
    assert!(keeper.rw_lock(name).try_write().await.unwrap().is_none());
}

/// The server detects the deadlock after a second, and ends one of the waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_error_of_a_deadlock_says_what_to_do() {
    let (a, b) = (name("deadlock-a"), name("deadlock-b"));
    let both = |first: String, second: String, barrier: std::sync::Arc<tokio::sync::Barrier>| async move {
        let mut client = client().await;
        let transaction = client.transaction().await.unwrap();
        TransactionLock::new(&first).lock(&transaction).await.unwrap();
        barrier.wait().await;
        let second = TransactionLock::new(&second).lock(&transaction).await;
        // In both cases, the transaction is still usable.
        transaction.query_one("SELECT 1", &[]).await.unwrap();
        let timeouts = timeouts(&transaction).await;
        transaction.commit().await.unwrap();
        (second, timeouts)
    };
    let barrier = std::sync::Arc::new(tokio::sync::Barrier::new(2));
    let one = tokio::spawn(both(a.clone(), b.clone(), barrier.clone()));
    let two = tokio::spawn(both(b, a, barrier));
    let ended = soon("both", async { [one.await.unwrap(), two.await.unwrap()] }).await;
    assert!(ended.iter().all(|(_, timeouts)| *timeouts == ("0".into(), "0".into())), "{ended:?}");
    let errors: Vec<_> = ended.iter().filter_map(|(locked, _)| locked.as_ref().err()).collect();
    let [error] = errors[..] else { panic!("not exactly one error: {ended:?}") };
    assert_eq!(error.kind(), lockkeeper_core::ErrorKind::Unavailable);
    assert!(error.to_string().starts_with("deadlock detected: "), "{error}");
    assert!(error.to_string().contains("in the same order"), "{error}");
}
