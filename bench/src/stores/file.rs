//! Files.

use super::{FILES, RAW_FILE, TTL, killed_section, queues, readers_section, scaling, wake_section};
use crate::bench::Bench;
use crate::implementation::{Outcome, one_line};
use crate::implementations;
use crate::scenarios::takeover::Target;
use crate::scenarios::{keys, readers, takeover, uncontended, wake};

pub(crate) async fn on_files(bench: &mut Bench) -> Outcome<()> {
    let dir = tempfile::tempdir().map_err(one_line)?;
    let implementations = implementations::on_files(dir.path(), TTL).await?;
    let (title, text) = ("lock and release, uncontended", "One file without contention.");
    let unit = (RAW_FILE, "in units of the raw recipe");
    if let Some(section) = FILES.section(bench, "uncontended", title, text) {
        uncontended::run(bench, section, &implementations, unit).await?;
    }
    let text = "64 tasks, each on its own file.";
    if let Some(section) = FILES.section(bench, "keys", "64 tasks on 64 files", text) {
        keys::run(bench, section, &implementations, unit, None).await?;
    }
    let tasks = bench.either(vec![8, 64, 512], vec![8, 64]);
    queues(bench, FILES, &implementations, &tasks, None).await?;
    if let Some(section) = wake_section(bench, FILES) {
        let others = implementations::on_files(dir.path(), TTL).await?;
        wake::run(bench, section, &implementations, &others).await?;
    }
    if let Some(section) = killed_section(bench, FILES) {
        let path = dir.path().display().to_string();
        let target = Target { store: "file", address: &path, redis: None };
        takeover::run(bench, section, target).await?;
    }
    if let Some(section) = readers_section(bench, FILES) {
        let implementations = implementations::shared_on_files(dir.path(), TTL)?;
        readers::run(bench, section, &implementations).await?;
    }
    let keys = bench.either(vec![1, 4, 16, 64, 256], vec![1, 4, 16, 64]);
    let waiters = bench.either(vec![2, 8, 32, 128, 512], vec![2, 8, 16, 64]);
    scaling(bench, FILES, &implementations, &keys, &waiters).await
}
