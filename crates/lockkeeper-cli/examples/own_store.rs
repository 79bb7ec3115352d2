//! The command `lockkeeper` with an additional store, as the author of a store would build it.
//!
//! `cargo run -p lockkeeper-cli --example own_store -- run deploy --store example: -- echo deployed`

use std::process::ExitCode;

use lockkeeper::{Error, ErrorKind, Memory, Result};

/// Opens the store. A real store reads the host and its options from the URL; this one has none.
async fn open(url: String) -> Result<Memory> {
    match url.split_once(':') {
        Some((_, "")) => Ok(Memory::new()),
        _ => Err(Error::new(ErrorKind::Config, "an example: URL takes nothing after the colon")),
    }
}

fn main() -> ExitCode {
    lockkeeper::backend::register("example", open).expect("no other store has the scheme");
    lockkeeper_cli::main()
}
