//! Loss: the command is dead before another can hold the lock.

use std::time::Duration;

use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::{PostgresServer, RedisServer};

use crate::common::{Said, Sandbox, eventually};

/// Writes down the time again and again, also after TERM.
const STUBBORN: &str =
    "trap 'echo told > told' TERM; echo ready; while :; do date +%s%N >> beats; sleep 0.02; done";

#[test]
fn a_command_that_will_not_end_is_dead_before_the_lock_goes_to_another() {
    let server = RedisServer::start_or_panic();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let proxy = runtime.block_on(Proxy::start(server.addr())).unwrap();
    let (near, far) =
        (Sandbox::on(&server.url()), Sandbox::on(&format!("redis://{}/", proxy.addr())));
    let ttl = ["--ttl", "12s", "--kill-after", "1s"];
    let run = far.spawn(&[&["run", "a"], &ttl[..], &["--", "sh", "-c", STUBBORN]].concat());
    run.wait_out("ready");
    let next = near.spawn(&["run", "a", "--", "date", "+%s%N"]);
    next.wait_err("waiting");
    proxy.freeze();
    let next = next.end();
    assert_eq!(next.code, Some(0));
    let entered: u128 = next.out.trim().parse().unwrap();
    let last = far.last_beat();
    assert!(last < entered, "last beat {last}, entered {entered}");
    let said = run.end();
    assert_eq!(said.code, Some(70), "{said:?}");
    assert!(said.err.contains("could not be renewed: the command was killed"), "{said:?}");
    assert_eq!(far.read("told"), "told\n", "it was asked first");
    assert_eq!(far.last_beat(), last, "it is dead");
}

/// Takes the lock away from a command that ignores TERM while another waits for it. Returns how long the command ran
/// beside its successor, what its wrapper printed, and whether it received TERM.
fn overlap(
    sandbox: &Sandbox,
    options: &[&str],
    take_away: impl FnOnce(),
) -> (Duration, Said, bool) {
    let run = sandbox.spawn(&[&["run", "a"], options, &["--", "sh", "-c", STUBBORN]].concat());
    run.wait_out("ready");
    sandbox.wait_for("beats");
    let next = sandbox.spawn(&["run", "a", "--", "date", "+%s%N"]);
    next.wait_err("waiting");
    take_away();
    let next = next.end();
    assert_eq!(next.code, Some(0), "{next:?}");
    let entered: u128 = next.out.trim().parse().unwrap();
    let said = run.end();
    assert_eq!(said.code, Some(70), "{said:?}");
    let beside = sandbox.last_beat().saturating_sub(entered);
    let beside = Duration::from_nanos(u64::try_from(beside).unwrap());
    (beside, said, sandbox.path("told").exists())
}

/// The longest overlap that is accepted after a certain loss: far below `--kill-after` (5 s), and long enough for the
/// notice of the loss on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(2);

#[test]
fn a_command_that_ignores_term_does_not_run_beside_its_successor_after_a_restart_of_postgres() {
    let mut server = PostgresServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let (beside, said, told) = overlap(&sandbox, &[], || server.restart().unwrap());
    assert!(beside < AT_ONCE, "it ran for {beside:?} beside its successor: {said:?}");
    assert!(!told, "there is no time for TERM: {said:?}");
    assert!(said.err.contains("the command was killed"), "{said:?}");
}

#[test]
fn a_command_that_ignores_term_does_not_run_beside_its_successor_after_a_break() {
    let server = RedisServer::start_or_panic();
    for sandbox in [Sandbox::on(&server.url()), Sandbox::new()] {
        let broken = || assert_eq!(sandbox.say(&["break", "a", "--yes"]).code, Some(0));
        let (beside, said, told) = overlap(&sandbox, &[], broken);
        assert!(beside < AT_ONCE, "it ran for {beside:?} beside its successor: {said:?}");
        assert!(!told, "there is no time for TERM: {said:?}");
    }
}

/// The command has a part in the lock, so that its successor does not enter before it is dead.
#[test]
fn on_files_a_break_waits_for_the_old_command_to_die() {
    let sandbox = Sandbox::new();
    let grace = ["--overlap-grace", "500ms"];
    let run = sandbox.spawn(&[&["run", "a"], &grace[..], &["--", "sh", "-c", STUBBORN]].concat());
    run.wait_out("ready");
    sandbox.wait_for("beats");
    assert_eq!(sandbox.say(&["break", "a", "--yes"]).code, Some(0));
    let beats = sandbox.read("beats");
    assert_eq!(run.end().code, Some(70));
    assert_eq!(sandbox.read("beats"), beats, "it ran after the lock was free");
}

#[test]
fn an_overlap_grace_lets_the_command_run_beside_its_successor() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let broken = || assert_eq!(sandbox.say(&["break", "a", "--yes"]).code, Some(0));
    let (beside, said, told) = overlap(&sandbox, &["--overlap-grace", "3s"], broken);
    assert!(told, "it is asked first: {said:?}");
    assert!(beside > Duration::from_secs(1), "it had {beside:?}: {said:?}");
}

#[test]
fn a_lock_that_is_taken_away_ends_the_command() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let work = "trap 'echo told > told; exit 0' TERM; echo ready; while :; do sleep 0.05; done";
    let grace = ["--ttl", "9s", "--overlap-grace", "5s"];
    let run =
        sandbox.spawn(&[&["run", "a", "--json"], &grace[..], &["--", "sh", "-c", work]].concat());
    run.wait_out("ready");
    // Somebody else's key in its place: nobody enters while that is there.
    server.command(&["SET", "lockkeeper:{a}", "foreign", "PX", "600000"]);
    let next = sandbox.spawn(&["run", "a", "--", "cat", "told"]);
    next.wait_err("waiting");
    let said = run.end();
    assert_eq!(said.code, Some(70), "{said:?}");
    assert!(said.err.contains(r#""event":"exited""#), "{said:?}");
    assert!(said.err.contains(r#""kind":"lost""#), "{said:?}");
    assert_eq!(server.command(&["GET", "lockkeeper:{a}"]), "foreign", "it is left alone");
    server.command(&["DEL", "lockkeeper:{a}"]);
    let next = next.end();
    assert_eq!((next.code, next.out.as_str()), (Some(0), "told\n"), "{next:?}");
}

#[test]
fn a_loss_that_is_noticed_only_at_the_release_is_told() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let mut run =
        sandbox.spawn(&["run", "a", "--ttl", "10m", "--", "sh", "-c", "echo ready; read x"]);
    run.wait_out("ready");
    server.command(&["DEL", "lockkeeper:{a}"]);
    run.tell("go\n");
    let said = run.end();
    assert_eq!(said.code, Some(70), "{said:?}");
    assert!(said.err.contains("lost before the command ended"), "{said:?}");
}

#[test]
fn a_broken_file_lock_ends_the_command() {
    let sandbox = Sandbox::new();
    let run = sandbox.hold("a", &[]);
    assert_eq!(sandbox.say(&["break", "a", "--yes"]).code, Some(0));
    let said = run.end();
    assert_eq!(said.code, Some(70), "{said:?}");
}

#[test]
fn a_session_that_postgres_terminates_ends_the_command() {
    let server = PostgresServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let run = sandbox.hold("a", &[]);
    // It terminates the session, which is all that the server can do.
    assert_eq!(sandbox.say(&["break", "a", "--yes"]).code, Some(0));
    let said = run.end();
    assert_eq!(said.code, Some(70), "{said:?}");
    assert!(said.err.contains("or its session ended): the command was killed"), "{said:?}");
    assert_eq!(sandbox.say(&["run", "a", "--no-wait", "--", "true"]).code, Some(0));
}

#[test]
fn a_command_outlives_its_first_lease() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    // So long that a busy machine does not miss the renewals.
    let ttl = ["--ttl", "20s", "--kill-after", "1s"];
    let said = sandbox.say(&[&["run", "a"], &ttl[..], &["--", "sleep", "21"]].concat());
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
}

#[test]
fn a_store_that_is_back_in_time_costs_nothing() {
    let mut server = RedisServer::builder().persistent().start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let run = sandbox.spawn(&["run", "a", "--ttl", "60s", "--", "sh", "-c", "echo ready; read x"]);
    run.wait_out("ready");
    server.restart().unwrap();
    let ttl = || server.command(&["PTTL", "lockkeeper:{a}"]).parse::<i64>().unwrap();
    let before = ttl();
    assert!(before > 0);
    eventually("it is renewed", || ttl() > before);
    assert_eq!(run.end().code, Some(1), "the end of its input ended it");
}

#[test]
fn a_grace_that_does_not_fit_in_the_lease_is_refused() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let said =
        sandbox.say(&["run", "a", "--ttl", "5s", "--kill-after", "3s", "--", "touch", "ran"]);
    assert_eq!(said.code, Some(64), "{said:?}");
    assert!(said.err.contains("--kill-after of 3s does not fit in a --ttl of 5s"), "{said:?}");
    assert!(!sandbox.path("ran").exists());
    assert_eq!(
        sandbox.say(&["run", "a", "--ttl", "5s", "true"]).code,
        Some(0),
        "the default adapts"
    );
    // Sessions that the server ends in silence are leases, too.
    let server = PostgresServer::start_or_panic();
    let session = Sandbox::on(&server.url());
    let said =
        session.say(&["run", "a", "--ttl", "5s", "--kill-after", "3s", "--", "touch", "ran"]);
    assert_eq!(said.code, Some(64), "{said:?}");
    assert!(!session.path("ran").exists());
    let files = Sandbox::new();
    let said = files.say(&["run", "a", "--kill-after", "1h", "true"]);
    assert_eq!(said.code, Some(0), "no lease, no limit: {said:?}");
}
