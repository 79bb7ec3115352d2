//! Findings of `diagnose`.

use lockkeeper_core::{Finding, Severity};
use lockkeeper_testkit::server::PostgresServer;

use crate::common::{client_at, soon};

async fn finding(url: &str, about: &str) -> Finding {
    let findings = soon("diagnose", lockkeeper_postgres::diagnose(url)).await.unwrap();
    let found = findings.iter().find(|finding| finding.what.contains(about));
    found.unwrap_or_else(|| panic!("nothing about {about}: {findings:?}")).clone()
}

#[tokio::test]
async fn few_free_locks_or_connections_are_a_warning() {
    let args =
        ["-c", "max_connections=10", "-c", "max_locks_per_transaction=10", "-c", "fsync=off"];
    let server = PostgresServer::with_args(&args).unwrap();
    assert_eq!(finding(&server.url(), "locks in use").await.severity, Severity::Ok);
    assert_eq!(finding(&server.url(), "connections in use").await.severity, Severity::Ok);

    let client = client_at(&server.url()).await;
    let take = "SELECT count(pg_advisory_lock(n)) FROM generate_series(1, 80) AS n";
    client.batch_execute(take).await.unwrap();
    let locks = finding(&server.url(), "of about 100 locks in use").await;
    assert_eq!(locks.severity, Severity::Warn, "{locks:?}");
    assert!(locks.advice.unwrap().contains("max_locks_per_transaction"));

    let mut others = Vec::new();
    for _ in 0..7 {
        others.push(client_at(&server.url()).await);
    }
    let connections = finding(&server.url(), "of about 10 connections in use").await;
    assert_eq!(connections.severity, Severity::Warn, "{connections:?}");
    assert!(connections.advice.unwrap().contains("max_connections"));
}

#[tokio::test]
async fn fences_are_found_unless_they_are_off() {
    let about = "this role can draw fences";
    let url = crate::common::url();
    assert_eq!(finding(&url, about).await.severity, Severity::Ok);
    let off = format!("{url}?fence=off");
    let findings = soon("diagnose", lockkeeper_postgres::diagnose(&off)).await.unwrap();
    assert!(findings.iter().all(|finding| !finding.what.contains(about)), "{findings:?}");
}

#[tokio::test]
async fn tls_that_an_attacker_can_turn_off_is_a_warning() {
    let about = "sslmode=prefer";
    let warned = finding("postgres://u@db.invalid/x?connect_timeout=1", about).await;
    assert_eq!(warned.severity, Severity::Warn, "{warned:?}");
    assert!(warned.advice.unwrap().contains("sslmode=require"));
    let urls = [
        "postgres://u@db.invalid/x?connect_timeout=1&sslmode=require".to_owned(),
        // The server is on this machine.
        crate::common::url(),
    ];
    for url in urls {
        let findings = soon("diagnose", lockkeeper_postgres::diagnose(&url)).await.unwrap();
        assert!(findings.iter().all(|finding| !finding.what.contains(about)), "{findings:?}");
    }
}
