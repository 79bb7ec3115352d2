//! Wrong usage gets one line that says what is right, and the default store is safe.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use rustix::process::Signal;

use crate::common::{Running, Said, Sandbox};

#[test]
fn without_arguments_the_commands_are_listed() {
    let said = Sandbox::new().say(&[]);
    assert_eq!(said.code, Some(64), "{said:?}");
    assert_eq!(said.err.lines().count(), 1, "{said:?}");
    assert!(said.err.contains("no command is given: there are run, ls, show"), "{said:?}");
    assert!(said.err.contains("lockkeeper --help"), "{said:?}");
}

#[test]
fn wrong_usage_is_told_in_one_line_with_what_is_right() {
    let sandbox = Sandbox::new();
    let wrong: [(&[&str], &str); 15] = [
        (&["run", "a", "--wiat", "5s", "true"], "'--wait'"),
        (&[], "usage: lockkeeper <COMMAND>"),
        (&["rnu", "a", "true"], "there are run, ls, "),
        (&["run"], "usage: lockkeeper run"),
        (&["run", "a"], "<COMMAND>..."),
        (&["run", "a", "--wait", "5", "true"], "30s, 5m, 1h30m"),
        (&["run", "a", "--ttl", "never", "true"], "30s, 5m, 1h30m"),
        (&["run", "a", "--ttl", "1ms", "true"], "10ms is the least"),
        (&["run", "", "true"], "a name must not be empty"),
        (&["run", "a", "--permits", "0", "true"], "--permits"),
        (&["run", "a", "--permits", "1", "--shared", "true"], "cannot be used with"),
        (&["run", "a", "--label", "a\nb", "true"], "control characters"),
        (&["run", "a", "--store", "zoo:x", "true"], "file:, redis:"),
        (&["run", "a", "--store", "", "true"], "--store is empty"),
        (&["run", "a", "--store", "/run/locks", "true"], "not a store URL"),
    ];
    for (args, right) in wrong {
        let said = sandbox.say(args);
        assert_eq!(said.code, Some(64), "{args:?}: {said:?}");
        assert_eq!(said.err.lines().count(), 1, "{args:?}: {said:?}");
        assert!(said.err.starts_with("lockkeeper: "), "{args:?}: {said:?}");
        assert!(said.err.contains(right), "{args:?}: {said:?}");
    }
    let mut command = sandbox.command(&["run", "a", "true"]);
    command.env("LOCKKEEPER_STORE", "");
    let said = Running::start(command).end();
    assert_eq!(said.code, Some(64));
    assert!(said.err.contains("LOCKKEEPER_STORE is empty"), "{said:?}");
}

#[test]
fn a_store_that_cannot_be_used_is_69() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("plain"), "").unwrap();
    let file = format!("file:{}", sandbox.path("plain").display());
    let below = format!("file:{}/below", sandbox.path("plain").display());
    for url in ["redis://127.0.0.1:1/", &file, &below, "file:/proc/nowhere"] {
        let said = sandbox.say(&["run", "a", "--store", url, "true"]);
        assert_eq!(said.code, Some(69), "{url}: {said:?}");
        assert_eq!(said.err.lines().count(), 1, "{url}: {said:?}");
    }
}

/// A user that is not root, with a home of their own and no store named.
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

    /// Makes a directory that belongs to the user.
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

    fn say(&self, args: &[&str]) -> Said {
        Running::start(self.command(args)).end()
    }
}

#[test]
fn the_default_store_is_a_directory_for_its_owner_only() {
    let user = User::new();
    let said = user.say(&["run", "a", "true"]);
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    let dir = user.0.path("home/.local/state/lockkeeper");
    assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
    assert!(dir.join("a.lock").exists());
    let said = user.say(&["doctor"]);
    assert_eq!(said.code, Some(0), "{said:?}");

    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
    let said = user.say(&["run", "a", "true"]);
    assert_eq!(said.code, Some(69), "{said:?}");
    assert!(said.err.contains("its mode should be 0700"), "{said:?}");

    let user = User::new();
    user.make("state");
    user.make("elsewhere");
    symlink(user.0.path("elsewhere"), user.0.path("state/lockkeeper")).unwrap();
    let mut command = user.command(&["run", "a", "true"]);
    command.env("XDG_STATE_HOME", user.0.path("state"));
    let said = Running::start(command).end();
    assert_eq!(said.code, Some(69), "{said:?}");
    assert!(said.err.contains("not a directory"), "{said:?}");
}

#[test]
fn the_default_store_outlives_the_users_session() {
    let user = User::new();
    let work = ["run", "a", "--", "sh", "-c", "echo held; exec sleep 600"];
    let run = Running::start(user.command(&work));
    run.wait_out("held");
    // What a logout does.
    fs::remove_dir_all(user.0.path("session")).unwrap();
    let mut elsewhere = user.command(&["run", "a", "--no-wait", "true"]);
    elsewhere.env_remove("XDG_RUNTIME_DIR");
    assert_eq!(Running::start(elsewhere).end().code, Some(75), "cron meets it there");
    run.signal(Signal::TERM);
    let said = run.end();
    assert_eq!(said.code, Some(143), "{said:?}");
}

#[test]
fn the_default_store_is_below_the_state_home_and_there_is_none_without_one() {
    let user = User::new();
    user.make("state");
    let mut command = user.command(&["run", "a", "true"]);
    command.env("XDG_STATE_HOME", user.0.path("state"));
    assert_eq!(Running::start(command).end().code, Some(0));
    assert!(user.0.path("state/lockkeeper/a.lock").exists());
    // A relative path is not one, by the specification of these variables.
    let mut command = user.command(&["run", "b", "true"]);
    command.env("XDG_STATE_HOME", "state");
    assert_eq!(Running::start(command).end().code, Some(0));
    assert!(user.0.path("home/.local/state/lockkeeper/b.lock").exists());
    let mut command = user.command(&["run", "a", "touch", "ran"]);
    command.env_remove("HOME");
    let said = Running::start(command).end();
    assert_eq!(said.code, Some(64), "{said:?}");
    assert!(said.err.contains("set HOME, or name a store with --store"), "{said:?}");
}

#[test]
fn the_default_store_of_root_does_not_depend_on_the_environment() {
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
    let said = Running::start(command).end();
    let permitted = "(this test needs mount namespaces: run it as root, or allow user namespaces)";
    assert_eq!(said.code, Some(0), "{said:?} {permitted}");
    assert_eq!(said.out, "700\na.lock\n", "{said:?}");
    assert!(!sandbox.path("home").exists() && !sandbox.path("state").exists());
}

#[test]
fn every_shell_gets_completions_and_there_is_a_manual_page() {
    let sandbox = Sandbox::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let said = sandbox.say(&["completions", shell]);
        assert_eq!(said.code, Some(0));
        assert!(said.out.contains("lockkeeper") && said.out.contains("acquire"), "{shell}");
    }
    let said = sandbox.say(&["man"]);
    assert_eq!(said.code, Some(0));
    for text in [".TH lockkeeper", "LOCKKEEPER RUN", "kill\\-after", "75", "the lock was lost"] {
        assert!(said.out.contains(text), "{text:?} is not in {}", said.out);
    }
}
