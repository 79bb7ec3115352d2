//! The command of a third party, with a store of its own: `examples/own_store.rs`.

use std::path::PathBuf;
use std::process::Command;

use crate::common::{Running, Said, Sandbox};

/// The example, which is built with the tests.
fn program() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let program = tests.ancestors().nth(2).unwrap().join("examples/own_store");
    assert!(program.exists(), "build it first: cargo build -p lockkeeper-cli --example own_store");
    program
}

#[track_caller]
fn say(sandbox: &Sandbox, args: &[&str]) -> Said {
    let mut command = Command::new(program());
    command.args(args);
    sandbox.environ(&mut command);
    Running::start(command).end()
}

#[test]
fn a_command_runs_under_a_lock_of_a_registered_store() {
    let sandbox = Sandbox::on("example:");
    let said = say(&sandbox, &["run", "deploy", "--", "sh", "-c", "echo in; exit 7"]);
    assert_eq!((said.code, &*said.out), (Some(7), "in\n"), "{}", said.err);
    let said = say(&sandbox, &["ls"]);
    assert_eq!((said.code, &*said.out), (Some(0), ""), "{}", said.err);
    let said = say(&sandbox, &["doctor"]);
    assert_eq!(said.code, Some(0), "{} {}", said.out, said.err);
}

#[test]
fn the_error_of_a_registered_store_is_told() {
    let said = say(&Sandbox::on("example:x"), &["ls"]);
    assert_eq!(said.code, Some(64), "{}", said.err);
    assert!(said.err.contains("takes nothing after the colon"), "{}", said.err);
}

#[test]
fn an_unknown_scheme_is_answered_with_the_registered_ones_too() {
    let said = say(&Sandbox::on("nosuch:"), &["ls"]);
    assert_eq!(said.code, Some(64), "{}", said.err);
    assert!(said.err.contains("file:") && said.err.contains("example:"), "{}", said.err);
}

#[test]
fn the_command_itself_does_not_know_the_scheme() {
    let said = Sandbox::on("example:").say(&["ls"]);
    assert_eq!(said.code, Some(64), "{}", said.err);
    assert!(said.err.contains("unknown store scheme \"example\""), "{}", said.err);
}
