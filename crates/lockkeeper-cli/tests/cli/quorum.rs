//! The command on a quorum that cannot decide.

use lockkeeper_testkit::server::{RedisServer, RedlockNodes};

use crate::common::Sandbox;

/// Writes a holder into one node, like a client that was granted this node only.
fn holds(node: &RedisServer, owner: char) {
    let owner = owner.to_string().repeat(32);
    let record = format!("{owner} x 1 1 600000 1 1 0 - - a label");
    node.command(&["SET", "lockkeeper:{nightly}", &record, "PX", "600000"]);
}

#[test]
fn a_job_for_one_of_several_machines_is_not_skipped_silently_when_the_vote_is_split() {
    let nodes = RedlockNodes::start_or_panic(3);
    let sandbox = Sandbox::on(&nodes.url());
    let recipe = ["run", "nightly", "--no-wait", "--conflict-exit-code", "0", "--", "echo", "ran"];
    holds(&nodes.nodes()[0], 'a');
    holds(&nodes.nodes()[1], 'b');
    let output = sandbox.run(&recipe);
    assert_eq!((output.code, output.out.as_str()), (Some(69), ""), "{output:?}");
    assert!(output.err.contains("undecided"), "{output:?}");
    // One holder on two of three nodes holds the lock.
    holds(&nodes.nodes()[1], 'a');
    let output = sandbox.run(&recipe);
    assert_eq!((output.code, output.out.as_str()), (Some(0), ""), "{output:?}");
    nodes.nodes()[0].command(&["FLUSHALL"]);
    nodes.nodes()[1].command(&["FLUSHALL"]);
    assert_eq!(sandbox.run(&recipe).out, "ran\n");
}
