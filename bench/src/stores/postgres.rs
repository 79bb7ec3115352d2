//! PostgreSQL.

use lockkeeper_testkit::server::PostgresServer;

use super::{
    POSTGRES, RAW_POSTGRES, TTL, killed_section, queues, readers_section, scaling, tuned,
    wake_section,
};
use crate::bench::Bench;
use crate::implementation::{Outcome, one_line};
use crate::implementations;
use crate::load::Meter;
use crate::scenarios::takeover::Target;
use crate::scenarios::{keys, readers, takeover, wake};

pub(crate) async fn on_postgres(bench: &mut Bench) -> Outcome<()> {
    // Enough for two implementations with a connection for each of 512 tasks, and for the others.
    let server = PostgresServer::with_args(&["-c", "max_connections=1600"]).map_err(one_line)?;
    up_to_64_tasks(bench, &server).await?;
    up_to_512_tasks(bench, &server).await
}

/// Runs the scenarios with up to 64 tasks.
async fn up_to_64_tasks(bench: &mut Bench, server: &PostgresServer) -> Outcome<()> {
    let (url, meter) = (server.url(), Some(Meter::Postgres(server)));
    let implementations = implementations::on_postgres(&url, TTL).await?;
    let text = "64 tasks, each on its own key. The raw recipe has 64 connections, Lockkeeper its default pool.";
    if let Some(section) = POSTGRES.section(bench, "keys", "64 tasks on 64 keys", text) {
        let unit = (RAW_POSTGRES, "in units of the raw recipe");
        keys::run(bench, section, &implementations, unit, meter).await?;
    }
    queues(bench, POSTGRES, &implementations, &[8, 64], meter).await?;
    if let Some(section) = wake_section(bench, POSTGRES) {
        let others = implementations::on_postgres(&url, TTL).await?;
        wake::run(bench, section, &implementations, &others).await?;
    }
    if let Some(section) = killed_section(bench, POSTGRES) {
        let target = Target { store: "postgres", address: &url, redis: None };
        takeover::run(bench, section, target).await?;
    }
    if let Some(section) = readers_section(bench, POSTGRES) {
        let implementations = implementations::shared_on_postgres(&url, TTL).await?;
        readers::run(bench, section, &implementations).await?;
    }
    Ok(())
}

/// Runs the scenarios with up to 512 tasks. On new implementations, because the first ones keep their idle connections.
async fn up_to_512_tasks(bench: &mut Bench, server: &PostgresServer) -> Outcome<()> {
    let implementations = implementations::on_postgres(&server.url(), TTL).await?;
    // A quick run has no time to open a thousand connections.
    if !bench.quick {
        queues(bench, POSTGRES, &implementations, &[512], Some(Meter::Postgres(server))).await?;
    }
    let points = bench.either(vec![2, 8, 32, 128, 512], vec![2, 8, 16, 64]);
    let keys = bench.either(vec![1, 4, 16, 64, 256], vec![1, 4, 16, 64]);
    scaling(bench, POSTGRES, &tuned(&implementations), &keys, &points).await
}
