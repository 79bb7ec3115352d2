//! On a terminal: the waiting line, Ctrl-C, Ctrl-Z, and the foreground process group.

use std::process::Command;

use lockkeeper_testkit::server::RedisServer;
use rexpect::session::{PtySession, spawn_command};

use crate::common::{PROGRAM, Sandbox, eventually, is_alive, parent, state};

/// A pseudo-terminal with a shell that has job control.
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

    /// Waits for a text and returns the output before it.
    #[track_caller]
    fn expect(&mut self, text: &str) -> String {
        self.0.exp_string(text).unwrap_or_else(|error| panic!("no {text:?}: {error}"))
    }

    fn end(mut self) {
        self.line("exit");
        // A shell with stopped jobs exits only at the second request. Any other has exited by now.
        let _ = self.0.send_line("exit");
        let _ = self.0.exp_eof();
    }
}

#[test]
fn the_waiting_line_names_the_holder_and_is_removed_afterwards() {
    let sandbox = Sandbox::new();
    let mut holder =
        sandbox.spawn(&["run", "a", "--label", "me", "--", "sh", "-c", "echo in; read x"]);
    holder.wait_out("in");
    let mut shell = Shell::start(&sandbox, "xterm");
    shell.line("$LK run a -- echo got it");
    shell.expect("for \"a\": held by me for ");
    let redrawn = shell.expect("for \"a\": held by me for ");
    assert!(redrawn.contains("\r\x1b[K") && !redrawn.contains('\n'), "{redrawn:?}");
    holder.write_stdin("go\n");
    let before = shell.expect("got it");
    assert!(before.contains("\r\x1b[K"), "{before:?}");
    assert!(before.contains("lockkeeper: acquired \"a\" after"), "{before:?}");
    shell.end();
}

#[test]
fn the_waiting_line_fits_the_terminal() {
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
fn on_a_dumb_terminal_waiting_messages_are_plain_lines() {
    let sandbox = Sandbox::new();
    let mut holder = sandbox.spawn(&["run", "a", "--", "sh", "-c", "echo in; read x"]);
    holder.wait_out("in");
    let mut shell = Shell::start(&sandbox, "dumb");
    shell.line("$LK run a -- echo got it");
    shell.expect("lockkeeper: waiting for \"a\": held by ");
    holder.write_stdin("go\n");
    let before = shell.expect("got it");
    assert!(!before.contains('\x1b'), "{before:?}");
    shell.end();
}

#[test]
fn ctrl_c_reaches_the_command() {
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
fn ctrl_c_reaches_a_command_that_creates_its_own_process_group() {
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
fn an_int_that_is_not_from_the_terminal_does_not_end_the_script() {
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
fn a_job_that_is_stopped_past_its_lease_is_killed_and_reports_it_when_continued() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let mut shell = Shell::start(&sandbox, "xterm");
    shell.line("$LK run a --ttl 6s -- sh -c 'echo $$ > pid; echo in; exec sleep 600'");
    shell.expect("in\r\n");
    let pid = sandbox.pid_in("pid");
    shell.press('z');
    shell.expect("<ready>");
    eventually("the command is dead", || !is_alive(pid));
    shell.line("fg");
    shell.expect(
        "its lease expired while lockkeeper was stopped or stalled; the command was killed",
    );
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
    // The shell is in the foreground again.
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
        sandbox.run(&["run", "a", "--no-wait", "true"]).code,
        Some(75),
        "the stopped job holds the lock"
    );
    shell.line("fg");
    eventually("the command continues", || state(pid).is_some_and(|state| state != 'T'));
    shell.line("hello");
    shell.expect("read <hello>");
    shell.expect("<ready>");
    shell.line("echo code $?");
    shell.expect("code 4");
    shell.end();
}

#[test]
fn a_background_job_that_reads_from_the_terminal_is_stopped_until_fg() {
    let sandbox = Sandbox::new();
    let mut shell = Shell::start(&sandbox, "xterm");
    shell.line("$LK run a -- sh -c 'echo $$ > pid; read x; echo \"read <$x>\"' &");
    shell.expect("<ready>");
    let pid = sandbox.pid_in("pid");
    eventually("the command is stopped", || state(pid) == Some('T'));
    let wrapper = parent(pid);
    eventually("the wrapper is stopped", || state(wrapper) == Some('T'));
    shell.line("fg");
    eventually("the command continues", || state(pid).is_some_and(|state| state != 'T'));
    shell.line("hello");
    shell.expect("read <hello>");
    shell.end();
}
