//! Snapshots of the help.

use crate::common::{Sandbox, golden};

#[test]
fn every_command_has_help_with_an_example() {
    let sandbox = Sandbox::new();
    golden("help.txt", &sandbox.say(&["--help"]).out);
    let commands = [
        "run",
        "ls",
        "show",
        "watch",
        "break",
        "acquire",
        "renew",
        "release",
        "doctor",
        "completions",
        "man",
    ];
    for command in commands {
        let said = sandbox.say(&[command, "--help"]);
        assert_eq!(said.code, Some(0));
        assert!(said.out.contains("Example: lockkeeper "), "{command}");
        golden(&format!("help-{command}.txt"), &said.out);
    }
    let said = sandbox.say(&["--version"]);
    assert_eq!(said.out, format!("lockkeeper {}\n", env!("CARGO_PKG_VERSION")));
}
