//! The conformance suite of the testkit, on a real server.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::Backend;
use lockkeeper_postgres::{AdvisoryKey, Postgres};
use lockkeeper_testkit::conformance::Subject;

fn postgres_with(parameters: &str) -> Subject {
    let url = format!("{}?{parameters}", common::url());
    let store = Postgres::new(&url).unwrap();
    Subject::new(Arc::new(store), |held| async move {
        common::terminate_holders(AdvisoryKey::of(&held.name)).await;
    })
    // Longer than the default: a busy machine may delay a renewal by a second.
    .ttl(Duration::from_secs(4))
    .another({
        let url = url.clone();
        move || std::future::ready(Arc::new(Postgres::new(&url).unwrap()) as Arc<dyn Backend>)
    })
    .helper(common::helper(), url)
}

async fn postgres() -> Subject {
    postgres_with("")
}

/// Without fences, and with so few connections that most waiters poll.
async fn few_connections() -> Subject {
    postgres_with("fence=off&max_connections=3")
}

mod conformance {
    lockkeeper_testkit::conformance!(super::postgres);
}

mod conformance_with_few_connections {
    lockkeeper_testkit::conformance!(super::few_connections);
}

mod across_processes {
    lockkeeper_testkit::conformance_across_processes!(super::postgres);
}
