//! A process that acquires locks, for tests that kill it.

use std::process::ExitCode;

use lockkeeper_core::Keeper;
use lockkeeper_postgres::Postgres;

fn main() -> ExitCode {
    lockkeeper_testkit::helper::main(async |url| Ok(Keeper::new(Postgres::connect(url).await?)))
}
