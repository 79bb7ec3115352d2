//! PostgreSQL.

use lockkeeper_testkit::server::PostgresServer;

use super::{
    POSTGRES, RAW_POSTGRES, TTL, killed_section, queues, readers_section, scaling, tuned,
    wake_section,
};
use crate::bench::Bench;
use crate::load::Meter;
use crate::make::{Outcome, told};
use crate::makes;
use crate::work::takeover::Place;
use crate::work::{keys, readers, takeover, wake};

pub(crate) async fn on_postgres(bench: &mut Bench) -> Outcome<()> {
    // For two makes that have a connection for each of 512 tasks, and what the others need beside them.
    let server = PostgresServer::with_args(&["-c", "max_connections=1600"]).map_err(told)?;
    few(bench, &server).await?;
    many(bench, &server).await
}

/// What is done by 64 tasks or fewer.
async fn few(bench: &mut Bench, server: &PostgresServer) -> Outcome<()> {
    let (url, meter) = (server.url(), Some(Meter::Postgres(server)));
    let makes = makes::on_postgres(&url, TTL).await?;
    let text = "64 tasks, each on a key of its own. The raw one has 64 connections, Lockkeeper as many as it likes.";
    if let Some(section) = POSTGRES.section(bench, "keys", "64 tasks on 64 keys", text) {
        let unit = (RAW_POSTGRES, "in units of the raw one");
        keys::run(bench, section, &makes, unit, meter).await?;
    }
    queues(bench, POSTGRES, &makes, &[8, 64], meter).await?;
    if let Some(section) = wake_section(bench, POSTGRES) {
        let others = makes::on_postgres(&url, TTL).await?;
        wake::run(bench, section, &makes, &others).await?;
    }
    if let Some(section) = killed_section(bench, POSTGRES) {
        let place = Place { store: "postgres", at: &url, redis: None };
        takeover::run(bench, section, place).await?;
    }
    if let Some(section) = readers_section(bench, POSTGRES) {
        let makes = makes::shared_on_postgres(&url, TTL).await?;
        readers::run(bench, section, &makes).await?;
    }
    Ok(())
}

/// What is done by more. With makes of their own: those above have no idle connections beside them.
async fn many(bench: &mut Bench, server: &PostgresServer) -> Outcome<()> {
    let makes = makes::on_postgres(&server.url(), TTL).await?;
    // A quick run has no time to open a thousand connections.
    if !bench.quick {
        queues(bench, POSTGRES, &makes, &[512], Some(Meter::Postgres(server))).await?;
    }
    let points = bench.either(vec![2, 8, 32, 128, 512], vec![2, 8, 16, 64]);
    let keys = bench.either(vec![1, 4, 16, 64, 256], vec![1, 4, 16, 64]);
    scaling(bench, POSTGRES, &tuned(&makes), &keys, &points).await
}
