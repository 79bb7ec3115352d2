//! Which claims wait on the server, in which order, and which poll.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockkeeper_core::Slots;
use lockkeeper_postgres::AdvisoryKey;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;

use crate::common::{
    client, eventually, helper, holders_and_waiters, keeper, name, sessions, soon, url,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_are_granted_in_order_of_arrival() {
    let name = name("processes");
    let guard = keeper("").mutex(name.clone()).lock().await.unwrap();
    let (client, key) = (client().await, AdvisoryKey::of(&name));
    let (sender, mut entered) = tokio::sync::mpsc::unbounded_channel();
    let mut processes = Vec::new();
    for i in 0..5 {
        let mut process = Command::new(helper())
            .args([&url(), &name, "30000", "hold"])
            // The process releases the lock as soon as it holds it.
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let sender = sender.clone();
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                if let Some(fence) = line.strip_prefix("held ") {
                    let _ = sender.send((fence.parse::<u64>().unwrap(), i));
                }
            }
        });
        processes.push(process);
        eventually("it waits", async || holders_and_waiters(&client, key).await == (1, i + 1))
            .await;
    }
    guard.release().await.unwrap();
    // The fences show the order. Lines of different processes may arrive in any order.
    let mut order = BTreeMap::new();
    for _ in 0..5 {
        let (fence, i) = soon("the next", entered.recv()).await.unwrap();
        order.insert(fence, i);
    }
    assert_eq!(order.into_values().collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    for mut process in processes {
        soon("its end", process.wait()).await.unwrap();
    }
}

/// Each store simulates a process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_the_waiters_for_a_permit_one_polls_and_the_others_wait_on_the_server() {
    let (application, name) = (name("permits"), name("semaphore"));
    let holder = keeper("").semaphore(name.clone(), 2).acquire_many(2).await.unwrap();
    // The table of names would be written over other sessions.
    let parameters = format!("application_name={application}&names_table=off");
    let waiters: Vec<_> = (0..5)
        .map(|_| {
            let semaphore = keeper(&parameters).semaphore(name.clone(), 2);
            tokio::spawn(async move { semaphore.acquire().await.unwrap().release().await.unwrap() })
        })
        .collect();
    let gate = AdvisoryKey::of(&Slots::parts(&name).next().unwrap());
    let client = client().await;
    let all_wait = async || holders_and_waiters(&client, gate).await == (1, 4);
    eventually("one is at the gate, four wait", all_wait).await;
    // When each session last started a statement.
    let sql = "SELECT pid, query_start::text FROM pg_stat_activity WHERE application_name = $1";
    let statements = async || {
        let rows = client.query(sql, &[&application]).await.unwrap();
        rows.iter().map(|row| (row.get(0), row.get(1))).collect::<BTreeMap<i32, String>>()
    };
    let before = statements().await;
    let active = async |before: &BTreeMap<i32, String>| {
        let now = statements().await;
        now.iter().filter(|(pid, start)| before.get(pid) != Some(start)).count()
    };
    eventually("one polls", async || active(&before).await > 0).await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    // The claim at the gate polls over one connection. The other four have sent only their wait.
    assert_eq!(active(&before).await, 1, "sessions that sent a statement");
    assert!(all_wait().await);
    holder.release().await.unwrap();
    for waiter in waiters {
        soon("a waiter", waiter).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_waiters_of_one_name_wait_on_one_session_and_keep_their_order() {
    let (application, name) = (name("thousand"), name("lock"));
    let keeper = keeper(&format!("application_name={application}&fence=off"));
    let guard = keeper.mutex(name.clone()).lock().await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut waiters = Vec::new();
    for i in 0..1000 {
        let (mutex, order) = (keeper.mutex(name.clone()), order.clone());
        let mut lock = Box::pin(async move { mutex.lock().await });
        // The first poll takes its place in the queue.
        let polled = std::future::poll_fn(|cx| std::task::Poll::Ready(lock.as_mut().poll(cx)));
        assert!(polled.await.is_pending(), "{i} did not wait");
        // If tokio's cooperative budget were used up, the next poll would return earlier.
        tokio::task::yield_now().await;
        waiters.push(tokio::spawn(async move {
            let guard = lock.await.unwrap();
            order.lock().unwrap().push(i);
            guard.release().await.unwrap();
        }));
    }
    let inspect = keeper.inspect().unwrap();
    let waiting = async || inspect.show(name.clone()).await.unwrap()[0].waiters.len();
    eventually("all wait", async || waiting().await == 1000).await;
    let (client, key) = (client().await, AdvisoryKey::of(&name));
    eventually("one waits", async || holders_and_waiters(&client, key).await == (1, 1)).await;
    guard.release().await.unwrap();
    let mut most = 0;
    while !waiters.iter().all(tokio::task::JoinHandle::is_finished) {
        most = most.max(holders_and_waiters(&client, key).await.1);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    for waiter in waiters {
        soon("a waiter", waiter).await.unwrap();
    }
    // `pg_locks` may still show the wait of a session that was just granted the lock.
    assert!(most <= 2, "{most} waited concurrently");
    assert!(order.lock().unwrap().is_sorted(), "{order:?}");
    let count = sessions(&client, &application).await;
    assert!(count <= 4, "{count} connections");
}

/// Readers of one name do not share a session, so without the local queue each would need one to wait on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_that_wait_for_a_writer_wait_on_one_session_and_then_hold_together() {
    let name = name("readers");
    let keeper = keeper("");
    let lock = keeper.rw_lock(name.clone());
    let writer = lock.write().await.unwrap();
    let readers: Vec<_> = (0..10)
        .map(|_| {
            let lock = lock.clone();
            tokio::spawn(async move { lock.read().await.unwrap() })
        })
        .collect();
    let inspect = keeper.inspect().unwrap();
    let waiting = async || inspect.show(name.clone()).await.unwrap()[0].waiters.len();
    eventually("all wait", async || waiting().await == 10).await;
    let (client, key) = (client().await, AdvisoryKey::of(&name));
    eventually("one waits", async || holders_and_waiters(&client, key).await == (1, 1)).await;
    writer.release().await.unwrap();
    let mut guards = Vec::new();
    for reader in readers {
        guards.push(soon("a reader", reader).await.unwrap());
    }
    assert_eq!(holders_and_waiters(&client, key).await, (10, 0));
    drop(guards);
    soon("close", keeper.close()).await;
}
