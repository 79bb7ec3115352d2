//! The table of names: what other processes see of a lock, and what happens if the table cannot be used.

use std::time::Duration;

use lockkeeper_core::{ErrorKind, Guard, Keeper, LockInfo, Mode};
use lockkeeper_postgres::{AdvisoryKey, Postgres, diagnose};
use lockkeeper_testkit::server::PostgresServer;
use tokio_postgres::Client;

use crate::common::{
    SERVER_ARGS, client, client_at, eventually, holders_and_waiters, keeper, name, server, soon,
};

/// Creates a database, and returns its URL. With its own database, a test has its own table.
async fn database(options: &str) -> String {
    let name = name("names").replace('-', "_");
    client().await.batch_execute(&format!("CREATE DATABASE {name} {options}")).await.unwrap();
    let url = server().url();
    format!("{}/{name}", url.strip_suffix("/postgres").unwrap())
}

fn at(url: &str) -> Keeper {
    Keeper::new(Postgres::new(url).unwrap())
}

/// Lists locks as another process, until the condition is true.
async fn listed(
    other: &Keeper,
    prefix: &str,
    what: &str,
    condition: impl Fn(&[LockInfo]) -> bool,
) -> Vec<LockInfo> {
    let inspect = other.inspect().unwrap();
    let mut found = Vec::new();
    eventually(what, async || {
        found = inspect.list(prefix).await.unwrap();
        condition(&found)
    })
    .await;
    found
}

/// Returns how many rows the table has, with all checks of inspection left out.
async fn rows(client: &Client) -> i64 {
    let sql = "SELECT count(*) FROM lockkeeper_names";
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// Creates the table, and logs each row that is written in a transaction that commits. The statistics of the server count
/// others, too.
async fn log_writes(url: &str, client: &Client) {
    let keeper = at(url);
    let guard = keeper.mutex("first").lock().await.unwrap();
    listed(&keeper, "first", "the table", |found| found.len() == 1).await;
    eventually("the table", async || {
        client.query("SELECT FROM lockkeeper_names", &[]).await.is_ok()
    })
    .await;
    guard.release().await.unwrap();
    keeper.close().await;
    let log = "CREATE TABLE written (operation text, name text);
         CREATE FUNCTION log() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             INSERT INTO written VALUES (TG_OP, convert_from(NEW.name, 'UTF8')); RETURN NULL;
         END $$;
         CREATE TRIGGER log AFTER INSERT OR UPDATE ON lockkeeper_names FOR EACH ROW EXECUTE FUNCTION log()";
    client.batch_execute(log).await.unwrap();
}

/// Returns how many rows of names that start with a prefix were written.
async fn written(client: &Client, operation: &str, prefix: &str) -> i64 {
    let sql = "SELECT count(*) FROM written WHERE operation = $1 AND starts_with(name, $2)";
    client.query_one(sql, &[&operation, &prefix]).await.unwrap().get(0)
}

#[tokio::test]
async fn holders_and_waiters_of_other_processes_are_listed_with_name_label_age_and_fence() {
    let url = database("").await;
    let [holder, waiter, other] =
        ["it's \\ \"held\"\u{1f512}", "waits", "other"].map(|label| at(&url).label(label));
    let name = "orders/42";
    let guard = holder.mutex(name).lock().await.unwrap();
    let reader = holder.rw_lock("other/1").read().await.unwrap();
    let waits = tokio::spawn({
        let mutex = waiter.mutex(name);
        async move { mutex.lock().await.unwrap() }
    });
    let found = listed(&other, "orders/", "both", |found| {
        found.iter().any(|lock| lock.waiters.iter().any(|waiter| waiter.owner.is_some()))
            && found.iter().any(|lock| lock.holders.iter().any(|holder| holder.owner.is_some()))
    })
    .await;
    assert_eq!(found.len(), 1, "{found:?}");
    let lock = &found[0];
    assert_eq!((&*lock.name, lock.holders.len(), lock.waiters.len()), (name, 1, 1));
    let holds = &lock.holders[0];
    assert_eq!(holds.who(), "it's \\ \"held\"\u{1f512}");
    assert_eq!((holds.fence, holds.mode), (guard.fence(), Mode::Exclusive));
    assert!(holds.age.is_some_and(|age| age > Duration::from_millis(30)), "{holds:?}");
    assert_eq!(lock.waiters[0].who(), "waits");
    assert_eq!(lock.waiters[0].fence, None);

    // The waiter becomes the holder, and the row of the first one is removed.
    guard.release().await.unwrap();
    let next = soon("the waiter", waits).await.unwrap();
    let found = listed(&other, "orders/", "the next holder", |found| {
        found.iter().any(|lock| lock.holders.iter().any(|holder| holder.fence.is_some()))
    })
    .await;
    assert_eq!(found[0].holders[0].fence, next.fence());
    assert_eq!((found[0].holders[0].who(), found[0].waiters.len()), ("waits", 0));
    next.release().await.unwrap();
    reader.release().await.unwrap();
    let client = client_at(&url).await;
    eventually("no row", async || rows(&client).await == 0).await;
    assert!(other.inspect().unwrap().list("o").await.unwrap().is_empty());
}

/// It is recorded as a waiter and as a holder, and a statement cannot write a row twice. After a failed write, names would be
/// listed ten seconds later.
#[tokio::test]
async fn a_holder_that_waited_for_a_short_time_is_listed_soon() {
    let url = database("").await;
    let other = at(&url);
    // The table exists.
    let first = other.mutex("first").lock().await.unwrap();
    listed(&at(&url), "first", "the first", |found| found.len() == 1).await;
    let client = client_at(&url).await;
    // On a busy machine, a write may fail because it takes too long. Not each time.
    let mut is_listed = false;
    for attempt in 0..4 {
        is_listed |= waiters_are_listed_soon(&url, &client, &format!("n/{attempt}/")).await;
        if is_listed {
            break;
        }
    }
    assert!(is_listed, "each time, a write fails");
    first.release().await.unwrap();
}

/// Returns whether locks that were waited for are listed before a process tries again after a failed write.
async fn waiters_are_listed_soon(url: &str, client: &Client, prefix: &str) -> bool {
    let (holder, waiter, other) = (at(url), at(url), at(url));
    let mut held = Vec::new();
    for n in 0..5 {
        let name = format!("{prefix}{n}");
        let (key, guard) = (AdvisoryKey::of(&name), holder.mutex(&*name).lock().await.unwrap());
        let mutex = waiter.mutex(&*name);
        let waits = tokio::spawn(async move { mutex.lock().await.unwrap() });
        eventually("it waits", async || holders_and_waiters(client, key).await == (1, 1)).await;
        guard.release().await.unwrap();
        held.push(soon("the waiter", waits).await.unwrap());
    }
    let all = listed(&other, prefix, "all", |found| {
        found.len() == 5 && found.iter().all(|lock| lock.holders[0].fence.is_some())
    });
    let are_listed = tokio::time::timeout(Duration::from_secs(5), all).await.is_ok();
    for guard in held {
        guard.release().await.unwrap();
    }
    are_listed
}

#[tokio::test]
async fn semaphores_of_other_processes_are_listed() {
    let url = database("").await;
    let (one, other) = (at(&url), at(&url));
    let permits = one.semaphore("pool/a", 5).acquire_many(2).await.unwrap();
    let single = one.semaphore("pool/a", 5).acquire().await.unwrap();
    let found = listed(&other, "pool/", "two holders", |found| {
        found.iter().any(|semaphore| semaphore.holders.len() == 2)
    })
    .await;
    let takes: Vec<Mode> = found[0].holders.iter().map(|holder| holder.mode).collect();
    assert_eq!(&*found[0].name, "pool/a");
    for take in [1, 2] {
        assert!(takes.contains(&Mode::Permits { take, of: 0 }), "{takes:?}");
    }
    permits.release().await.unwrap();
    single.release().await.unwrap();
}

#[tokio::test]
async fn a_short_lock_is_never_written() {
    const LOCKS: i64 = 50;
    let url = database("").await;
    let client = client_at(&url).await;
    log_writes(&url, &client).await;
    let (keeper, other) = (at(&url), at(&url));
    // A busy machine makes some of them long.
    let mut long = 0;
    for _ in 0..LOCKS {
        let start = std::time::Instant::now();
        keeper.mutex("short").lock().await.unwrap().release().await.unwrap();
        long += i64::from(start.elapsed() >= Duration::from_millis(40));
    }
    assert!(long < LOCKS, "no lock was short");
    let guard = keeper.mutex("long").lock().await.unwrap();
    listed(&other, "long", "the long one", |found| found.len() == 1).await;
    eventually("the row", async || written(&client, "INSERT", "long").await == 1).await;
    // Rows that were removed count, too.
    let short = written(&client, "INSERT", "short").await;
    assert!(short <= long, "{short} rows of {long} locks that were not short");
    guard.release().await.unwrap();
}

#[tokio::test]
async fn every_name_is_listed() {
    // A server with another encoding could not store these names as text.
    let url = database("ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0").await;
    let (keeper, other) = (at(&url), at(&url));
    let names = [
        format!("n/{}", "🔒".repeat(255)),
        "n/'; DROP TABLE lockkeeper_names; --".to_owned(),
        "n/\\x00\\".to_owned(),
        "n/pg:042".to_owned(),
        "n/line\nbreak\t\u{202e}".to_owned(),
    ];
    let mut guards = Vec::new();
    for name in &names {
        guards.push(keeper.mutex(name.clone()).lock().await.unwrap());
    }
    let found = listed(&other, "n/", "all", |found| found.len() == names.len()).await;
    for name in &names {
        assert!(found.iter().any(|lock| &*lock.name == name.as_str()), "{name:?}");
    }
    for guard in guards {
        guard.release().await.unwrap();
    }
}

/// The row of an earlier session with the same process id, and a row that was forged.
#[tokio::test]
async fn a_row_of_another_session_or_with_another_name_describes_nothing() {
    let url = database("").await;
    let (one, other) = (at(&url).label("its label"), at(&url));
    let guard = one.mutex("true/name").lock().await.unwrap();
    listed(&other, "true/", "the lock", |found| {
        found.iter().any(|lock| lock.holders[0].owner.is_some())
    })
    .await;
    let client = client_at(&url).await;
    let earlier = "UPDATE lockkeeper_names SET session_start = session_start - 1, label = 'stale'";
    assert_eq!(client.execute(earlier, &[]).await.unwrap(), 1);
    let inspect = other.inspect().unwrap();
    assert!(inspect.list("true/").await.unwrap().is_empty());
    let shown = inspect.show("true/name").await.unwrap();
    assert_eq!(shown[0].holders[0].who(), "its label");
    assert_eq!((shown[0].holders[0].owner, shown[0].holders[0].fence), (None, None));

    for forged in ["forged/name", "pg:42"] {
        let forge = "UPDATE lockkeeper_names SET session_start = session_start + $1, name = $2";
        let back = if forged == "pg:42" { 0.0_f64 } else { 1.0 };
        client.execute(forge, &[&back, &forged.as_bytes()]).await.unwrap();
        assert!(inspect.list("forged/").await.unwrap().is_empty());
        let all = inspect.list("").await.unwrap();
        let key = AdvisoryKey::of("true/name").to_string();
        assert_eq!(all.iter().map(|lock| &*lock.name).collect::<Vec<_>>(), [&*key], "{forged}");
    }
    guard.release().await.unwrap();
}

#[tokio::test]
async fn the_next_writer_removes_rows_of_crashed_clients() {
    let url = database("").await;
    let (one, other, client) = (at(&url), at(&url), client_at(&url).await);
    let guard = one.mutex("a").lock().await.unwrap();
    listed(&other, "a", "the lock", |found| found.len() == 1).await;
    let dead = "INSERT INTO lockkeeper_names SELECT pid, session_start - n, classid, objid, objsubid, granted, since, \
                name, label, owner, fence FROM lockkeeper_names, generate_series(1, 500) AS n";
    assert_eq!(client.execute(dead, &[]).await.unwrap(), 500);
    let next = other.mutex("b").lock().await.unwrap();
    listed(&one, "b", "its lock", |found| found.len() == 1).await;
    assert_eq!(rows(&client).await, 2);
    guard.release().await.unwrap();
    next.release().await.unwrap();
}

#[tokio::test]
async fn locks_of_another_database_are_not_listed() {
    let (one, other) = (at(&database("").await), at(&database("").await));
    let guard = one.mutex("a").lock().await.unwrap();
    listed(&one, "a", "the lock", |found| found.len() == 1).await;
    assert!(other.inspect().unwrap().list("a").await.unwrap().is_empty());
    assert!(other.mutex("a").try_lock().await.unwrap().is_some());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn concurrent_clients_create_the_table_once() {
    let url = database("").await;
    let keepers: Vec<Keeper> = (0..8).map(|_| at(&url)).collect();
    let mut guards = Vec::new();
    for (n, keeper) in keepers.iter().enumerate() {
        guards.push(keeper.mutex(format!("n/{n}")).lock().await.unwrap());
    }
    listed(&keepers[0], "n/", "all", |found| found.len() == 8).await;
    for guard in guards {
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn without_the_privilege_locks_work_and_the_error_has_the_sql_that_grants_it() {
    let url = database("").await;
    let role = name("role").replace('-', "_");
    let admin = client_at(&url).await;
    let setup = format!("CREATE ROLE {role} LOGIN; REVOKE CREATE ON SCHEMA public FROM PUBLIC");
    admin.batch_execute(&setup).await.unwrap();
    let limited = url.replace("//postgres@", &format!("//{role}@"));
    // Fences from a sequence need the same privilege.
    let limited = format!("{limited}?fence=xid");
    let (one, other) = (at(&limited).label("limited"), at(&limited));
    let guard = one.mutex("a/b").lock().await.unwrap();
    let inspect = other.inspect().unwrap();
    let error = inspect.list("a/").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    let finding = |findings: Vec<lockkeeper_core::Finding>| {
        findings.into_iter().find(|finding| format!("{finding:?}").contains("lockkeeper_names"))
    };
    let warned = finding(diagnose(&limited).await.unwrap()).unwrap();
    assert_eq!(warned.severity, lockkeeper_core::Severity::Warn, "{warned:?}");
    // What the server knows is shown without the table.
    let key = AdvisoryKey::of("a/b").to_string();
    assert!(inspect.list("").await.unwrap().iter().any(|lock| *lock.name == *key));
    assert_eq!(inspect.show("a/b").await.unwrap()[0].holders[0].who(), "limited");
    assert_eq!(&*one.inspect().unwrap().list("").await.unwrap()[0].name, "a/b");

    let text = error.to_string();
    let sql =
        text.split_once("owner of the database: ").unwrap().1.split_once("; or set").unwrap().0;
    admin.batch_execute(sql).await.unwrap();
    let granted = finding(diagnose(&limited).await.unwrap()).unwrap();
    assert_eq!(granted.severity, lockkeeper_core::Severity::Ok, "{granted:?}");
    // A process that has not failed before. The others try again after a pause.
    let third = at(&limited);
    let next = third.mutex("a/c").lock().await.unwrap();
    listed(&other, "a/", "a lock", |found| found.iter().any(|lock| &*lock.name == "a/c")).await;
    guard.release().await.unwrap();
    next.release().await.unwrap();
}

/// A role that may create tables prepares one with code, and grants it to all. Even a superuser, who has the rights of that
/// role, must not run the code.
#[tokio::test]
async fn a_table_or_view_of_another_role_is_not_used_and_its_code_does_not_run() {
    const TABLE: &str = "CREATE TABLE lockkeeper_names (pid int, session_start float8, classid oid, objid oid, \
         objsubid smallint, granted boolean, since timestamptz, name bytea, label bytea, owner uuid, fence bigint, \
         PRIMARY KEY (pid, session_start, classid, objid, objsubid)); \
         CREATE TRIGGER spy BEFORE INSERT ON lockkeeper_names FOR EACH STATEMENT EXECUTE FUNCTION spy();";
    const VIEW: &str = "CREATE TABLE hidden (pid int, session_start float8, classid oid, objid oid, \
         objsubid smallint, granted boolean, since timestamptz, name bytea, label bytea, owner uuid, fence bigint); \
         CREATE VIEW lockkeeper_names AS SELECT pid + look() AS pid, session_start, classid, objid, objsubid, \
         granted, since, name, label, owner, fence FROM hidden UNION ALL SELECT look(), 0.0, 0, 0, 0::smallint, \
         true, now(), '', '', NULL, NULL;";
    for (planted, kind) in [(TABLE, "TABLE"), (VIEW, "VIEW")] {
        let url = database("").await;
        let [planter, user] = ["planter", "user"].map(|role| name(role).replace('-', "_"));
        let admin = client_at(&url).await;
        let setup = format!(
            "CREATE ROLE {planter} LOGIN; CREATE ROLE {user} LOGIN; GRANT CREATE ON SCHEMA public TO {planter}"
        );
        admin.batch_execute(&setup).await.unwrap();
        let plant = format!(
            "CREATE TABLE ran (role text); GRANT ALL ON ran TO PUBLIC;
             CREATE FUNCTION spy() RETURNS trigger LANGUAGE plpgsql AS
                 'BEGIN INSERT INTO ran VALUES (current_user); RETURN NULL; END';
             CREATE FUNCTION look() RETURNS int LANGUAGE plpgsql AS
                 'BEGIN INSERT INTO ran VALUES (current_user); RETURN 0; END';
             {planted} GRANT ALL ON lockkeeper_names TO PUBLIC"
        );
        let as_role = |role: &str| url.replace("//postgres@", &format!("//{role}@"));
        client_at(&as_role(&planter)).await.batch_execute(&plant).await.unwrap();
        let ran = async || {
            let rows = admin.query("SELECT role FROM ran", &[]).await.unwrap();
            rows.iter().map(|row| row.get::<_, String>(0)).collect::<Vec<_>>()
        };
        let mut advice = String::new();
        for role in [user.as_str(), "postgres"] {
            let limited = format!("{}?fence=off", as_role(role));
            let (one, other) = (at(&limited), at(&limited));
            let guard = one.mutex("a/b").lock().await.unwrap();
            // Several times as long as until the first write.
            tokio::time::sleep(Duration::from_millis(300)).await;
            let inspect = other.inspect().unwrap();
            let error = inspect.list("a/").await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.to_string().contains(&format!("the role \"{planter}\"")), "{error}");
            assert_eq!(inspect.list("").await.unwrap().len(), 1);
            let findings = diagnose(&limited).await.unwrap();
            let failed = findings.iter().find(|finding| format!("{finding:?}").contains(&planter));
            assert_eq!(failed.unwrap().severity, lockkeeper_core::Severity::Fail, "{failed:?}");
            guard.release().await.unwrap();
            one.close().await;
            assert_eq!(ran().await, [""; 0], "{kind} as {role}");
            advice = error.to_string();
        }
        // The code runs if the table is used.
        let statement = if kind == "VIEW" {
            "SELECT FROM lockkeeper_names WHERE pid = 0"
        } else {
            "INSERT INTO lockkeeper_names (pid, session_start, classid, objid, objsubid) VALUES (0, 0, 0, 0, 0)"
        };
        admin.batch_execute(statement).await.unwrap();
        assert!(ran().await.iter().all(|role| role == "postgres") && !ran().await.is_empty());
        let sql = advice.split_once("owner of the database: ").unwrap().1;
        let sql = sql.split_once("; or set").unwrap().0;
        assert!(
            sql.starts_with(&format!("DROP {kind} \"public\".\"lockkeeper_names\"; ")),
            "{sql}"
        );
        admin.batch_execute(sql).await.unwrap();
        let (one, other) = (at(&url), at(&url));
        let guard = one.mutex("a/b").lock().await.unwrap();
        listed(&other, "a/", "the lock", |found| found.len() == 1).await;
        guard.release().await.unwrap();
    }
}

/// This role may use the table, and not read the state of sessions of other roles: it cannot verify rows.
#[tokio::test]
async fn another_role_without_privileges_on_sessions_is_shown_names_only() {
    let url = database("").await;
    let role = name("reader").replace('-', "_");
    let one = at(&url).label("its label");
    let guard = one.mutex("a").lock().await.unwrap();
    listed(&at(&url), "a", "the lock", |found| found.len() == 1).await;
    let setup = format!("CREATE ROLE {role} LOGIN; GRANT SELECT ON lockkeeper_names TO {role}");
    client_at(&url).await.batch_execute(&setup).await.unwrap();
    let reader = at(&url.replace("//postgres@", &format!("//{role}@")));
    let found = reader.inspect().unwrap().list("a").await.unwrap();
    assert_eq!((&*found[0].name, found[0].holders[0].who()), ("a", "its label"));
    assert_eq!((found[0].holders[0].owner, found[0].holders[0].fence), (None, None));
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_table_that_is_locked_delays_no_lock_for_long() {
    let url = database("").await;
    let (one, other) = (at(&url).ttl(Duration::from_secs(2)), at(&url));
    let guard = one.mutex("a").lock().await.unwrap();
    listed(&other, "a", "the lock", |found| found.len() == 1).await;
    let mut client = client_at(&url).await;
    let transaction = client.transaction().await.unwrap();
    transaction.batch_execute("LOCK TABLE lockkeeper_names").await.unwrap();
    let inspect = one.inspect().unwrap();
    let until = std::time::Instant::now() + Duration::from_secs(5);
    let mut slowest = Duration::ZERO;
    while std::time::Instant::now() < until {
        let start = std::time::Instant::now();
        let next = one.mutex("b").lock().await.unwrap();
        slowest = slowest.max(start.elapsed());
        tokio::time::sleep(Duration::from_millis(60)).await;
        // On the session that holds the locks.
        let error = inspect.list("a").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert_eq!(inspect.list("").await.unwrap().len(), 2);
        next.release().await.unwrap();
    }
    assert!(guard.is_held(), "more than two TTLs without the table");
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    transaction.rollback().await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_dropped_table_is_created_again_with_the_locks_that_are_held() {
    let url = database("").await;
    let (one, other) = (at(&url), at(&url));
    let guard = one.mutex("n/a").lock().await.unwrap();
    listed(&other, "n/", "the lock", |found| found.len() == 1).await;
    client_at(&url).await.batch_execute("DROP TABLE lockkeeper_names").await.unwrap();
    let next = one.mutex("n/b").lock().await.unwrap();
    let client = client_at(&url).await;
    eventually("both rows", async || {
        let sql = "SELECT count(*) FROM lockkeeper_names";
        client.query_one(sql, &[]).await.is_ok_and(|row| row.get::<_, i64>(0) == 2)
    })
    .await;
    assert_eq!(other.inspect().unwrap().list("n/").await.unwrap().len(), 2);
    guard.release().await.unwrap();
    next.release().await.unwrap();
}

/// A table of the role that inspects could not be written by the role that has the locks.
#[tokio::test]
async fn inspection_does_not_create_the_table() {
    let url = database("").await;
    let inspect = at(&url).inspect().unwrap();
    for prefix in ["", "a/"] {
        assert!(inspect.list(prefix).await.unwrap().is_empty());
    }
    let found = "SELECT to_regclass('lockkeeper_names') IS NULL";
    assert!(client_at(&url).await.query_one(found, &[]).await.unwrap().get::<_, bool>(0));
}

#[tokio::test]
async fn the_table_can_be_renamed_or_turned_off() {
    let url = database("").await;
    let client = client_at(&url).await;
    client.batch_execute("CREATE SCHEMA ops").await.unwrap();
    let named = format!("{url}?names_table=ops.held");
    let one = Keeper::new(Postgres::new(&url).unwrap().with_names_table(Some("ops.held")).unwrap());
    let off = at(&format!("{url}?names_table=off"));
    let (guard, unnamed) =
        (one.mutex("n/a").lock().await.unwrap(), off.mutex("n/b").lock().await.unwrap());
    listed(&at(&named), "n/", "the lock", |found| found.len() == 1).await;
    assert_eq!(client.query("SELECT FROM ops.held", &[]).await.unwrap().len(), 1);
    let inspect = off.inspect().unwrap();
    for error in [inspect.list("n/").await.unwrap_err(), inspect.watch("n/").await.unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("names_table=off"), "{error}");
    }
    assert_eq!(inspect.show("n/a").await.unwrap().len(), 1);
    assert!(keeper("").inspect().unwrap().list("n/").await.is_ok());
    guard.release().await.unwrap();
    unnamed.release().await.unwrap();
}

#[tokio::test]
async fn names_are_listed_on_every_version() {
    for major in [14, 16, 17, 18] {
        let server = PostgresServer::of_version(major, &SERVER_ARGS);
        let server = server.unwrap_or_else(|error| panic!("{error}"));
        let (one, other) = (at(&server.url()).label("its label"), at(&server.url()));
        let guard = one.mutex("n/a").lock().await.unwrap();
        let found = listed(&other, "n/", "the lock", |found| found.len() == 1).await;
        assert_eq!(found[0].holders[0].fence, guard.fence(), "{major}");
        guard.release().await.unwrap();
        let client = client_at(&server.url()).await;
        eventually("no row", async || rows(&client).await == 0).await;
    }
}

/// Each lock is written once, and removed once, in batches.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_held_locks_are_written_in_batches() {
    const HELD: u32 = 2_000;
    let args = [&SERVER_ARGS[..], &["-c", "max_locks_per_transaction=512"]].concat();
    let server = PostgresServer::with_args(&args).unwrap_or_else(|error| panic!("{error}"));
    let (one, other) = (at(&server.url()), at(&server.url()));
    let client = client_at(&server.url()).await;
    log_writes(&server.url(), &client).await;
    // Counts failed writes. A session reports them at the latest when it ends.
    let failures = async || {
        let sql = "SELECT xact_rollback FROM pg_stat_database WHERE datname = current_database()";
        client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0)
    };
    let failed_before = failures().await;
    let locks = (0..HELD).map(|n| {
        let mutex = one.mutex(format!("n/{n}"));
        tokio::spawn(async move { mutex.lock().await.unwrap() })
    });
    let mut guards = Vec::new();
    for lock in locks.collect::<Vec<_>>() {
        guards.push(lock.await.unwrap());
    }
    eventually("all rows", async || rows(&client).await == i64::from(HELD)).await;
    assert_eq!(other.inspect().unwrap().list("n/").await.unwrap().len(), guards.len());
    assert!(guards.iter().all(Guard::is_held));
    assert_eq!(written(&client, "INSERT", "n/").await, i64::from(HELD));
    // After a write that took too long, all are written again.
    let updates = written(&client, "UPDATE", "n/").await;
    guards.into_iter().for_each(drop);
    one.close().await;
    eventually("no rows", async || rows(&client).await == 0).await;
    if updates > 0 {
        eventually("a failed write", async || failures().await > failed_before).await;
    }
}
