//! The conformance suite of the testkit: on the server of the system, and on every other major version that
//! `./check servers` downloads.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lockkeeper_core::Backend;
use lockkeeper_postgres::{AdvisoryKey, Postgres};
use lockkeeper_testkit::conformance::Subject;
use lockkeeper_testkit::server::PostgresServer;

fn postgres_with(parameters: &str) -> Subject {
    on(&common::url(), parameters)
}

fn on(server: &str, parameters: &str) -> Subject {
    let url = format!("{server}?{parameters}");
    let store = Postgres::new(&url).unwrap();
    let server = server.to_owned();
    Subject::new(Arc::new(store), move |held| {
        let server = server.clone();
        async move { common::terminate_holders_at(&server, AdvisoryKey::of(&held.name)).await }
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

/// Returns a subject on a server of another major version, which all its tests share.
fn on_version(major: u32, server: &'static OnceLock<PostgresServer>) -> Subject {
    let server = server.get_or_init(|| {
        let server = PostgresServer::of_version(major, &common::SERVER_ARGS);
        server.unwrap_or_else(|error| panic!("{error}"))
    });
    // Shorter than for the other subjects, because most of the time of the suite is spent waiting for it.
    on(&server.url(), "").ttl(Duration::from_secs(2))
}

async fn postgres_14() -> Subject {
    static SERVER: OnceLock<PostgresServer> = OnceLock::new();
    on_version(14, &SERVER)
}

async fn postgres_16() -> Subject {
    static SERVER: OnceLock<PostgresServer> = OnceLock::new();
    on_version(16, &SERVER)
}

async fn postgres_17() -> Subject {
    static SERVER: OnceLock<PostgresServer> = OnceLock::new();
    on_version(17, &SERVER)
}

async fn postgres_18() -> Subject {
    static SERVER: OnceLock<PostgresServer> = OnceLock::new();
    on_version(18, &SERVER)
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

mod on_postgres_14 {
    lockkeeper_testkit::conformance!(super::postgres_14);
}

mod on_postgres_16 {
    lockkeeper_testkit::conformance!(super::postgres_16);
}

mod on_postgres_17 {
    lockkeeper_testkit::conformance!(super::postgres_17);
}

mod on_postgres_18 {
    lockkeeper_testkit::conformance!(super::postgres_18);
}
