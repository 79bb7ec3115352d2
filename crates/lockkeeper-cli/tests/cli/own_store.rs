//! The command built with a third-party store: `examples/own_store.rs`.

use std::path::PathBuf;
use std::process::Command;

use crate::common::{Output, Running, Sandbox};

/// The example, which is built with the tests.
fn program() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let program = tests.ancestors().nth(2).unwrap().join("examples/own_store");
    assert!(program.exists(), "run cargo build -p lockkeeper-cli --example own_store");
    program
}

#[track_caller]
fn run(sandbox: &Sandbox, args: &[&str]) -> Output {
    let mut command = Command::new(program());
    command.args(args);
    sandbox.environ(&mut command);
    Running::start(command).end()
}

#[test]
fn a_command_runs_under_a_lock_of_a_registered_store() {
    let sandbox = Sandbox::on("example:");
    let output = run(&sandbox, &["run", "deploy", "--", "sh", "-c", "echo in; exit 7"]);
    assert_eq!((output.code, &*output.out), (Some(7), "in\n"), "{}", output.err);
    let output = run(&sandbox, &["ls"]);
    assert_eq!((output.code, &*output.out), (Some(0), ""), "{}", output.err);
    let output = run(&sandbox, &["doctor"]);
    assert_eq!(output.code, Some(0), "{} {}", output.out, output.err);
}

#[test]
fn the_error_of_a_registered_store_is_printed() {
    let output = run(&Sandbox::on("example:x"), &["ls"]);
    assert_eq!(output.code, Some(64), "{}", output.err);
    assert!(output.err.contains("takes nothing after the colon"), "{}", output.err);
}

#[test]
fn the_error_for_an_unknown_scheme_lists_registered_schemes() {
    let output = run(&Sandbox::on("nosuch:"), &["ls"]);
    assert_eq!(output.code, Some(64), "{}", output.err);
    assert!(output.err.contains("file:") && output.err.contains("example:"), "{}", output.err);
}

#[test]
fn the_command_without_the_store_does_not_know_its_scheme() {
    let output = Sandbox::on("example:").run(&["ls"]);
    assert_eq!(output.code, Some(64), "{}", output.err);
    assert!(output.err.contains("unknown store scheme \"example\""), "{}", output.err);
}
