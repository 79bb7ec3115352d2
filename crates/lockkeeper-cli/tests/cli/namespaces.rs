//! The command in pid namespaces: as process 1, with a process group from outside, and with the `/proc` of another
//! namespace, where processes are not listed, as on systems without `/proc`.

use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};

use crate::common::{PROGRAM, Running, Sandbox, children, eventually};

/// Runs a program in a new pid namespace, whose processes are killed at the end of the test.
#[track_caller]
fn unshare(sandbox: &Sandbox, options: &[&str], program: &[&str]) -> Running {
    let mut unshare = vec!["--pid", "--fork", "--kill-child"];
    if !rustix::process::geteuid().is_root() {
        unshare.extend(["--user", "--map-root-user"]);
    }
    unshare.extend(options);
    let command = |program: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(&unshare).args(program);
        sandbox.environ(&mut command);
        command
    };
    let permitted = Running::start(command(&["true"])).end();
    assert_eq!(
        permitted.code,
        Some(0),
        "this test needs pid namespaces: run it as root, or allow user namespaces: {permitted:?}"
    );
    Running::start(command(program))
}

/// Returns the pid, outside of the namespace, of the lockkeeper that runs in it.
#[track_caller]
fn wrapper(unshare: &Running) -> Pid {
    let mut found = Vec::new();
    eventually("the wrapper runs", || {
        found = children(unshare.pid(), "run");
        found.len() == 1
    });
    found[0]
}

#[test]
fn process_1_reaps_the_orphans_that_it_adopts() {
    let sandbox = Sandbox::new();
    // Each inner shell leaves an orphan that exits at once.
    let work = "test \"$(cut -d ' ' -f 4 /proc/$$/stat)\" = 1 || echo not process 1; \
        for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do sh -c '(exec true &)'; done; \
        tries=0; \
        while grep -l ') Z 1 ' /proc/[0-9]*/stat > zombies 2> /dev/null && [ $tries -lt 200 ]; do \
        tries=$((tries + 1)); sleep 0.02; done; \
        echo zombies $(wc -l < zombies)";
    let run = unshare(&sandbox, &["--mount-proc"], &[PROGRAM, "run", "a", "--", "sh", "-c", work]);
    let output = run.end();
    assert_eq!((output.code, output.out.as_str()), (Some(0), "zombies 0\n"), "{output:?}");
}

#[test]
fn a_process_group_outside_of_the_namespace_is_not_a_failure() {
    let sandbox = Sandbox::new();
    for options in [&["--mount-proc"][..], &[]] {
        let output = unshare(&sandbox, options, &[PROGRAM, "run", "a", "--", "echo", "ran"]).end();
        assert_eq!(
            (output.code, output.out.as_str()),
            (Some(0), "ran\n"),
            "{options:?}: {output:?}"
        );
        assert_eq!(output.err, "", "{options:?}");
    }
}

#[test]
fn where_processes_are_not_listed_the_lock_is_free_only_when_the_group_has_ended() {
    let sandbox = Sandbox::new();
    // The grandchild cleans up for half a second, and the command does not wait for it.
    let work = "sh -c 'trap \"sleep 0.5; echo tidied > tidied; exit\" TERM; echo up > up; \
        while :; do sleep 0.05; done' & \
        while ! [ -s up ]; do sleep 0.01; done; echo ready; exec sleep 600";
    // With the namespace's own /proc, processes are listed, and the result must be the same.
    for options in [&[][..], &["--mount-proc"]] {
        let run = unshare(&sandbox, options, &[PROGRAM, "run", "a", "--", "sh", "-c", work]);
        run.wait_out("ready");
        let next = sandbox.spawn(&["run", "a", "--", "cat", "tidied"]);
        next.wait_err("waiting");
        kill_process(wrapper(&run), Signal::TERM).unwrap();
        let output = run.end();
        assert_eq!(output.code, Some(143), "{options:?}: {output:?}");
        let next = next.end();
        assert_eq!(next.out, "tidied\n", "{options:?}: {next:?}");
        for file in ["up", "tidied"] {
            std::fs::remove_file(sandbox.path(file)).unwrap();
        }
    }
}

#[test]
fn where_processes_are_not_listed_a_group_that_ignores_term_is_killed() {
    let sandbox = Sandbox::new();
    let work = "sh -c 'trap \"\" TERM; echo up > up; while :; do sleep 0.05; done' & \
        while ! [ -s up ]; do sleep 0.01; done; echo ready; exec sleep 600";
    let args = [PROGRAM, "run", "a", "--kill-after", "300ms", "--", "sh", "-c", work];
    let run = unshare(&sandbox, &[], &args);
    run.wait_out("ready");
    kill_process(wrapper(&run), Signal::TERM).unwrap();
    assert_eq!(run.end().code, Some(143));
    assert_eq!(sandbox.run(&["run", "a", "--no-wait", "true"]).code, Some(0));
}

#[test]
fn where_processes_are_not_listed_a_loss_warns_of_processes_that_left_the_group() {
    let sandbox = Sandbox::new();
    let work = "echo ready; exec sleep 600";
    let run = unshare(&sandbox, &[], &[PROGRAM, "run", "a", "--", "sh", "-c", work]);
    run.wait_out("ready");
    assert_eq!(sandbox.run(&["break", "a", "--yes"]).code, Some(0));
    let output = run.end();
    assert_eq!(output.code, Some(70), "{output:?}");
    assert!(output.err.contains("processes that left the group may still run"), "{output:?}");
    assert!(output.err.contains("the command was killed"), "{output:?}");
}
