//! Usage errors and the default store.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use rustix::process::Signal;

use crate::common::{Output, Running, Sandbox};

#[test]
fn without_arguments_the_error_lists_the_subcommands() {
    let output = Sandbox::new().run(&[]);
    assert_eq!(output.code, Some(64), "{output:?}");
    assert_eq!(output.err.lines().count(), 1, "{output:?}");
    assert!(output.err.contains("no subcommand given: use one of run, ls, show"), "{output:?}");
    assert!(output.err.contains("lockkeeper --help"), "{output:?}");
}

#[test]
fn a_usage_error_is_one_line_that_says_what_to_write() {
    let sandbox = Sandbox::new();
    let wrong: [(&[&str], &str); 15] = [
        (&["run", "a", "--waits", "5s", "true"], "'--wait'"),
        (&[], "usage: lockkeeper <COMMAND>"),
        (&["rnu", "a", "true"], "use one of run, ls, "),
        (&["run"], "usage: lockkeeper run"),
        (&["run", "a"], "<COMMAND>..."),
        (&["run", "a", "--wait", "5", "true"], "30s, 5m, 1h30m"),
        (&["run", "a", "--ttl", "never", "true"], "30s, 5m, 1h30m"),
        (&["run", "a", "--ttl", "1ms", "true"], "the minimum is 10ms"),
        (&["run", "", "true"], "a name must not be empty"),
        (&["run", "a", "--permits", "0", "true"], "--permits"),
        (&["run", "a", "--permits", "1", "--shared", "true"], "cannot be used with"),
        (&["run", "a", "--label", "a\nb", "true"], "control characters"),
        (&["run", "a", "--store", "zoo:x", "true"], "file:, redis:"),
        (&["run", "a", "--store", "", "true"], "--store is empty"),
        (&["run", "a", "--store", "/run/locks", "true"], "not a store URL"),
    ];
    for (args, right) in wrong {
        let output = sandbox.run(args);
        assert_eq!(output.code, Some(64), "{args:?}: {output:?}");
        assert_eq!(output.err.lines().count(), 1, "{args:?}: {output:?}");
        assert!(output.err.starts_with("lockkeeper: "), "{args:?}: {output:?}");
        assert!(output.err.contains(right), "{args:?}: {output:?}");
    }
    let mut command = sandbox.command(&["run", "a", "true"]);
    command.env("LOCKKEEPER_STORE", "");
    let output = Running::start(command).end();
    assert_eq!(output.code, Some(64));
    assert!(output.err.contains("LOCKKEEPER_STORE is empty"), "{output:?}");
}

#[test]
fn a_store_that_cannot_be_opened_is_exit_code_69() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("plain"), "").unwrap();
    let file = format!("file:{}", sandbox.path("plain").display());
    let below = format!("file:{}/below", sandbox.path("plain").display());
    for url in ["redis://127.0.0.1:1/", &file, &below, "file:/proc/nowhere"] {
        let output = sandbox.run(&["run", "a", "--store", url, "true"]);
        assert_eq!(output.code, Some(69), "{url}: {output:?}");
        assert_eq!(output.err.lines().count(), 1, "{url}: {output:?}");
    }
}

/// A user other than root, with a home directory and without a configured store.
struct User(Sandbox);

impl User {
    const ID: u32 = 12_345;

    fn new() -> Self {
        let sandbox = Sandbox::new();
        fs::set_permissions(sandbox.path(""), fs::Permissions::from_mode(0o755)).unwrap();
        let user = Self(sandbox);
        for dir in ["home", "session"] {
            user.make(dir);
        }
        user
    }

    /// Creates a directory that belongs to the user.
    fn make(&self, dir: &str) {
        fs::create_dir(self.0.path(dir)).unwrap();
        if rustix::process::geteuid().is_root() {
            chown(self.0.path(dir), Some(Self::ID), None).unwrap();
        }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.0.command(args);
        command.env_remove("LOCKKEEPER_STORE").env("HOME", self.0.path("home"));
        command.env("XDG_RUNTIME_DIR", self.0.path("session"));
        if rustix::process::geteuid().is_root() {
            command.uid(Self::ID);
        }
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        Running::start(self.command(args)).end()
    }
}

#[test]
fn only_its_owner_can_access_the_default_directory() {
    let user = User::new();
    let output = user.run(&["run", "a", "true"]);
    assert_eq!((output.code, output.err.as_str()), (Some(0), ""));
    let dir = user.0.path("home/.local/state/lockkeeper");
    assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
    assert!(dir.join("a.lock").exists());
    let output = user.run(&["doctor"]);
    assert_eq!(output.code, Some(0), "{output:?}");

    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
    let output = user.run(&["run", "a", "true"]);
    assert_eq!(output.code, Some(69), "{output:?}");
    assert!(output.err.contains("set its mode to 0700"), "{output:?}");

    let user = User::new();
    user.make("state");
    user.make("elsewhere");
    symlink(user.0.path("elsewhere"), user.0.path("state/lockkeeper")).unwrap();
    let mut command = user.command(&["run", "a", "true"]);
    command.env("XDG_STATE_HOME", user.0.path("state"));
    let output = Running::start(command).end();
    assert_eq!(output.code, Some(69), "{output:?}");
    assert!(output.err.contains("not a directory"), "{output:?}");
}

#[test]
fn the_default_directory_outlives_the_session_of_the_user() {
    let user = User::new();
    let work = ["run", "a", "--", "sh", "-c", "echo held; exec sleep 600"];
    let run = Running::start(user.command(&work));
    run.wait_out("held");
    // A logout removes this directory.
    fs::remove_dir_all(user.0.path("session")).unwrap();
    let mut elsewhere = user.command(&["run", "a", "--no-wait", "true"]);
    elsewhere.env_remove("XDG_RUNTIME_DIR");
    assert_eq!(Running::start(elsewhere).end().code, Some(75), "cron uses the same directory");
    run.signal(Signal::TERM);
    let output = run.end();
    assert_eq!(output.code, Some(143), "{output:?}");
}

#[test]
fn the_default_directory_is_in_the_state_home_and_requires_a_home() {
    let user = User::new();
    user.make("state");
    let mut command = user.command(&["run", "a", "true"]);
    command.env("XDG_STATE_HOME", user.0.path("state"));
    assert_eq!(Running::start(command).end().code, Some(0));
    assert!(user.0.path("state/lockkeeper/a.lock").exists());
    // Relative paths are ignored (XDG Base Directory Specification).
    let mut command = user.command(&["run", "b", "true"]);
    command.env("XDG_STATE_HOME", "state");
    assert_eq!(Running::start(command).end().code, Some(0));
    assert!(user.0.path("home/.local/state/lockkeeper/b.lock").exists());
    let mut command = user.command(&["run", "a", "touch", "ran"]);
    command.env_remove("HOME");
    let output = Running::start(command).end();
    assert_eq!(output.code, Some(64), "{output:?}");
    assert!(output.err.contains("set HOME, or select a store with --store"), "{output:?}");
}

#[test]
fn the_default_directory_of_root_does_not_depend_on_the_environment() {
    let sandbox = Sandbox::new();
    let mut command = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    let work = "mount -t tmpfs none /run && \"$0\" run a true && stat -c %a /run/lockkeeper && ls /run/lockkeeper";
    command.args(["--mount", "sh", "-c", work, crate::common::PROGRAM]);
    sandbox.environ(&mut command);
    command.env_remove("LOCKKEEPER_STORE").env("HOME", sandbox.path("home"));
    command.env("XDG_STATE_HOME", sandbox.path("state")).env("XDG_RUNTIME_DIR", sandbox.path(""));
    let output = Running::start(command).end();
    let permitted = "(this test needs mount namespaces: run it as root, or allow user namespaces)";
    assert_eq!(output.code, Some(0), "{output:?} {permitted}");
    assert_eq!(output.out, "700\na.lock\n", "{output:?}");
    assert!(!sandbox.path("home").exists() && !sandbox.path("state").exists());
}

#[test]
fn completions_for_every_shell_and_a_manual_page_are_printed() {
    let sandbox = Sandbox::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = sandbox.run(&["completions", shell]);
        assert_eq!(output.code, Some(0));
        assert!(output.out.contains("lockkeeper") && output.out.contains("acquire"), "{shell}");
    }
    let output = sandbox.run(&["man"]);
    assert_eq!(output.code, Some(0));
    for text in [".TH lockkeeper", "LOCKKEEPER RUN", "kill\\-after", "75", "the lock was lost"] {
        assert!(output.out.contains(text), "{text:?} is not in {}", output.out);
    }
}
