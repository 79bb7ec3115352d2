//! Fence registers, and the SQL of the fencing guide.

use std::time::Duration;

use lockkeeper_core::{ErrorKind, Fence, FenceCheck, FenceRegister};
use lockkeeper_postgres::Fences;
use lockkeeper_testkit::fences::check_register;
use tokio::task::JoinSet;
use tokio_postgres::Client;

use crate::common::{client, client_at, eventually, name, soon, url};

const GUIDE: &str = include_str!("../../../../docs/guides/fencing.md");

fn fence(number: u64) -> Fence {
    Fence::new(number).unwrap()
}

/// Returns a register on the shared server, and creates its table.
async fn fences(parameters: &str) -> Fences {
    let fences = Fences::new(&format!("{}?{parameters}", url())).unwrap();
    soon("the table", fences.create_table()).await.unwrap();
    fences
}

/// Creates an empty database, and returns its URL.
async fn database(what: &str) -> String {
    let name = name(what).replace('-', "_");
    client().await.batch_execute(&format!("CREATE DATABASE {name}")).await.unwrap();
    let shared = url();
    let (server, _) = shared.rsplit_once('/').unwrap();
    format!("{server}/{name}")
}

#[tokio::test(flavor = "multi_thread")]
async fn registers_with_separate_connections_agree() {
    let one = FenceRegister::new(fences("max_connections=8").await);
    let other = FenceRegister::new(fences("max_connections=8").await);
    check_register(&[one, other]).await;
}

#[tokio::test]
async fn many_clients_can_create_the_table_concurrently() {
    let url = database("created").await;
    let (client, fences) = (client_at(&url).await, [(); 8].map(|()| Fences::new(&url)));
    // Repeated, because the race can cause several different errors.
    for _ in 0..20 {
        let mut creating = JoinSet::new();
        for fences in fences.iter().cloned().map(Result::unwrap) {
            creating.spawn(async move { fences.create_table().await });
        }
        while let Some(created) = soon("the table", creating.join_next()).await {
            created.unwrap().unwrap();
        }
        client.batch_execute("DROP TABLE lockkeeper_fences").await.unwrap();
    }
}

#[tokio::test]
async fn the_error_of_a_missing_table_says_what_to_do() {
    let url = database("tableless").await;
    let register = FenceRegister::new(Fences::new(&url).unwrap());
    let error = register.check("a", fence(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("call Fences::create_table"), "{error}");
}

#[tokio::test]
async fn a_check_fails_without_showing_the_password_if_the_server_cannot_be_reached() {
    let fences = Fences::new("postgres://me:hunter2@127.0.0.1:1/app").unwrap();
    assert!(!format!("{fences:?}").contains("hunter2"));
    let register = FenceRegister::new(fences);
    assert!(!format!("{register:?}").contains("hunter2"));
    let error = soon("the answer", register.check("a", fence(1))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("127.0.0.1:1: Connection refused"), "{error}");
    assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
}

#[tokio::test]
async fn a_check_in_a_transaction_blocks_other_checks_until_it_ends() {
    let (register, name) = (FenceRegister::new(fences("").await), name("within"));
    let (mut one, watch) = (client().await, client().await);
    for commit in [false, true] {
        let transaction = one.transaction().await.unwrap();
        let checked = Fences::check_in(&transaction, &name, fence(7)).await.unwrap();
        assert!(checked.is_passed());
        let other = tokio::spawn({
            let (register, name) = (register.clone(), name.clone());
            async move { register.check(name, fence(5)).await.unwrap() }
        });
        let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
                     AND query LIKE '%INSERT INTO lockkeeper_fences%'";
        eventually("the other waits", async || {
            watch.query_one(waits, &[]).await.unwrap().get::<_, i64>(0) > 0
        })
        .await;
        assert!(!other.is_finished());
        let stale = FenceCheck::Stale { highest: fence(7) };
        if commit {
            transaction.commit().await.unwrap();
            assert_eq!(soon("the other", other).await.unwrap(), stale);
        } else {
            transaction.rollback().await.unwrap();
            assert_eq!(soon("the other", other).await.unwrap(), FenceCheck::Passed);
        }
    }
    let transaction = one.transaction().await.unwrap();
    let checked = Fences::check_in(&transaction, &name, fence(6)).await.unwrap();
    assert_eq!(checked, FenceCheck::Stale { highest: fence(7) });
    // The transaction is still usable.
    transaction.batch_execute("SELECT 1").await.unwrap();
    let error = Fences::check_in(&transaction, "", fence(6)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidName);
}

#[tokio::test]
async fn an_abandoned_check_does_not_block_the_next() {
    let (register, held) = (FenceRegister::new(fences("max_connections=1").await), name("held"));
    let mut one = client().await;
    let transaction = one.transaction().await.unwrap();
    assert!(Fences::check_in(&transaction, &held, fence(7)).await.unwrap().is_passed());
    let blocked = register.check(held.as_str(), fence(8));
    assert!(tokio::time::timeout(Duration::from_millis(50), blocked).await.is_err());
    // The limit is one connection, and the transaction is still open.
    let free = register.check(name("free"), fence(1));
    assert!(soon("another name", free).await.unwrap().is_passed());
    transaction.commit().await.unwrap();
    assert!(soon("the name", register.check(held, fence(8))).await.unwrap().is_passed());
}

#[tokio::test]
async fn abandoned_checks_leave_no_session_waiting_on_the_server() {
    let held = name("left");
    let fences = fences(&format!("max_connections=2&application_name={held}")).await;
    let register = FenceRegister::new(fences);
    let (mut one, watch) = (client().await, client().await);
    let transaction = one.transaction().await.unwrap();
    assert!(Fences::check_in(&transaction, &held, fence(7)).await.unwrap().is_passed());
    let waiting = "SELECT count(*) FROM pg_stat_activity \
                   WHERE application_name = $1 AND wait_event_type = 'Lock'";
    let waiting = async || watch.query_one(waiting, &[&held]).await.unwrap().get::<_, i64>(0);
    for _ in 0..4 {
        let blocked = register.check(held.as_str(), fence(8));
        let is_blocked = eventually("the check waits", async || waiting().await > 0);
        tokio::select! {
            _ = blocked => panic!("the transaction is still open"),
            () = is_blocked => {}
        }
        // The check was dropped, and the transaction is still open.
        eventually("no session waits", async || waiting().await == 0).await;
    }
    transaction.commit().await.unwrap();
    assert!(soon("the name", register.check(held, fence(8))).await.unwrap().is_passed());
}

#[tokio::test]
async fn a_stale_check_writes_nothing() {
    let (register, name, watch) =
        (FenceRegister::new(fences("").await), name("idle"), client().await);
    assert!(register.check(name.as_str(), fence(7)).await.unwrap().is_passed());
    let row = "SELECT xmin::text, ctid::text FROM lockkeeper_fences WHERE name = $1";
    let before = watch.query_one(row, &[&name]).await.unwrap();
    assert!(!register.check(name.as_str(), fence(6)).await.unwrap().is_passed());
    let after = watch.query_one(row, &[&name]).await.unwrap();
    for column in 0..2 {
        assert_eq!(before.get::<_, &str>(column), after.get::<_, &str>(column));
    }
}

/// Returns the statements of the guide, in order.
fn statements() -> Vec<&'static str> {
    let blocks = GUIDE.split("```sql\n").skip(1);
    blocks.map(|block| block.split_once("\n```").unwrap().0).collect()
}

async fn write(client: &Client, statement: &str, state: &str, fence: i64, id: i32) -> u64 {
    client.execute(statement, &[&state, &fence, &id]).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_guides_statements_refuse_a_lower_fence_with_many_concurrent_writers() {
    let url = database("guide").await;
    let client = client_at(&url).await;
    let [column, update, insert, ..] = statements()[..] else { panic!("the guide has changed") };
    let orders = "CREATE TABLE orders (id int PRIMARY KEY, state text NOT NULL);
                  INSERT INTO orders VALUES (1, 'new')";
    client.batch_execute(orders).await.unwrap();
    client.batch_execute(column).await.unwrap();
    for (statement, id) in [(update, 1), (insert, 1), (insert, 2)] {
        let higher = 10 * i64::from(id) + i64::from(statement == insert);
        assert_eq!(write(&client, statement, "paid", higher, id).await, 1, "{statement}");
        assert_eq!(write(&client, statement, "sent", higher, id).await, 1, "{statement}");
        assert_eq!(write(&client, statement, "late", higher - 1, id).await, 0, "{statement}");
        let state = client.query_one("SELECT state FROM orders WHERE id = $1", &[&id]).await;
        assert_eq!(state.unwrap().get::<_, &str>(0), "sent");
    }
    let mut writers = JoinSet::new();
    for number in 1..=40 {
        let (url, statement) = (url.clone(), if number % 2 == 0 { update } else { insert });
        writers.spawn(async move {
            let client = client_at(&url).await;
            let fence = 100 + number * 7 % 41;
            write(&client, statement, &fence.to_string(), fence, 1).await;
        });
    }
    while let Some(written) = soon("the writers", writers.join_next()).await {
        written.unwrap();
    }
    let row = client.query_one("SELECT state, fence FROM orders WHERE id = 1", &[]).await.unwrap();
    assert_eq!((row.get::<_, &str>(0), row.get::<_, i64>(1)), ("140", 140));
}

#[tokio::test]
async fn the_guides_register_is_that_of_the_library() {
    let url = database("register").await;
    let client = client_at(&url).await;
    let [_, _, _, table, check, delete] = statements()[..] else { panic!("the guide has changed") };
    client.batch_execute(table).await.unwrap();
    let fences = Fences::new(&url).unwrap();
    fences.create_table().await.unwrap();
    let register = FenceRegister::new(fences);
    assert!(register.check("a", fence(7)).await.unwrap().is_passed());
    for (number, passed) in [(6_i64, false), (7, true), (9, true)] {
        let rows = client.query(check, &[&"a", &number]).await.unwrap();
        assert_eq!(!rows.is_empty(), passed, "{number}");
    }
    let stale = FenceCheck::Stale { highest: fence(9) };
    assert_eq!(register.check("a", fence(8)).await.unwrap(), stale);
    // Rows of the last month are kept.
    let old = "UPDATE lockkeeper_fences SET passed_at = now() - interval '31 days'";
    assert_eq!(client.execute(delete, &[]).await.unwrap(), 0);
    client.batch_execute(old).await.unwrap();
    assert_eq!(client.execute(delete, &[]).await.unwrap(), 1);
    // The same SQL as in the library, without its comments.
    for (shown, file) in [
        (table, include_str!("../../src/fences/table.sql")),
        (check, include_str!("../../src/fences/check.sql")),
    ] {
        let file = file.lines().filter(|line| !line.starts_with("--")).collect::<Vec<_>>();
        assert_eq!(shown, file.join("\n"));
    }
}
