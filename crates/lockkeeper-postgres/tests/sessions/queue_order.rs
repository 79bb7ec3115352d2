//! Which claims wait on the server, in which order, and which poll.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::Duration;

use lockkeeper_core::Slots;
use lockkeeper_postgres::AdvisoryKey;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;

use crate::common::{client, eventually, helper, holders_and_waiters, keeper, name, soon, url};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_are_granted_in_order_of_arrival() {
    let name = name("processes");
    let guard = keeper("").mutex(name.clone()).lock().await.unwrap();
    let (client, key) = (client().await, AdvisoryKey::of(&name));
    let (tell, mut entered) = tokio::sync::mpsc::unbounded_channel();
    let mut processes = Vec::new();
    for i in 0..5 {
        let mut process = Command::new(helper())
            .args([&url(), &name, "30000", "hold"])
            // It gives the lock back as soon as it has it.
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let tell = tell.clone();
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                if let Some(fence) = line.strip_prefix("held ") {
                    let _ = tell.send((fence.parse::<u64>().unwrap(), i));
                }
            }
        });
        processes.push(process);
        eventually("it waits", async || holders_and_waiters(&client, key).await == (1, i + 1))
            .await;
    }
    guard.release().await.unwrap();
    // Fences tell the order; lines of different processes may come in any.
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

/// Each store stands for a process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_the_waiters_for_a_permit_one_polls_and_the_others_wait_on_the_server() {
    let (application, name) = (name("looks"), name("semaphore"));
    let holder = keeper("").semaphore(name.clone(), 2).acquire_many(2).await.unwrap();
    let parameters = format!("application_name={application}");
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
    let asked = async || {
        let rows = client.query(sql, &[&application]).await.unwrap();
        rows.iter().map(|row| (row.get(0), row.get(1))).collect::<BTreeMap<i32, String>>()
    };
    let before = asked().await;
    let looked = async |before: &BTreeMap<i32, String>| {
        let now = asked().await;
        now.iter().filter(|(pid, start)| before.get(pid) != Some(start)).count()
    };
    eventually("one looks", async || looked(&before).await > 0).await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    // The one at the gate looks over one connection, and the four have each sent nothing but their wait.
    assert_eq!(looked(&before).await, 1, "sessions that were asked something meanwhile");
    assert!(all_wait().await);
    holder.release().await.unwrap();
    for waiter in waiters {
        soon("a waiter", waiter).await.unwrap();
    }
}
