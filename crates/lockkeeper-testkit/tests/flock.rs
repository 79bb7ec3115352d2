//! The conformance suite on `Flock`, a store without leases that other processes can reach.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

use std::sync::Arc;

use lockkeeper_testkit::Flock;
use lockkeeper_testkit::conformance::Subject;

async fn flock() -> Subject {
    let dir = tempfile::tempdir().unwrap();
    let store = Flock::new(dir.path());
    let url = dir.path().to_str().unwrap().to_owned();
    Subject::new(Arc::new(store.clone()), move |held| {
        let store = store.clone();
        async move { store.sever(held.owner) }
    })
    .helper(env!("CARGO_BIN_EXE_lockkeeper-helper"), url)
    .keep(dir)
}

mod conformance {
    lockkeeper_testkit::conformance!(super::flock);
}

mod across_processes {
    lockkeeper_testkit::conformance_across_processes!(super::flock);
}
