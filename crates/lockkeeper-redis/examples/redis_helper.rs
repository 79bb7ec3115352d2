//! The testkit helper on Redis: acquires locks in a separate process, for tests that kill it.

use std::process::ExitCode;

use lockkeeper_core::Keeper;
use lockkeeper_redis::{Config, Redis, redlock};

fn main() -> ExitCode {
    lockkeeper_testkit::helper::main(async |url| {
        if url.starts_with("redlock:") {
            return Ok(Keeper::new(redlock(Config::redlock_from_url(url)?).await?));
        }
        Ok(Keeper::new(Redis::connect(Config::from_url(url)?).await?))
    })
}
