//! Snapshots of the help.

use crate::world::{World, golden};

#[test]
fn every_command_has_help_with_an_example() {
    let world = World::new();
    golden("help.txt", &world.say(&["--help"]).out);
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
        let said = world.say(&[command, "--help"]);
        assert_eq!(said.code, Some(0));
        assert!(said.out.contains("Example: lockkeeper "), "{command}");
        golden(&format!("help-{command}.txt"), &said.out);
    }
    let said = world.say(&["--version"]);
    assert_eq!(said.out, format!("lockkeeper {}\n", env!("CARGO_PKG_VERSION")));
}
