//! Wrong usage gets one line that says what is right, and the default store is safe.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};

use crate::world::{Running, World};

#[test]
fn wrong_usage_is_told_in_one_line_with_what_is_right() {
    let world = World::new();
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
        let said = world.say(args);
        assert_eq!(said.code, Some(64), "{args:?}: {said:?}");
        assert_eq!(said.err.lines().count(), 1, "{args:?}: {said:?}");
        assert!(said.err.starts_with("lockkeeper: "), "{args:?}: {said:?}");
        assert!(said.err.contains(right), "{args:?}: {said:?}");
    }
    let mut command = world.command(&["run", "a", "true"]);
    command.env("LOCKKEEPER_STORE", "");
    let said = Running::start(command).end();
    assert_eq!(said.code, Some(64));
    assert!(said.err.contains("LOCKKEEPER_STORE is empty"), "{said:?}");
}

#[test]
fn a_store_that_cannot_be_used_is_69() {
    let world = World::new();
    fs::write(world.path("plain"), "").unwrap();
    let file = format!("file:{}", world.path("plain").display());
    let below = format!("file:{}/below", world.path("plain").display());
    for url in ["redis://127.0.0.1:1/", &file, &below, "file:/proc/nowhere"] {
        let said = world.say(&["run", "a", "--store", url, "true"]);
        assert_eq!(said.code, Some(69), "{url}: {said:?}");
        assert_eq!(said.err.lines().count(), 1, "{url}: {said:?}");
    }
}

#[test]
fn the_default_store_is_a_directory_for_its_owner_only() {
    let world = World::new();
    assert_eq!(world.say(&["run", "a", "true"]).code, Some(0));
    let dir = world.path("run/lockkeeper");
    assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
    assert!(dir.join("a.lock").exists());

    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
    let said = world.say(&["run", "a", "true"]);
    assert_eq!(said.code, Some(69), "{said:?}");
    assert!(said.err.contains("its mode should be 0700"), "{said:?}");

    let world = World::new();
    symlink(world.path("elsewhere"), world.path("run/lockkeeper")).unwrap();
    fs::create_dir(world.path("elsewhere")).unwrap();
    let said = world.say(&["run", "a", "true"]);
    assert_eq!(said.code, Some(69), "{said:?}");
    assert!(said.err.contains("not a directory"), "{said:?}");
}

#[test]
fn without_a_runtime_directory_the_default_store_is_in_the_one_for_temporary_files() {
    let world = World::new();
    let mut command = world.command(&["run", "a", "true"]);
    fs::create_dir(world.path("a tmp")).unwrap();
    command.env_remove("XDG_RUNTIME_DIR").env("TMPDIR", world.path("a tmp"));
    assert_eq!(Running::start(command).end().code, Some(0));
    let user = rustix::process::geteuid().as_raw();
    assert!(world.path(&format!("a tmp/lockkeeper-{user}/a.lock")).exists());
}

#[test]
fn every_shell_gets_completions_and_there_is_a_manual_page() {
    let world = World::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let said = world.say(&["completions", shell]);
        assert_eq!(said.code, Some(0));
        assert!(said.out.contains("lockkeeper") && said.out.contains("acquire"), "{shell}");
    }
    let said = world.say(&["man"]);
    assert_eq!(said.code, Some(0));
    for text in [".TH lockkeeper", "LOCKKEEPER RUN", "kill\\-after", "75", "the lock was lost"] {
        assert!(said.out.contains(text), "{text:?} is not in {}", said.out);
    }
}
