//! The command line.
#![allow(clippy::doc_markdown, reason = "clap prints these comments as they are")]

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;
use lockkeeper::{Label, Name};
use lockkeeper_syntax::duration;

const EXIT_CODES: &str = "\
Exit codes:
  the command's own, or 128+n if it died of signal n
  64   wrong usage
  69   the store is unavailable
  70   the lock was lost, and the command stopped
  75   not acquired in time (or as --conflict-exit-code says)
  126  the command cannot be run
  127  the command is not found";

/// Distributed locks for the command line.
#[derive(Debug, Parser)]
#[command(name = "lockkeeper", version, max_term_width = 100, disable_help_subcommand = true)]
#[command(after_help = "\
Example: lockkeeper run nightly-report -- ./report.sh

Without --store and LOCKKEEPER_STORE, locks are files of this machine, and no server is needed: in
/run/lockkeeper for root, in ~/.local/state/lockkeeper (or $XDG_STATE_HOME/lockkeeper) for other
users. Root and other users do not share locks there.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command while holding a lock
    #[command(after_help = format!("\
The command finds LOCKKEEPER_NAME, LOCKKEEPER_FENCE and LOCKKEEPER_OWNER in its environment.

Example: lockkeeper run deploy --wait 10m -- ./deploy.sh production

{EXIT_CODES}"))]
    Run(Run),
    /// List the locks that somebody holds or waits for
    #[command(after_help = "Example: lockkeeper ls orders/")]
    Ls(Look),
    /// Show who holds a lock, and who waits for it
    #[command(after_help = "Example: lockkeeper show deploy")]
    Show(Show),
    /// Tell of locks as they are acquired and freed
    #[command(after_help = "Example: lockkeeper watch orders/")]
    Watch(Look),
    /// Free a lock by force
    #[command(after_help = "\
The store frees the lock first and tells the old holder afterwards: the next holder may enter some
milliseconds before that. A holder that is stuck, or cannot be reached, may go on to work.

Example: lockkeeper break deploy")]
    Break(Break),
    /// Acquire a lock, print a ticket for it, and leave it held for its ttl
    #[command(after_help = "\
Whoever has the ticket can renew and release the lock: treat it like a key.

Example: lockkeeper acquire deploy --ttl 10m > ticket.json

Exit codes: 0, 64 wrong usage, 69 store unavailable, 74 ticket not written (and the lock released),
75 not acquired in time")]
    Acquire(Acquire),
    /// Renew the lock of a ticket, and print the ticket anew
    #[command(after_help = "\
Example: lockkeeper renew ticket.json --ttl 10m

Exit codes: 0, 64 wrong usage, 69 store unavailable, 70 the lock was lost")]
    Renew(Renew),
    /// Release the lock of a ticket
    #[command(after_help = "\
Example: lockkeeper release ticket.json

Exit codes: 0, 64 wrong usage, 69 store unavailable, 70 the lock was lost before")]
    Release(ReleaseTicket),
    /// Look for what makes locks on a store wrong
    #[command(after_help = "\
Example: lockkeeper doctor --store redis://127.0.0.1/

Exit codes: 0 all is well, 1 there are warnings, 2 something fails")]
    Doctor(Doctor),
    /// Print completions for a shell
    #[command(after_help = "Example: lockkeeper completions bash > ~/.bash_completion")]
    Completions {
        /// Which shell
        shell: Shell,
    },
    /// Print the manual page
    #[command(after_help = "Example: lockkeeper man | man -l -")]
    Man,
}

#[derive(Debug, Args)]
pub(crate) struct Store {
    /// Where the locks are: file:/a/directory, redis://host/, … (or LOCKKEEPER_STORE)
    ///
    /// Others can read a command line: a URL with a password belongs into LOCKKEEPER_STORE.
    #[arg(long = "store", value_name = "URL")]
    pub(crate) url: Option<String>,
}

/// Which lock, and how to get it.
#[derive(Debug, Args)]
pub(crate) struct Lock {
    /// The name of the lock
    #[arg(value_parser = name)]
    pub(crate) name: Name,
    /// How long to wait for the lock: 30s, 5m, 1h30m; 0 is one try (for ever if not given)
    #[arg(long, value_name = "DURATION", value_parser = duration::parse, conflicts_with = "no_wait")]
    wait: Option<Duration>,
    /// Try once, like --wait 0
    #[arg(long)]
    no_wait: bool,
    /// How long the lock outlives a holder that has vanished
    #[arg(long, value_name = "DURATION", value_parser = duration::parse, default_value = "30s")]
    pub(crate) ttl: Duration,
    /// Share the lock with others that share it
    #[arg(long, conflicts_with = "permits")]
    pub(crate) shared: bool,
    /// At most N at a time: take one permit of a semaphore of N
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) permits: Option<u32>,
    /// Who this is, for those who look (host, process id and command if not given)
    #[arg(long, value_parser = label)]
    pub(crate) label: Option<Label>,
    /// Exit with N instead of 75 if the lock is not acquired in time
    #[arg(long, value_name = "N")]
    pub(crate) conflict_exit_code: Option<u8>,
}

impl Lock {
    /// How long to wait: `None` is for ever.
    pub(crate) fn patience(&self) -> Option<Duration> {
        if self.no_wait { Some(Duration::ZERO) } else { self.wait }
    }
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) lock: Lock,
    #[command(flatten)]
    pub(crate) store: Store,
    /// How long the command has between TERM and KILL
    ///
    /// TERM is sent this long before the lease ends if the lock cannot be renewed, so the command is dead before
    /// another process can hold the lock. After a signal that lockkeeper forwards, processes of the command's group
    /// have this long to end. At most half of the ttl. If not given: 5s, or a third of the ttl if that is less.
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    pub(crate) kill_after: Option<Duration>,
    /// Let the command run this long beside the next holder after the lock was taken away
    ///
    /// A lock is taken away when it is broken, or when the server ends the session that holds it. The next holder may
    /// enter at that moment, so the command is killed at once if this is not given. With it, the command gets TERM, and
    /// KILL after this time: until then two commands run under one lock. Never longer than what is left of the lease.
    #[arg(long, value_name = "DURATION", value_parser = duration::parse, default_value = "0", hide_default_value = true)]
    pub(crate) overlap_grace: Duration,
    /// Say nothing about waiting
    #[arg(long, short, conflicts_with = "json")]
    pub(crate) quiet: bool,
    /// Tell what happens as JSON, one line each, on stderr
    #[arg(long)]
    pub(crate) json: bool,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true)]
    pub(crate) command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct Acquire {
    #[command(flatten)]
    pub(crate) lock: Lock,
    #[command(flatten)]
    pub(crate) store: Store,
    /// Say nothing about waiting
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Look {
    /// Only locks whose names start with this
    #[arg(default_value = "", hide_default_value = true)]
    pub(crate) prefix: String,
    #[command(flatten)]
    pub(crate) store: Store,
    /// JSON instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Show {
    /// The name of the lock
    #[arg(value_parser = name)]
    pub(crate) name: Name,
    #[command(flatten)]
    pub(crate) store: Store,
    /// JSON instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Break {
    /// The name of the lock
    #[arg(value_parser = name)]
    pub(crate) name: Name,
    #[command(flatten)]
    pub(crate) store: Store,
    /// Do not ask first
    #[arg(long, short)]
    pub(crate) yes: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Renew {
    /// The file with the ticket (stdin if not given)
    pub(crate) ticket: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) store: Store,
    /// How long it is to be held from now on (as before if not given)
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    pub(crate) ttl: Option<Duration>,
}

#[derive(Debug, Args)]
pub(crate) struct ReleaseTicket {
    /// The file with the ticket (stdin if not given)
    pub(crate) ticket: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) store: Store,
}

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    #[command(flatten)]
    pub(crate) store: Store,
    /// JSON, one line for each finding
    #[arg(long)]
    pub(crate) json: bool,
}

fn name(text: &str) -> Result<Name, String> {
    Name::new(text).map_err(|error| error.to_string())
}

fn label(text: &str) -> Result<Label, String> {
    Label::new(text).map_err(|error| error.to_string())
}

/// What clap has to say, in one line, without what may be a password.
pub(crate) fn complaint(error: &clap::Error, args: &[OsString]) -> String {
    let text = error.to_string();
    let usage = text.lines().find_map(|line| line.trim().strip_prefix("Usage: "));
    let what: Vec<&str> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    let what = what.join(" ");
    let mut line = what.strip_prefix("error: ").unwrap_or(&what).to_owned();
    let tip = text.lines().find_map(|line| line.trim().strip_prefix("tip: "));
    if let Some(tip) = tip {
        line = format!("{line} ({tip})");
    }
    let none = clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    if error.kind() == none {
        "no command is given".clone_into(&mut line);
    }
    if [clap::error::ErrorKind::InvalidSubcommand, none].contains(&error.kind()) {
        let cli = Cli::command();
        let commands: Vec<&str> = cli.get_subcommands().map(clap::Command::get_name).collect();
        line = format!("{line}: there are {} (see lockkeeper --help)", commands.join(", "));
    }
    // A URL may stand where it does not belong, and clap repeats what it does not know.
    for arg in args {
        let arg = arg.to_string_lossy();
        let value = arg.split_once('=').map_or(&*arg, |(_, value)| value);
        for secret in [&*arg, value] {
            if secret.contains('@') || secret.contains("://") {
                line = line.replace(secret, "(not shown: it may hold a password)");
            }
        }
    }
    match usage {
        Some(usage) => format!("{line}; usage: {usage}"),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_made() {
        Cli::command().debug_assert();
    }
}
