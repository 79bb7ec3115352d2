//! What the command makes of a quorum that cannot decide.

use lockkeeper_testkit::server::{RedisServer, RedlockNodes};

use crate::common::Sandbox;

/// Writes a holder into one node, as a client would that got this node and no other.
fn holds(node: &RedisServer, owner: char) {
    let owner = owner.to_string().repeat(32);
    node.command(&["SET", "lockkeeper:{nightly}", &owner, "PX", "600000"]);
}

#[test]
fn a_job_for_one_of_several_machines_is_not_skipped_silently_when_the_vote_is_split() {
    let nodes = RedlockNodes::start_or_panic(3);
    let sandbox = Sandbox::on(&nodes.url());
    let recipe = ["run", "nightly", "--no-wait", "--conflict-exit-code", "0", "--", "echo", "ran"];
    holds(&nodes.nodes()[0], 'a');
    holds(&nodes.nodes()[1], 'b');
    let said = sandbox.say(&recipe);
    assert_eq!((said.code, said.out.as_str()), (Some(69), ""), "{said:?}");
    assert!(said.err.contains("undecided"), "{said:?}");
    // One holder of both is a lock that is taken.
    holds(&nodes.nodes()[1], 'a');
    let said = sandbox.say(&recipe);
    assert_eq!((said.code, said.out.as_str()), (Some(0), ""), "{said:?}");
    nodes.nodes()[0].command(&["FLUSHALL"]);
    nodes.nodes()[1].command(&["FLUSHALL"]);
    assert_eq!(sandbox.say(&recipe).out, "ran\n");
}
