//! `lockkeeper`: distributed locks for the command line. See `docs/cli.md`.

use std::process::ExitCode;

fn main() -> ExitCode {
    lockkeeper_cli::main()
}
