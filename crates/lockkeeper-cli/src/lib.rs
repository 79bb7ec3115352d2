//! The command `lockkeeper` as a library, for programs that add stores to it.
//!
//! `docs/cli.md` describes the command. To add a store of another crate, write a program that registers its URL scheme
//! and calls [`main`]:
//!
//! ```no_run
//! use std::process::ExitCode;
//!
//! fn main() -> ExitCode {
//!     // Open your own store here.
//!     let registered = lockkeeper::backend::register("example", |_url| async {
//!         Ok(lockkeeper::Memory::new())
//!     });
//!     registered.expect("no other store has the scheme");
//!     lockkeeper_cli::main()
//! }
//! ```

mod acquire;
mod args;
mod child;
mod doctor;
mod failure;
mod group;
mod guardian;
mod inspect;
mod loss;
mod output;
mod processes;
mod reaper;
mod report;
mod run;
mod signals;
mod store;
mod terminal;
mod ticket;

use std::ffi::OsString;
use std::io::Write as _;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};

use crate::args::{Cli, Command};
use crate::failure::{Failure, USAGE};

/// Runs the command with the arguments of this process, and returns its exit code.
///
/// Call it on the main thread of a program, outside of any async runtime. Do nothing before it except register stores:
/// `run` starts the program a second time as a guardian process, with different arguments and an empty environment.
#[must_use = "return it from the main function as the exit code of the program"]
pub fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    match args.get(1).and_then(|arg| arg.to_str()) {
        Some(guardian::ARGUMENT) => return guardian::main(),
        Some(terminal::INTERRUPTED) => return terminal::Terminal::kill_itself_with_int(),
        _ => {}
    }
    let cli = match Cli::try_parse_from(&args) {
        Ok(cli) => cli,
        Err(error) if !error.use_stderr() => {
            return code(output::print(&error.to_string()).map(|()| 0));
        }
        Err(error) => {
            let message = args::usage_error(&error, &args);
            if args.iter().take_while(|arg| *arg != "--").any(|arg| arg == "--json") {
                let failure = Failure::usage(message);
                report::Reporter::new(report::Style::Json, "").failed(&failure);
            } else {
                report::message(&message);
            }
            return ExitCode::from(USAGE);
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            return code(Err(Failure::unavailable(format!(
                "cannot start the async runtime: {error}"
            ))));
        }
    };
    let ended = runtime.block_on(dispatch(cli.command));
    // Does not wait for threads that still read stdin or resolve a host name.
    runtime.shutdown_background();
    ended
}

async fn dispatch(command: Command) -> ExitCode {
    match command {
        Command::Run(args) => ExitCode::from(run::run(args).await),
        Command::Ls(args) => inspect::exit_code(args.json, inspect::ls(&args).await),
        Command::Show(args) => inspect::exit_code(args.json, inspect::show(&args).await),
        Command::Watch(args) => inspect::exit_code(args.json, inspect::watch(&args).await),
        Command::Break(args) => code(inspect::break_lock(&args).await.map(|()| 0)),
        Command::Acquire(args) => code(ticket::acquire(&args).await.map(|()| 0)),
        Command::Renew(args) => code(ticket::renew(&args).await.map(|()| 0)),
        Command::Release(args) => code(ticket::release(&args).await.map(|()| 0)),
        Command::Doctor(args) => inspect::exit_code(args.json, doctor::doctor(&args).await),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "lockkeeper", &mut script);
            code(output::print(&String::from_utf8_lossy(&script)).map(|()| 0))
        }
        Command::Man => code(man().map(|()| 0)),
    }
}

/// Prints one manual page for all commands.
fn man() -> Result<(), Failure> {
    let mut page = Vec::new();
    let mut cli = Cli::command();
    cli.build();
    let write = |page: &mut Vec<u8>| -> std::io::Result<()> {
        clap_mangen::Man::new(cli.clone()).render(page)?;
        for command in cli.get_subcommands() {
            let man = clap_mangen::Man::new(command.clone());
            writeln!(page, ".SH \"LOCKKEEPER {}\"", command.get_name().to_uppercase())?;
            man.render_description_section(page)?;
            man.render_synopsis_section(page)?;
            man.render_options_section(page)?;
            man.render_extra_section(page)?;
        }
        Ok(())
    };
    write(&mut page).map_err(|error| Failure::output(&error))?;
    output::print(&String::from_utf8_lossy(&page))
}

/// Prints the message of a failure and returns the exit code.
fn code(ended: Result<u8, Failure>) -> ExitCode {
    match ended {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            report::message(&failure.to_string());
            terminal::Terminal::reraise_interrupt(&failure);
            ExitCode::from(failure.code)
        }
    }
}
