//! Fences rise over crashes, failovers and a dropped sequence, or the attempt is refused.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use lockkeeper_core::{Error, ErrorKind, Fence, Guard, Keeper};
use lockkeeper_postgres::{Postgres, diagnose};
use lockkeeper_testkit::server::PostgresServer;
use tokio::task::spawn_blocking;

use crate::common::{client_at, crash_and_restart, eventually, soon};
use crate::granted_despite_errors::commits_wait;

const SEQUENCE: &str = "public.lockkeeper_fence";

async fn start(args: &'static [&'static str]) -> PostgresServer {
    spawn_blocking(|| PostgresServer::with_args(args).unwrap()).await.unwrap()
}

fn keeper(url: &str) -> Keeper {
    Keeper::new(Postgres::new(url).unwrap())
}

/// Creates a role that may draw fences and not set them, and the sequence. Returns the role's URL.
///
/// A role that may set the sequence raises it to the clock whenever all sessions have ended. That would hide a repeated
/// fence.
async fn plain_role(server: &PostgresServer) -> String {
    execute(server, "CREATE ROLE app LOGIN").await;
    let owner = keeper(&server.url());
    owner.mutex("first").lock().await.unwrap().release().await.unwrap();
    owner.close().await;
    server.url().replace("postgres@", "app@")
}

async fn execute(server: &PostgresServer, sql: &str) {
    client_at(&server.url()).await.batch_execute(sql).await.unwrap();
}

async fn last_value(server: &PostgresServer) -> i64 {
    let sql = format!("SELECT last_value FROM {SEQUENCE}");
    client_at(&server.url()).await.query_one(&sql, &[]).await.unwrap().get(0)
}

async fn locked(keeper: &Keeper, name: &str) -> Guard {
    soon("lock", keeper.mutex(name.to_owned()).lock()).await.unwrap()
}

/// Locks and releases a name, and returns the fence.
async fn fence(keeper: &Keeper, name: &str) -> Fence {
    let guard = locked(keeper, name).await;
    let fence = guard.fence().unwrap();
    guard.release().await.unwrap();
    fence
}

async fn refusal(keeper: &Keeper) -> Error {
    let error = soon("lock", keeper.mutex("refused").lock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(!error.to_string().contains('\n'), "{error}");
    error
}

/// Locks other names in a loop on several connections until the server is killed. The fences that have been returned by then
/// are lower than all that follow.
async fn grants_until_a_crash(
    server: PostgresServer,
    url: &str,
    grants: usize,
) -> (PostgresServer, u64) {
    let (highest, count) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut clients = Vec::new();
    for client in 0..8 {
        let (url, highest, count) = (url.to_owned(), highest.clone(), count.clone());
        clients.push(tokio::spawn(async move {
            let keeper = keeper(&url);
            let mutex = keeper.mutex(format!("client/{client}"));
            while let Ok(guard) = mutex.lock().await {
                highest.fetch_max(guard.fence().unwrap().get(), Ordering::SeqCst);
                count.fetch_add(1, Ordering::SeqCst);
                drop(guard.release().await);
            }
        }));
    }
    eventually("grants", async || count.load(Ordering::SeqCst) >= grants).await;
    let server = crash_and_restart(server).await;
    for client in clients {
        client.abort();
        drop(client.await);
    }
    (server, highest.load(Ordering::SeqCst))
}

/// Buffers that hold all that a test writes to the log.
const LARGE_BUFFERS: &[&str] = &["-c", "wal_buffers=64MB"];

/// Stops the process that flushes the log in the background. A crash then loses all that no commit has flushed.
async fn stop_background_flushes(server: &PostgresServer) {
    let sql = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'";
    let client = client_at(&server.url()).await;
    let pid: i32 = client.query_one(sql, &[]).await.unwrap().get(0);
    let stopped = Command::new("kill").args(["-STOP", &pid.to_string()]).status().unwrap();
    assert!(stopped.success());
}

async fn check_crashes(rounds: usize, with_background_flushes: bool) {
    const GRANTS: usize = 200;
    let mut server = start(LARGE_BUFFERS).await;
    let url = plain_role(&server).await;
    for round in 0..rounds {
        if !with_background_flushes {
            stop_background_flushes(&server).await;
        }
        let (restarted, highest) = grants_until_a_crash(server, &url, GRANTS).await;
        server = restarted;
        let first = fence(&keeper(&url), "first").await.get();
        assert!(first > highest, "round {round}: {first} after {highest}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_rise_over_crashes_while_many_clients_draw_them() {
    check_crashes(3, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_rise_over_crashes_that_lose_values_which_clients_have_received() {
    check_crashes(3, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_loses_no_more_fences_than_the_next_session_skips() {
    let mut server = start(LARGE_BUFFERS).await;
    let url = plain_role(&server).await;
    let mut keepers = vec![keeper(&url)];
    let mut last = fence(&keepers[0], "a").await;
    for values in [3000, 7000, 20_000] {
        stop_background_flushes(&server).await;
        draw(&server, values).await;
        let held = locked(&keepers[0], "a").await;
        assert!(held.fence() > Some(last));
        last = held.fence().unwrap();
        server = crash_and_restart(server).await;
        // A new store: the old one would refuse lower fences.
        keepers.insert(0, keeper(&url));
        let next = fence(&keepers[0], "a").await;
        assert!(next > last, "{values}: {next:?} after {last:?}");
        last = next;
    }
}

/// Draws fences as another client, and does not wait for the disk.
async fn draw(server: &PostgresServer, values: usize) {
    let sql = format!(
        "SET synchronous_commit = off; \
         SELECT nextval('{SEQUENCE}') FROM generate_series(1, {values})"
    );
    execute(server, &sql).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_rise_over_a_crash_after_statements_about_the_table_of_names_have_failed() {
    let mut server = start(LARGE_BUFFERS).await;
    let url = plain_role(&server).await;
    execute(&server, "CREATE TABLE public.forbidden ()").await;
    for table in ["missing.names", "public.forbidden"] {
        stop_background_flushes(&server).await;
        let parameters = format!("?max_connections=1&names_table={table}");
        let client = keeper(&format!("{url}{parameters}"));
        let mut last = fence(&client, "a").await;
        for _ in 0..4 {
            // Locks are listed without the table, which cannot be read.
            client.inspect().unwrap().list("").await.unwrap();
            draw(&server, 7000).await;
            let next = fence(&client, "a").await;
            assert!(next > last);
            last = next;
        }
        server = crash_and_restart(server).await;
        let next = fence(&keeper(&url), "a").await;
        assert!(next > last, "{table}: {next:?} after {last:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_that_is_down_delays_no_fences() {
    let server = start(&["-c", "fsync=off", "-c", "synchronous_standby_names=none"]).await;
    let observer = client_at(&server.url()).await;
    observer.batch_execute("SET synchronous_commit = off").await.unwrap();
    commits_wait(&observer, &client_at(&server.url()).await).await;
    let url = format!("{}?max_connections=1", server.url());
    let client = Keeper::new(Postgres::new(&url).unwrap()).ttl(Duration::from_secs(4));
    // It creates the sequence.
    let held = locked(&client, "held").await;
    // Enough for a flush in the background, and then for one that the client waits for.
    for values in [6000, 10_000] {
        draw(&server, values).await;
        fence(&client, "a").await;
        fence(&client, "a").await;
    }
    assert!(held.is_held() && held.release().await.is_ok(), "the lock was lost");
    let other = Keeper::new(Postgres::new(&url).unwrap()).ttl(Duration::from_secs(4));
    fence(&other, "a").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_rise_over_a_promotion_of_a_standby_that_is_behind() {
    let primary = start(&[]).await;
    let role = plain_role(&primary).await;
    let (primary, standby) = spawn_blocking(|| {
        let mut standby = primary.standby().unwrap();
        // From now on, it receives nothing from the primary.
        standby.kill9();
        (primary, standby)
    })
    .await
    .unwrap();
    let (first, second) = (primary.port(), standby.port());
    let hosts = role.replace(&format!(":{first}"), &format!(":{first},127.0.0.1:{second}"));
    let keeper = keeper(&hosts);
    let draws = format!("SELECT nextval('{SEQUENCE}') FROM generate_series(1, 20000)");
    execute(&primary, &draws).await;
    let held = locked(&keeper, "a").await;
    let before = last_value(&primary).await;
    let standby = spawn_blocking(move || {
        let (mut primary, mut standby) = (primary, standby);
        primary.kill9();
        standby.restart().unwrap();
        standby
    })
    .await
    .unwrap();
    soon("the loss", held.lost()).await;
    execute(&standby, "SELECT pg_promote()").await;
    let next = soon("lock", async {
        loop {
            match keeper.mutex("a").lock().await {
                Ok(guard) => break guard,
                // The new primary may refuse writes for a short time.
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    })
    .await;
    assert!(next.fence() > held.fence(), "{:?} after {:?}", next.fence(), held.fence());
    assert!(last_value(&standby).await < before, "no value was lost, so the test has no effect");
}

/// Waits until a new sequence would start above a fence: each connection without another one advances the sequence by an
/// eighth of a second of the clock.
async fn clock_is_past(server: &PostgresServer, fence: Fence) {
    let client = client_at(&server.url()).await;
    let sql = "SELECT floor(extract(epoch FROM clock_timestamp()) * 65536)::int8";
    let value = i64::try_from(fence.get() & ((1 << 48) - 1)).unwrap();
    eventually("the clock is past the fence", async || {
        client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) > value
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_that_is_dropped_is_created_again_above_the_earlier_fences() {
    let server = start(&["-c", "fsync=off"]).await;
    let keeper = keeper(&server.url());
    let (held, contended) = (locked(&keeper, "held").await, locked(&keeper, "contended").await);
    let mutex = keeper.mutex("contended");
    let waiter = tokio::spawn(async move { mutex.lock().await });
    eventually("it waits", async || {
        let sql = "SELECT count(*) FROM pg_locks WHERE NOT granted";
        let client = client_at(&server.url()).await;
        client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) == 1
    })
    .await;
    let before = contended.fence();
    clock_is_past(&server, before.unwrap()).await;
    execute(&server, &format!("DROP SEQUENCE {SEQUENCE}")).await;
    assert!(Some(fence(&keeper, "another").await) > before);
    // It was waiting with the sequence that no longer exists.
    contended.release().await.unwrap();
    let guard = soon("the waiter", waiter).await.unwrap().unwrap();
    assert!(guard.fence() > before);
    assert!(held.is_held() && held.release().await.is_ok(), "another lock of the session was lost");
    // Another process has no memory of the earlier fences.
    clock_is_past(&server, guard.fence().unwrap()).await;
    execute(&server, &format!("DROP SEQUENCE {SEQUENCE}")).await;
    assert!(Some(fence(&self::keeper(&server.url()), "a").await) > guard.fence());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_that_was_set_back_is_refused_until_it_is_set_again() {
    let server = start(&["-c", "fsync=off"]).await;
    let keeper = keeper(&server.url());
    let before = fence(&keeper, "a").await;
    let (min, max) = (1_u64 << 40, (1_u64 << 48) - 1);
    let create = format!(
        "DROP SEQUENCE {SEQUENCE}; CREATE SEQUENCE {SEQUENCE} MINVALUE {min} MAXVALUE {max}; \
         SELECT setval('{SEQUENCE}', {min})"
    );
    for sql in [
        &format!("ALTER SEQUENCE {SEQUENCE} MINVALUE 1 RESTART WITH 5"),
        &format!("SELECT setval('{SEQUENCE}', 5)"),
        // Another client has created it, without regard to the earlier fences, and is connected.
        &create,
    ] {
        // A session that is prepared to draw from the sequence keeps it from being raised to the clock.
        let other = client_at(&server.url()).await;
        let prepared = "SELECT pg_advisory_lock_shared(-2147483648, oid::int) FROM pg_class \
                        WHERE relname = 'lockkeeper_fence'";
        other.batch_execute(&format!("{sql}; {prepared}")).await.unwrap();
        for reader in [false, true] {
            let lock = keeper.rw_lock("b");
            let result = if reader { lock.read().await } else { lock.write().await };
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            let message = error.to_string();
            let fix = message.split("run ").nth(1).unwrap().split(", or").next().unwrap();
            if reader {
                execute(&server, fix).await;
            }
        }
        assert!(fence(&keeper, "b").await > before, "{sql}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_without_the_privilege_receives_the_sql_for_its_administrator() {
    let server = start(&["-c", "fsync=off"]).await;
    execute(&server, "CREATE ROLE app LOGIN; CREATE SCHEMA mine; CREATE ROLE \"o\"\"dd\" LOGIN")
        .await;
    for (role, parameters, message) in [
        ("app", "", "may not create the sequence"),
        (
            "app",
            "?fence_sequence=mine.Fence-1",
            "CREATE SEQUENCE IF NOT EXISTS \"mine\".\"Fence-1\"",
        ),
        ("app", "?fence_sequence=none.f", "CREATE SCHEMA \"none\"; CREATE SEQUENCE"),
        ("o%22dd", "", "may not create the sequence"),
    ] {
        let url = format!("{}{parameters}", server.url().replace("postgres@", &format!("{role}@")));
        let error = refusal(&keeper(&url)).await.to_string();
        assert!(error.contains(message), "{error}");
        let connected = soon("connect", Postgres::connect(&url)).await.unwrap_err();
        assert_eq!(connected.kind(), ErrorKind::Config);
        let findings = diagnose(&url).await.unwrap();
        assert!(findings.iter().any(|finding| finding.what.contains(message)), "{findings:?}");
        let sql = error.split("run ").nth(1).unwrap().split("; or name").next().unwrap();
        execute(&server, sql).await;
        assert!(Postgres::connect(&url).await.is_ok());
        fence(&keeper(&url), "a").await;
        let sequence = if parameters.is_empty() {
            SEQUENCE.to_owned()
        } else {
            sql.split("EXISTS ").nth(1).unwrap().split(' ').next().unwrap().to_owned()
        };
        execute(&server, &format!("REVOKE USAGE ON SEQUENCE {sequence} FROM PUBLIC")).await;
        let error = refusal(&keeper(&url)).await.to_string();
        let sql = error.split("run ").nth(1).unwrap();
        assert!(sql.starts_with("GRANT USAGE ON SEQUENCE"), "{error}");
        execute(&server, sql).await;
        fence(&keeper(&url), "a").await;
        execute(&server, &format!("DROP SEQUENCE {sequence}")).await;
    }
    // Without fences, nothing is created.
    let url = server.url().replace("postgres@", "app@");
    locked(&keeper(&format!("{url}?fence=off")), "a").await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_would_draw_lower_fences_than_others_are_refused() {
    let server = start(&["-c", "fsync=off"]).await;
    let (url, xid) = (server.url(), format!("{}?fence=xid", server.url()));
    let first = keeper(&xid);
    let before = fence(&first, "a").await;
    let error = refusal(&keeper(&url)).await;
    assert!(error.to_string().contains("a client with fence=xid is connected"), "{error}");
    first.close().await;
    drop(first);
    // Its session has ended when the sequence can be used.
    let sequence = keeper(&url);
    let after = soon("lock", async {
        loop {
            match sequence.mutex("a").lock().await {
                Ok(guard) => break guard,
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    })
    .await;
    assert!(after.fence() > Some(before));
    let error = refusal(&keeper(&xid)).await;
    assert!(
        error.to_string().contains("come from the sequence public.lockkeeper_fence"),
        "{error}"
    );
    let error = refusal(&keeper(&format!("{url}?fence_sequence=other"))).await;
    assert!(error.to_string().contains("set fence_sequence=public.lockkeeper_fence"), "{error}");
    let renamed = Postgres::new(&url).unwrap().with_fence_sequence("other").unwrap();
    refusal(&Keeper::new(renamed)).await;
    // A sequence of another program is not used.
    execute(&server, "CREATE SEQUENCE counter").await;
    let error = refusal(&keeper(&format!("{url}?fence_sequence=counter"))).await;
    assert!(error.to_string().contains("another sequence"), "{error}");
    execute(&server, &format!("DROP SEQUENCE {SEQUENCE}")).await;
    for options in ["MAXVALUE 1000", "MINVALUE 65536 MAXVALUE 281474976710655 START 65536 RESTART"]
    {
        execute(&server, &format!("ALTER SEQUENCE counter {options}")).await;
        let error = refusal(&keeper(&format!("{url}?fence_sequence=counter"))).await;
        assert!(error.to_string().contains("has other options"), "{options}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_start_together_draw_from_one_sequence() {
    let server = start(&["-c", "fsync=off"]).await;
    let url = server.url();
    let clients = (0..12).map(|client| {
        let keeper = keeper(&url);
        tokio::spawn(async move { fence(&keeper, &format!("client/{client}")).await })
    });
    let mut fences = Vec::new();
    for client in clients.collect::<Vec<_>>() {
        fences.push(soon("a fence", client).await.unwrap());
    }
    fences.sort_unstable();
    assert!(fences.windows(2).all(|pair| pair[0] < pair[1]), "{fences:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_has_the_fence_of_the_last_writer_or_a_higher_one() {
    let server = start(&["-c", "fsync=off"]).await;
    let keepers = [keeper(&server.url()), keeper(&server.url())];
    let stop = Arc::new(AtomicBool::new(false));
    let (noise, stopped) = (keepers[0].mutex("noise"), stop.clone());
    let noise = tokio::spawn(async move {
        while !stopped.load(Ordering::SeqCst) {
            noise.lock().await.unwrap().release().await.unwrap();
        }
    });
    for round in 0..20 {
        let (writer, other) = (&keepers[round % 2], &keepers[(round + 1) % 2]);
        let guard = soon("write", writer.rw_lock("a").write()).await.unwrap();
        let written = guard.fence();
        let lock = other.rw_lock("a");
        // It waits on the server.
        let reader = tokio::spawn(async move { lock.read().await });
        tokio::task::yield_now().await;
        guard.release().await.unwrap();
        let waited = soon("read", reader).await.unwrap().unwrap();
        let tried = soon("read", writer.rw_lock("a").read()).await.unwrap();
        assert!(waited.fence() >= written && tried.fence() >= written);
        waited.release().await.unwrap();
        tried.release().await.unwrap();
        let next = soon("write", other.rw_lock("a").write()).await.unwrap();
        assert!(next.fence() > written);
        next.release().await.unwrap();
    }
    stop.store(true, Ordering::SeqCst);
    noise.await.unwrap();
    let before = last_value(&server).await;
    for _ in 0..3 {
        keepers[0].rw_lock("a").read().await.unwrap().release().await.unwrap();
    }
    assert_eq!(last_value(&server).await, before, "a reader has drawn a fence");
}
