//! On a terminal: the live line, Ctrl-C, Ctrl-Z, and who is in the foreground.

use std::process::Command;

use lockkeeper_testkit::server::RedisServer;
use rexpect::session::{PtySession, spawn_command};

use crate::common::{PROGRAM, Sandbox, eventually, lives, parent, state};

/// A terminal with a shell that has job control.
struct Shell(PtySession);

impl Shell {
    fn start(sandbox: &Sandbox, term: &str) -> Self {
        let mut command = Command::new("bash");
        command.args(["--norc", "--noprofile", "--noediting", "-i"]);
        sandbox.environ(&mut command);
        command.env("TERM", term).env("PS1", "prompt> ").env("LK", PROGRAM);
        let mut session = spawn_command(command, Some(30_000)).unwrap();
        session.process_mut().set_kill_timeout(Some(1000));
        let mut shell = Self(session);
        shell.expect("prompt> ");
        shell.line("stty -echo; PS1='<ready>'");
        shell.expect("<ready>");
        shell
    }

    fn line(&mut self, line: &str) {
        self.0.send_line(line).unwrap();
    }

    fn press(&mut self, key: char) {
        self.0.send_control(key).unwrap();
    }

    /// What comes before a text that must come.
    #[track_caller]
    fn expect(&mut self, text: &str) -> String {
        self.0.exp_string(text).unwrap_or_else(|error| panic!("no {text:?}: {error}"))
    }

    fn end(mut self) {
        self.line("exit");
        // A shell with jobs that are stopped wants to be told twice; another may be gone by now.
        let _ = self.0.send_line("exit");
        let _ = self.0.exp_eof();
    }
}

#[test]
fn while_waiting_one_line_tells_who_holds_and_it_is_removed_afterwards() {
    let sandbox = Sandbox::new();
    let mut holder =
        sandbox.spawn(&["run", "a", "--label", "me", "--", "sh", "-c", "echo in; read x"]);
    holder.wait_out("in");
    let mut shell = Shell::start(&sandbox, "xterm");
    shell.line("$LK run a -- echo got it");
    shell.expect("for \"a\": held by me for ");
    let redrawn = shell.expect("for \"a\": held by me for ");
    assert!(redrawn.contains("\r\x1b[K") && !redrawn.contains('\n'), "{redrawn:?}");
    holder.tell("go\n");
    let before = shell.expect("got it");
    assert!(before.contains("\r\x1b[K"), "{before:?}");
    assert!(before.contains("lockkeeper: acquired \"a\" after"), "{before:?}");
    shell.end();
}

#[test]
fn the_line_fits_the_terminal() {
    let sandbox = Sandbox::new();
    let label = "x".repeat(200);
    let _holder = sandbox.hold("a", &["--label", &label]);
    let mut shell = Shell::start(&sandbox, "xterm");
    shell.line("stty cols 40; $LK run a -- true");
    shell.expect("\r\x1b[K");
    let line = shell.expect("\r\x1b[K");
    assert!(line.starts_with("waiting ") && line.chars().count() <= 39, "{line:?}");
    shell.press('c');
    shell.expect("<ready>");
    shell.line("echo code $?");
    shell.expect("code 130");
    shell.end();
}

#[test]
fn a_dumb_terminal_gets_plain_lines() {
    let sandbox = Sandbox::new();
    let mut holder = sandbox.spawn(&["run", "a", "--", "sh", "-c", "echo in; read x"]);
    holder.wait_out("in");
    let mut shell = Shell::start(&sandbox, "dumb");
    shell.line("$LK run a -- echo got it");
    shell.expect("lockkeeper: waiting for \"a\": held by ");
    holder.tell("go\n");
    let before = shell.expect("got it");
    assert!(!before.contains('\x1b'), "{before:?}");
    shell.end();
}

#[test]
fn ctrl_c_goes_to_the_command() {
    let sandbox = Sandbox::new();
    let mut shell = Shell::start(&sandbox, "xterm");
    shell.line("$LK run a -- sh -c 'trap \"echo trapped; exit 5\" INT; echo in; while :; do sleep 0.05; done'");
    shell.expect("in\r\n");
    shell.press('c');
    shell.expect("trapped");
    shell.expect("<ready>");
    shell.line("echo code $?");
    shell.expect("code 5");
    shell.line("$LK run a -- sh -c 'echo in; exec sleep 600'");
    shell.expect("in\r\n");
    shell.press('c');
    shell.expect("<ready>");
    shell.line("echo code $?");
    shell.expect("code 130");
    shell.end();
}

#[test]
fn ctrl_c_reaches_a_command_that_wants_a_group_of_its_own() {
    let sandbox = Sandbox::new();
    let mut shell = Shell::start(&sandbox, "xterm");
    shell.line("$LK run a -- timeout 600 sh -c 'echo in; exec sleep 600'");
    shell.expect("in\r\n");
    shell.press('c');
    shell.expect("<ready>");
    shell.line("echo code $?");
    shell.expect("code 1");
    shell.end();
}

#[test]
fn ctrl_c_ends_a_script_that_runs_one_command_after_another() {
    let sandbox = Sandbox::new();
    let mut shell = Shell::start(&sandbox, "xterm");
    shell.line("bash -c 'for i in 1 2 3; do $LK run a -- sh -c \"echo in $i; exec sleep 600\"; done; echo after'");
    shell.expect("in 1\r\n");
    shell.press('c');
    let until = shell.expect("<ready>");
    assert!(!until.contains("in 2") && !until.contains("after"), "{until:?}");
    shell.line("echo code $?");
    shell.expect("code 130");
    shell.end();
}

#[test]
fn ctrl_c_while_waiting_ends_a_script_that_runs_one_command_after_another() {
    let sandbox = Sandbox::new();
    let _holder = sandbox.hold("a", &["--label", "me"]);
    let mut shell = Shell::start(&sandbox, "xterm");
    shell.line("bash -c 'for i in 1 2 3; do $LK run a -- true; echo after $i; done'");
    shell.expect("for \"a\": held by me for ");
    shell.press('c');
    let until = shell.expect("<ready>");
    assert!(!until.contains("after"), "{until:?}");
    shell.line("echo code $?");
    shell.expect("code 130");
    shell.end();
}

#[test]
fn int_from_elsewhere_is_not_taken_for_ctrl_c() {
    let sandbox = Sandbox::new();
    let mut shell = Shell::start(&sandbox, "xterm");
    shell.line("bash -c '$LK run a -- sh -c \"echo \\$PPID > wrapper; echo in; exec sleep 600\"; echo after $?'");
    shell.expect("in\r\n");
    let wrapper = sandbox.pid_in("wrapper");
    rustix::process::kill_process(wrapper, rustix::process::Signal::INT).unwrap();
    shell.expect("after 130");
    shell.end();
}

#[test]
fn a_job_that_is_stopped_for_longer_than_its_lease_is_dead_and_says_so_when_it_is_continued() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let mut shell = Shell::start(&sandbox, "xterm");
    shell.line("$LK run a --ttl 6s -- sh -c 'echo $$ > pid; echo in; exec sleep 600'");
    shell.expect("in\r\n");
    let pid = sandbox.pid_in("pid");
    shell.press('z');
    shell.expect("<ready>");
    eventually("the command is dead", || !lives(pid));
    shell.line("fg");
    shell.expect("the lock was not renewed in time: the command was killed");
    shell.expect("<ready>");
    shell.line("echo code $?");
    shell.expect("code 70");
    shell.end();
}

#[test]
fn the_command_can_read_from_the_terminal() {
    let sandbox = Sandbox::new();
    let mut shell = Shell::start(&sandbox, "xterm");
    shell.line("$LK run a -- sh -c 'echo in; read x; echo \"read <$x>\"'");
    shell.expect("in\r\n");
    shell.line("hello");
    shell.expect("read <hello>");
    shell.expect("<ready>");
    // The shell has its terminal back.
    shell.line("read y; echo \"shell <$y>\"");
    shell.line("there");
    shell.expect("shell <there>");
    shell.end();
}

#[test]
fn ctrl_z_stops_the_job_and_fg_continues_it() {
    let sandbox = Sandbox::new();
    let mut shell = Shell::start(&sandbox, "xterm");
    shell.line("$LK run a -- sh -c 'echo $$ > pid; echo in; read x; echo \"read <$x>\"; exit 4'");
    shell.expect("in\r\n");
    let pid = sandbox.pid_in("pid");
    shell.press('z');
    shell.expect("Stopped");
    shell.expect("<ready>");
    eventually("the command is stopped", || state(pid) == Some('T'));
    assert_eq!(
        sandbox.say(&["run", "a", "--no-wait", "true"]).code,
        Some(75),
        "and holds the lock"
    );
    shell.line("fg");
    eventually("the command goes on", || state(pid).is_some_and(|state| state != 'T'));
    shell.line("hello");
    shell.expect("read <hello>");
    shell.expect("<ready>");
    shell.line("echo code $?");
    shell.expect("code 4");
    shell.end();
}

#[test]
fn a_job_in_the_background_that_wants_to_read_waits_for_the_foreground() {
    let sandbox = Sandbox::new();
    let mut shell = Shell::start(&sandbox, "xterm");
    shell.line("$LK run a -- sh -c 'echo $$ > pid; read x; echo \"read <$x>\"' &");
    shell.expect("<ready>");
    let pid = sandbox.pid_in("pid");
    eventually("it is stopped", || state(pid) == Some('T'));
    let wrapper = parent(pid);
    eventually("and so is the wrapper", || state(wrapper) == Some('T'));
    shell.line("fg");
    eventually("it goes on", || state(pid).is_some_and(|state| state != 'T'));
    shell.line("hello");
    shell.expect("read <hello>");
    shell.end();
}
