//! Snapshots of the help.

use crate::common::{Sandbox, golden};

#[test]
fn every_command_has_help_with_an_example() {
    let sandbox = Sandbox::new();
    golden("help.txt", &sandbox.run(&["--help"]).out);
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
        let output = sandbox.run(&[command, "--help"]);
        assert_eq!(output.code, Some(0));
        assert!(output.out.contains("Example"), "{command}");
        assert!(output.out.contains(&format!("lockkeeper {command}")), "{command}");
        golden(&format!("help-{command}.txt"), &output.out);
    }
    let output = sandbox.run(&["--version"]);
    assert_eq!(output.out, format!("lockkeeper {}\n", env!("CARGO_PKG_VERSION")));
}
