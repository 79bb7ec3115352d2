//! The [`helper`] on a [`Flock`] store. Its URL is a directory.

use std::process::ExitCode;

use lockkeeper_core::Keeper;
use lockkeeper_testkit::{Flock, helper};

fn main() -> ExitCode {
    helper::main(async |dir| Ok(Keeper::new(Flock::new(dir))))
}
