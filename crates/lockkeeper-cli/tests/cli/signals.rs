//! Signals to lockkeeper (the wrapper) and its group. If the wrapper or the guardian is killed, the command does not
//! outlive the lock.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt as _;
use std::time::Duration;

use lockkeeper_testkit::server::RedisServer;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::common::{Running, Sandbox, children, eventually, is_alive, mask_has};

/// Runs a shell script under the lock "a" and waits until it has printed "ready".
fn script(sandbox: &Sandbox, options: &[&str], script: &str) -> Running {
    let mut args = vec!["run", "a"];
    args.extend(options);
    args.extend(["--", "sh", "-c", script]);
    let run = sandbox.spawn(&args);
    run.wait_out("ready");
    run
}

#[test]
fn signals_are_forwarded_to_the_command_and_its_children() {
    let sandbox = Sandbox::new();
    let all = [
        ("INT", Signal::INT),
        ("TERM", Signal::TERM),
        ("HUP", Signal::HUP),
        ("QUIT", Signal::QUIT),
        ("USR1", Signal::USR1),
        ("USR2", Signal::USR2),
    ];
    for (name, signal) in all {
        let work =
            format!("trap 'echo outer; exit 9' {name}; echo ready; while :; do sleep 0.05; done");
        let run = script(&sandbox, &[], &work);
        run.signal(signal);
        let output = run.end();
        assert_eq!(
            (output.code, output.out.as_str()),
            (Some(9), "ready\nouter\n"),
            "{name}: {output:?}"
        );
        if matches!(name, "INT" | "QUIT") {
            // A background process of a shell ignores these, and its shell cannot trap them.
            continue;
        }
        let inner = format!(
            "trap \"echo inner > {name}; exit\" {name}; echo started > {name}.up; \
             while :; do sleep 0.05; done"
        );
        let outer = format!(
            "trap 'exit 9' {name}; sh -c '{inner}' & \
             while ! [ -s {name}.up ]; do sleep 0.01; done; echo ready; while :; do sleep 0.05; done"
        );
        let run = script(&sandbox, &[], &outer);
        run.signal(signal);
        assert_eq!(run.end().code, Some(9), "{name}");
        sandbox.wait_for(name);
    }
}

#[test]
fn a_signal_ends_grandchildren_and_the_lock_is_released_after_that() {
    let sandbox = Sandbox::new();
    // The grandchild cleans up for half a second, and the command does not wait for it.
    let grandchild = "trap 'sleep 0.5; echo tidied > tidied; exit' TERM; echo $$ > grandchild; \
                      while :; do sleep 0.05; done";
    let run = script(
        &sandbox,
        &[],
        &format!(
            "sh -c \"{}\" & while ! [ -s grandchild ]; do sleep 0.01; done; echo ready; \
                  exec sleep 600",
            grandchild.replace('$', "\\$")
        ),
    );
    let grandchild = sandbox.pid_in("grandchild");
    let next = sandbox.spawn(&["run", "a", "--", "sh", "-c", "cat tidied"]);
    next.wait_err("waiting");
    run.signal(Signal::TERM);
    assert_eq!(run.end().code, Some(143));
    assert!(!is_alive(grandchild));
    assert_eq!(next.end().out, "tidied\n");
}

#[test]
fn a_grandchild_that_ignores_a_signal_is_killed() {
    let sandbox = Sandbox::new();
    let run = script(
        &sandbox,
        &["--kill-after", "300ms"],
        "sh -c 'trap \"\" TERM; echo $$ > stubborn; while :; do sleep 0.05; done' & \
         while ! [ -s stubborn ]; do sleep 0.01; done; echo ready; exec sleep 600",
    );
    let stubborn = sandbox.pid_in("stubborn");
    run.signal(Signal::TERM);
    assert_eq!(run.end().code, Some(143));
    eventually("the grandchild is dead", || !is_alive(stubborn));
}

#[test]
fn a_signal_reaches_a_command_that_creates_its_own_process_group() {
    let sandbox = Sandbox::new();
    let work = "trap 'echo trapped; exit 9' TERM; echo ready; while :; do sleep 0.05; done";
    let run = sandbox.spawn(&["run", "a", "--", "timeout", "600", "sh", "-c", work]);
    run.wait_out("ready");
    run.signal(Signal::TERM);
    let output = run.end();
    assert!(output.out.contains("trapped"), "{output:?}");
}

#[test]
fn background_processes_survive_a_command_that_exits_on_its_own() {
    let sandbox = Sandbox::new();
    let output = sandbox.run(&["run", "a", "--", "sh", "-c", "sleep 600 >&- 2>&- & echo $! > pid"]);
    assert_eq!(output.code, Some(0));
    let pid = sandbox.pid_in("pid");
    assert!(is_alive(pid));
    kill_process(pid, Signal::KILL).unwrap();
}

/// Starts a child, a child in a new session, a child in a new process group, and an orphan.
const FAMILY: &str = "sleep 600 & echo $! > child; \
    setsid sh -c 'echo $$ > session; exec sleep 600' & \
    timeout 600 sh -c 'echo $$ > group; exec sleep 600' & \
    sh -c '(sh -c \"echo \\$\\$ > orphan; exec setsid sleep 600\" &)'; \
    for f in child session group orphan; do while ! [ -s $f ]; do sleep 0.01; done; done; \
    echo $$ > itself; echo ready; wait";

fn family(sandbox: &Sandbox) -> Vec<Pid> {
    let pids: Vec<Pid> = ["child", "session", "group", "orphan", "itself"]
        .iter()
        .map(|name| sandbox.pid_in(name))
        .collect();
    assert!(pids.iter().all(|pid| is_alive(*pid)));
    pids
}

#[test]
fn if_the_wrapper_is_killed_the_command_and_all_its_processes_are_killed() {
    let sandbox = Sandbox::new();
    let mut run = script(&sandbox, &[], FAMILY);
    let family = family(&sandbox);
    let guardians = children(run.pid(), "__guardian");
    assert_eq!(guardians.len(), 1);
    run.signal(Signal::KILL);
    assert_eq!(run.code(), None);
    for pid in family {
        eventually("it is dead", || !is_alive(pid));
    }
    eventually("the guardian ends", || !is_alive(guardians[0]));
    assert_eq!(sandbox.run(&["run", "a", "--", "true"]).code, Some(0));
}

#[test]
fn a_guardian_that_is_killed_is_replaced() {
    let sandbox = Sandbox::new();
    let mut run = script(&sandbox, &[], FAMILY);
    let family = family(&sandbox);
    for _ in 0..3 {
        let before = children(run.pid(), "__guardian");
        assert_eq!(before.len(), 1, "{before:?}");
        kill_process(before[0], Signal::KILL).unwrap();
        eventually("a new guardian runs", || {
            let now = children(run.pid(), "__guardian");
            now.len() == 1 && now != before
        });
    }
    assert!(family.iter().all(|pid| is_alive(*pid)));
    run.signal(Signal::KILL);
    assert_eq!(run.code(), None);
    for pid in family {
        eventually("it is dead", || !is_alive(pid));
    }
}

#[test]
fn a_wrapper_that_is_stopped_does_not_keep_the_command_alive_past_its_lease() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    // A process that has left the group writes the time to a file every 20 ms.
    let beats = "while :; do date +%s%N >> beats; sleep 0.02; done";
    let work = format!("setsid sh -c '{beats}' & {FAMILY}");
    let run = script(&sandbox, &["--ttl", "15s", "--kill-after", "1s"], &work);
    let family = family(&sandbox);
    sandbox.wait_for("beats");
    let next = sandbox.spawn(&["run", "a", "--", "sh", "-c", "date +%s%N > entered"]);
    next.wait_err("waiting");
    run.signal(Signal::STOP);
    for pid in &family {
        eventually("it is dead", || !is_alive(*pid));
    }
    assert_eq!(next.end().code, Some(0));
    let entered: u128 = sandbox.read("entered").trim().parse().unwrap();
    let last = sandbox.last_beat();
    assert!(last < entered, "last beat {last}, entered {entered}");
    run.signal(Signal::CONT);
    let output = run.end();
    assert_eq!(output.code, Some(70), "{output:?}");
    assert!(output.err.contains("its lease expired while"), "{output:?}");
}

#[test]
fn a_signal_while_waiting_ends_the_wait_and_leaves_the_queue() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let _holder = sandbox.hold("a", &[]);
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let waiter = sandbox.spawn(&["run", "a", "--", "touch", "ran"]);
        waiter.wait_err("waiting");
        waiter.signal(signal);
        assert_eq!(waiter.end().code, Some(code));
        assert!(!sandbox.run(&["ls"]).out.contains("waiting"));
    }
    assert!(!sandbox.path("ran").exists());
}

/// Without a terminal, Ctrl-C in a script reaches the whole process group of the wrapper. A child is in that group for
/// a short time after its fork.
#[test]
fn an_interrupt_of_the_process_group_at_any_time_is_exit_code_130() {
    let sandbox = Sandbox::new();
    let mut codes = BTreeMap::new();
    for round in 0..150 {
        let mut command = sandbox.command(&["run", "a", "--", "sleep", "600"]);
        command.process_group(0);
        let run = Running::start(command);
        std::thread::sleep(Duration::from_micros(200 * round));
        kill_process_group(run.pid(), Signal::INT).unwrap();
        let output = run.end();
        *codes.entry((output.code, output.err)).or_insert(0) += 1;
    }
    // `None` means that the signal killed it before its handlers were registered.
    let wrong = codes.iter().find(|((code, _), _)| !matches!(code, None | Some(130)));
    assert_eq!(wrong, None, "{codes:?}");
    assert_eq!(sandbox.run(&["run", "a", "--no-wait", "--", "true"]).code, Some(0));
}

#[test]
fn a_signal_that_is_ignored_at_the_start_stays_ignored() {
    let sandbox = Sandbox::new();
    let lk = crate::common::PROGRAM;
    let work = "trap '' HUP INT; exec \"$0\" run a -- sh -c 'echo $$ > itself; echo ready; read x; exit 6'";
    let mut command = std::process::Command::new("sh");
    command.args(["-c", work, lk]);
    sandbox.environ(&mut command);
    let mut run = Running::start(command);
    run.wait_out("ready");
    let itself = sandbox.pid_in("itself");
    for signal in [Signal::HUP, Signal::INT] {
        assert!(mask_has(itself, "SigIgn", signal), "the command ignores it");
        assert!(mask_has(run.pid(), "SigIgn", signal), "the wrapper ignores it");
        run.signal(signal);
    }
    run.write_stdin("go\n");
    assert_eq!(run.end().code, Some(6));
    // The same while waiting.
    let holder = sandbox.hold("b", &[]);
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$0\" run b -- true", lk]);
    sandbox.environ(&mut command);
    let waiter = Running::start(command);
    waiter.wait_err("waiting");
    waiter.signal(Signal::HUP);
    drop(holder);
    assert_eq!(waiter.end().code, Some(0));
}

#[test]
fn a_signal_that_is_blocked_at_the_start_is_forwarded() {
    let sandbox = Sandbox::new();
    let mut command = std::process::Command::new("env");
    let work = "echo ready; exec sleep 600";
    command.args([
        "--block-signal=TERM",
        crate::common::PROGRAM,
        "run",
        "a",
        "--",
        "sh",
        "-c",
        work,
    ]);
    sandbox.environ(&mut command);
    let run = Running::start(command);
    run.wait_out("ready");
    run.signal(Signal::TERM);
    assert_eq!(run.end().code, Some(143));
}

#[test]
fn a_command_does_not_survive_a_signal_that_arrives_right_after_the_grant() {
    let sandbox = Sandbox::new();
    for round in 0..20 {
        let run =
            sandbox.spawn(&["run", "a", "--json", "--", "sh", "-c", "echo ran; exec sleep 600"]);
        run.wait_err("\"acquired\"");
        run.signal(Signal::TERM);
        let output = run.end();
        assert_eq!(output.code, Some(143), "{round}: {output:?}");
        assert!(output.err.contains("\"released\""), "{round}: {output:?}");
    }
    assert_eq!(sandbox.run(&["run", "a", "--no-wait", "true"]).code, Some(0));
}

#[test]
fn a_command_is_killed_if_its_wrapper_dies_between_fork_and_exec() {
    // The guardian then knows no group, and the command has its mark only after the exec.
    let owner = "0123456789abcdef0123456789abcdef";
    let mut guardian = std::process::Command::new(crate::common::PROGRAM);
    guardian.arg("__guardian").env_clear();
    let mut guardian = Running::start(guardian);
    guardian.write_stdin(&format!("owner {owner}\n"));
    // The first search should find no process. If it has not started yet, the test is easier to pass, not harder.
    std::thread::sleep(std::time::Duration::from_millis(50));
    let mut command = std::process::Command::new("sleep");
    command.arg("600").env("LOCKKEEPER_OWNER", owner);
    let mut late = Running::start(command);
    assert_eq!(late.code(), None, "it is killed");
    assert_eq!(guardian.end().code, Some(0));
}

#[test]
fn a_command_that_another_process_kills_is_exit_code_137_and_the_lock_is_free() {
    let sandbox = Sandbox::new();
    let run = script(&sandbox, &[], "echo $$ > itself; echo ready; exec sleep 600");
    kill_process(sandbox.pid_in("itself"), Signal::KILL).unwrap();
    assert_eq!(run.end().code, Some(137));
    assert_eq!(sandbox.run(&["run", "a", "--no-wait", "true"]).code, Some(0));
}

#[test]
fn kill_0_in_the_command_does_not_reach_the_wrapper() {
    let sandbox = Sandbox::new();
    let output = sandbox.run(&["run", "a", "--", "sh", "-c", "sleep 600 & kill 0; sleep 600"]);
    assert_eq!(output.code, Some(143));
}

#[test]
fn if_the_wrapper_is_killed_no_process_acquires_the_lock_before_the_command_is_dead() {
    let sandbox = Sandbox::new();
    for round in 0..3 {
        let work = "echo ready; while :; do date +%s%N >> beats; done";
        let run = script(&sandbox, &[], work);
        let next = sandbox.spawn(&["run", "a", "--", "date", "+%s%N"]);
        next.wait_err("waiting");
        run.signal(Signal::KILL);
        let entered: u128 = next.end().out.trim().parse().unwrap();
        let last = sandbox.last_beat();
        assert!(last < entered, "round {round}: last beat {last}, entered {entered}");
    }
}

#[test]
fn a_process_that_escapes_the_guardian_keeps_a_file_lock_until_it_ends() {
    let sandbox = Sandbox::new();
    let escape = "env -i setsid sh -c 'echo $$ > escaped; exec sleep 600' & \
                  while ! [ -s escaped ]; do sleep 0.01; done; echo ready; wait";
    let mut run = script(&sandbox, &[], escape);
    let escaped = sandbox.pid_in("escaped");
    let guardian = children(run.pid(), "__guardian")[0];
    run.signal(Signal::KILL);
    assert_eq!(run.code(), None);
    eventually("the guardian is gone", || !is_alive(guardian));
    assert!(is_alive(escaped));
    assert_eq!(sandbox.run(&["run", "a", "--no-wait", "true"]).code, Some(75));
    kill_process(escaped, Signal::KILL).unwrap();
    assert_eq!(sandbox.run(&["run", "a", "true"]).code, Some(0));
}
