//! The [`helper`] on locked files in a directory, which is its URL.

use std::process::ExitCode;

use lockkeeper_core::Keeper;
use lockkeeper_testkit::{Flock, helper};

fn main() -> ExitCode {
    helper::main(async |dir| Ok(Keeper::new(Flock::new(dir))))
}
