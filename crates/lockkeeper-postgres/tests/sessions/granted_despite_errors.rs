//! Locks that the server grants although it answers the wait with an error.
//!
//! On a real server, the race has a window of microseconds. These tests force it with a slow commit, a frozen connection,
//! and a proxy that replaces answers.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lockkeeper_core::Keeper;
use lockkeeper_postgres::{AdvisoryKey, Postgres};
use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::PostgresServer;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio_postgres::Client;

use crate::common::{
    client, client_at, eventually, holders_and_waiters, keeper, name, server, soon,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_granted_while_a_cancel_is_in_flight_is_released() {
    let name = name("frozen");
    let proxy = Proxy::start(server().addr()).await.unwrap();
    let url = format!("postgres://postgres@{}/postgres", proxy.addr());
    let far = Keeper::new(Postgres::new(&url).unwrap()).ttl(Duration::from_secs(600));
    let near = keeper("");
    let guard = near.mutex(name.clone()).lock().await.unwrap();
    let mutex = far.mutex(name.clone());
    let waiter = tokio::spawn(async move { mutex.lock().await });
    let (client, key) = (client().await, AdvisoryKey::of(&name));
    eventually("it waits", async || holders_and_waiters(&client, key).await == (1, 1)).await;
    proxy.freeze();
    guard.release().await.unwrap();
    // The session holds the lock, and the client does not know it.
    eventually("it is granted", async || holders_and_waiters(&client, key).await == (1, 0)).await;
    waiter.abort();
    assert!(waiter.await.unwrap_err().is_cancelled());
    proxy.heal();
    soon("close", far.close()).await;
    // Without a wait: the release has returned.
    assert_eq!(holders_and_waiters(&client, key).await, (0, 0));
}

/// Returns how many sessions wait for a standby to confirm their commit.
async fn await_a_standby(client: &Client) -> i64 {
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// Waits until commits wait for a standby. The checkpointer turns this on for all sessions, and may read the settings later
/// than the sessions do.
pub(crate) async fn commits_wait(client: &Client, other: &Client) {
    let commit = "SET synchronous_commit = on; SELECT pg_logical_emit_message(true, 'test', '')";
    eventually("commits wait for a standby", async || {
        let waits = eventually("it waits", async || await_a_standby(client).await == 1);
        tokio::select! {
            committed = other.batch_execute(commit) => {
                committed.unwrap();
                false
            }
            () = waits => true,
        }
    })
    .await;
    let cancel = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    client.batch_execute(cancel).await.unwrap();
    eventually("no commit waits", async || await_a_standby(client).await == 0).await;
}

/// The commit of the grant waits for a standby that does not exist, so the lock is granted and the answer is pending. A
/// cancel request ends the wait for the standby, and does not free the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_granted_despite_a_cancel_is_released() {
    let server = PostgresServer::start_or_panic();
    let client = client_at(&server.url()).await;
    client.batch_execute("SET synchronous_commit = off").await.unwrap();
    let at = |parameters: &str| {
        Keeper::new(Postgres::new(&format!("{}?{parameters}", server.url())).unwrap())
    };
    for bounded in [false, true] {
        // Only a grant with `fence=xid` waits for the standby.
        let (holder, other) = (at("fence=off"), at("fence=xid"));
        let key = AdvisoryKey::of("a");
        let guard = holder.mutex("a").lock().await.unwrap();
        // Before the waiter starts, because a bounded wait must not end while the server reads its settings.
        for sql in
            ["ALTER SYSTEM SET synchronous_standby_names = 'none'", "SELECT pg_reload_conf()"]
        {
            client.batch_execute(sql).await.unwrap();
        }
        let set = "SELECT current_setting('synchronous_standby_names')";
        eventually("the setting is read", async || {
            client.query_one(set, &[]).await.unwrap().get::<_, &str>(0) == "none"
        })
        .await;
        commits_wait(&client, &client_at(&server.url()).await).await;
        let mutex = other.mutex("a");
        let waiter = tokio::spawn(async move {
            if bounded {
                mutex.try_lock_for(Duration::from_secs(4)).await
            } else {
                mutex.lock().await.map(Some)
            }
        });
        eventually("it waits", async || holders_and_waiters(&client, key).await == (1, 1)).await;
        guard.release().await.unwrap();
        eventually("it is granted, and the answer is pending", async || {
            await_a_standby(&client).await == 1 && holders_and_waiters(&client, key).await == (1, 0)
        })
        .await;
        if bounded {
            assert!(soon("the end of its wait", waiter).await.unwrap().unwrap().is_none());
        } else {
            waiter.abort();
            assert!(waiter.await.unwrap_err().is_cancelled());
        }
        soon("close", other.close()).await;
        assert_eq!(holders_and_waiters(&client, key).await, (0, 0), "bounded: {bounded}");
        for sql in ["ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()"] {
            client.batch_execute(sql).await.unwrap();
        }
        eventually("the setting is read", async || {
            client.query_one(set, &[]).await.unwrap().get::<_, &str>(0).is_empty()
        })
        .await;
    }
}

/// A proxy that replaces answers by errors.
struct ErrorInjector {
    addr: SocketAddr,
    /// How many answers will be replaced.
    errors: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl ErrorInjector {
    /// Replaces rows with at least `columns` columns, or the answers to preparations if `columns` is 0. After a row was
    /// replaced, also replaces the answer to a preparation on the same connection.
    async fn before(target: SocketAddr, code: &'static str, columns: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (addr, errors) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
        let shared = errors.clone();
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(target).await else { return };
                let (mut from_client, to_client) = client.into_split();
                let (from_server, mut to_server) = server.into_split();
                tokio::spawn(
                    async move { tokio::io::copy(&mut from_client, &mut to_server).await },
                );
                tokio::spawn(inject(from_server, to_client, shared.clone(), (code, columns)));
            }
        });
        Self { addr, errors, task }
    }
}

impl Drop for ErrorInjector {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Forwards messages. Replaces some answers by errors, as if their command had failed.
async fn inject(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    errors: Arc<AtomicUsize>,
    (code, columns): (&str, u16),
) -> io::Result<()> {
    let (mut failing, mut after_row) = (false, false);
    loop {
        let mut head = [0; 5];
        from.read_exact(&mut head).await?;
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
        let mut body = vec![0; length - 4];
        from.read_exact(&mut body).await?;
        let take = |count: usize| count.checked_sub(1);
        let replaced = match head[0] {
            b't' => columns == 0 || after_row,
            b'D' => columns > 0 && u16::from_be_bytes([body[0], body[1]]) >= columns,
            _ => false,
        };
        if replaced && errors.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok() {
            (failing, after_row) = (true, true);
            let fields = format!("SERROR\0VERROR\0C{code}\0Mnot in time\0\0");
            to.write_all(b"E").await?;
            to.write_u32(u32::try_from(fields.len() + 4).unwrap()).await?;
            to.write_all(fields.as_bytes()).await?;
            continue;
        }
        // A failed command sends no completion, and a failed preparation sends no row description.
        if failing && [b'C', b'T', b'n'].contains(&head[0]) {
            failing = false;
            continue;
        }
        to.write_all(&head).await?;
        to.write_all(&body).await?;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_granted_despite_an_error_is_released() {
    // Lock timeout, cancelled, out of memory.
    for code in ["55P03", "57014", "53200"] {
        let name = name("injector");
        let injector = ErrorInjector::before(server().addr(), code, 1).await;
        let url =
            format!("postgres://postgres@{}/postgres?fence=off&sslmode=disable", injector.addr);
        let far = Keeper::new(Postgres::new(&url).unwrap()).ttl(Duration::from_secs(600));
        let near = keeper("");
        let guard = near.mutex(name.clone()).lock().await.unwrap();
        let mutex = far.mutex(name.clone());
        let waiter = tokio::spawn(async move { mutex.lock().await });
        let (client, key) = (client().await, AdvisoryKey::of(&name));
        eventually("it waits", async || holders_and_waiters(&client, key).await == (1, 1)).await;
        injector.errors.store(1, Ordering::SeqCst);
        guard.release().await.unwrap();
        // The waiter retries after the error, and the session holds the lock once, not twice.
        let held = soon("the lock", waiter).await.unwrap().unwrap();
        assert_eq!(injector.errors.load(Ordering::SeqCst), 0, "no error was injected");
        assert_eq!(holders_and_waiters(&client, key).await, (1, 0));
        held.release().await.unwrap();
        assert_eq!(holders_and_waiters(&client, key).await, (0, 0), "after {code}");
        // A failed try leaves no lock, either. A cancelled try is sent again.
        injector.errors.store(1, Ordering::SeqCst);
        let tried = soon("try_lock", far.mutex(name.clone()).try_lock()).await;
        assert_eq!(injector.errors.load(Ordering::SeqCst), 0, "no error was injected");
        if code == "57014" {
            let held = tried.unwrap().expect("the lock is free");
            assert_eq!(holders_and_waiters(&client, key).await, (1, 0));
            held.release().await.unwrap();
        } else {
            tried.unwrap_err();
        }
        assert_eq!(holders_and_waiters(&client, key).await, (0, 0), "a try, after {code}");
    }
}

/// A session that may hold a lock and cannot unlock it must not be used again, because it would be granted the lock a second
/// time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_cannot_prepare_its_unlock_is_closed() {
    let name = name("unlock");
    // Out of memory, for the wait that was granted and for the preparation of the unlock.
    let injector = ErrorInjector::before(server().addr(), "53200", 1).await;
    let url = format!("postgres://postgres@{}/postgres?fence=off&sslmode=disable", injector.addr);
    let far = Keeper::new(Postgres::new(&url).unwrap()).ttl(Duration::from_secs(600));
    let guard = keeper("").mutex(name.clone()).lock().await.unwrap();
    let mutex = far.mutex(name.clone());
    let waiter = tokio::spawn(async move { mutex.lock().await });
    let (client, key) = (client().await, AdvisoryKey::of(&name));
    eventually("it waits", async || holders_and_waiters(&client, key).await == (1, 1)).await;
    injector.errors.store(2, Ordering::SeqCst);
    guard.release().await.unwrap();
    let held = soon("the lock", waiter).await.unwrap().unwrap();
    assert_eq!(injector.errors.load(Ordering::SeqCst), 0, "the unlock was prepared");
    held.release().await.unwrap();
    eventually("it is free", async || holders_and_waiters(&client, key).await == (0, 0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tries_that_share_a_statement_do_not_fail_together() {
    let names: Vec<String> = (0..16).map(|_| name("together")).collect();
    // Of the rows here, only the one that answers a batch of tries has two columns.
    let injector = ErrorInjector::before(server().addr(), "53200", 2).await;
    let url = format!("postgres://postgres@{}/postgres?sslmode=disable", injector.addr);
    let keeper = Keeper::new(Postgres::new(&url).unwrap());
    keeper.mutex(name("warm")).lock().await.unwrap().release().await.unwrap();
    injector.errors.store(1, Ordering::SeqCst);
    let tries = names.iter().map(|name| {
        let mutex = keeper.mutex(name.clone());
        tokio::spawn(async move { mutex.lock().await })
    });
    let mut guards = Vec::new();
    for tried in tries.collect::<Vec<_>>() {
        guards.push(soon("the lock", tried).await.unwrap().unwrap());
    }
    assert_eq!(injector.errors.load(Ordering::SeqCst), 0, "no error was injected");
    // Locks that were granted before the error are not held twice.
    let client = client().await;
    for (guard, name) in guards.into_iter().zip(&names) {
        assert_eq!(holders_and_waiters(&client, AdvisoryKey::of(name)).await, (1, 0));
        guard.release().await.unwrap();
        assert_eq!(holders_and_waiters(&client, AdvisoryKey::of(name)).await, (0, 0));
    }
}

/// A late cancel request may end the preparation of a statement that the connection sends for the first time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_preparation_is_sent_again() {
    let (name, client) = (name("prepared"), client().await);
    let injector = ErrorInjector::before(server().addr(), "57014", 0).await;
    let url = format!("postgres://postgres@{}/postgres?fence=off&sslmode=disable", injector.addr);
    let store = Postgres::connect(&url).await.unwrap();
    let keeper = Keeper::new(store);
    injector.errors.store(1, Ordering::SeqCst);
    let guard = soon("try_lock", keeper.mutex(name.clone()).try_lock()).await.unwrap().unwrap();
    assert_eq!(injector.errors.load(Ordering::SeqCst), 0, "the try was not prepared");
    injector.errors.store(1, Ordering::SeqCst);
    soon("release", guard.release()).await.unwrap();
    assert_eq!(injector.errors.load(Ordering::SeqCst), 0, "the unlock was not prepared");
    assert_eq!(holders_and_waiters(&client, AdvisoryKey::of(&name)).await, (0, 0));
}
