//! The command line.
#![allow(clippy::doc_markdown, reason = "clap prints these comments unchanged")]

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;
use lockkeeper::{Label, Name};
use lockkeeper_syntax::duration;

/// Run commands under distributed locks, and inspect and release locks.
#[derive(Debug, Parser)]
#[command(name = "lockkeeper", version, max_term_width = 100, disable_help_subcommand = true)]
#[command(after_help = "\
Examples:
  lockkeeper run nightly-report -- ./report.sh
  lockkeeper ls
  lockkeeper doctor --store redis://127.0.0.1/

A store keeps the locks. --store URL selects it, or else the variable LOCKKEEPER_STORE:
  file:/run/locks          files, for the processes of one machine
  redis://host/            Redis
  redis+unix:///run/...    Redis, by the path of its Unix socket
  redis+sentinel://...     Redis Sentinel
  redis+cluster://...      Redis Cluster
  redlock://...            a majority of independent Redis servers
  postgres://user@host/db  PostgreSQL

Without either, locks are files in /run/lockkeeper for root, and in $XDG_STATE_HOME/lockkeeper or
~/.local/state/lockkeeper for other users. Root and other users do not share these locks.

\"lockkeeper COMMAND --help\" describes the options and exit codes of a command.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command while holding a lock
    ///
    /// Waits until the lock is free, acquires it, runs the command, and releases the lock when the command ends. The
    /// lock is renewed while the command runs. If the lock is lost, the command is stopped: see --kill-after and
    /// --overlap-grace. INT, TERM, HUP, QUIT, USR1 and USR2 are forwarded to the command.
    #[command(after_help = "\
The command's environment contains LOCKKEEPER_NAME, LOCKKEEPER_FENCE (the fencing token) and
LOCKKEEPER_OWNER. LOCKKEEPER_STORE is removed from it, because it may contain a password.

Examples:
  lockkeeper run deploy --wait 10m -- ./deploy.sh production
  lockkeeper run sync-mail --no-wait --conflict-exit-code 0 -- sync-mail
  lockkeeper run gpu --permits 4 -- ./train.sh

Exit codes:
  the command's own exit code, or 128+n if signal n killed it
  64   invalid usage or store URL
  69   the store is unavailable, refuses access or could not decide
  70   the lock was lost, and the command was stopped
  75   not acquired in time (change it with --conflict-exit-code)
  126  the command could not be executed
  127  the command was not found")]
    Run(Run),
    /// List locks that are held or waited for
    ///
    /// Prints one row per holder and per waiter, in queue order, with its label, the time since it acquired the lock or
    /// started to wait, the remaining lease, and the fencing token.
    #[command(after_help = "Example: lockkeeper ls orders/")]
    Ls(List),
    /// Show the holders and waiters of a lock
    ///
    /// Prints the same columns as ls. Exits with 0 even if the lock is free.
    #[command(after_help = "Example: lockkeeper show deploy")]
    Show(Show),
    /// Print lock events as they happen
    ///
    /// Prints the current locks, then one line per event: queued, left (a waiter left the queue), acquired, freed. It
    /// compares the state of the store at least once a second, so it may miss holds and waits shorter than that.
    #[command(after_help = "Example: lockkeeper watch orders/")]
    Watch(List),
    /// Release a lock by force
    ///
    /// Asks for confirmation and names the holder, unless --yes is given.
    #[command(after_help = "\
The store releases the lock first and notifies the old holder afterwards, so the next holder may
start some milliseconds before the old one stops. A holder that is stalled or cannot be reached
continues to work until it is notified or its lease ends.

Example: lockkeeper break deploy

Exit codes: 0 broken or not held, 1 not confirmed or the holder has changed, 64 invalid usage or
store URL, 69 store unavailable")]
    Break(Break),
    /// Acquire a lock and print a ticket for it
    ///
    /// The lock stays held for its TTL after this command has exited. The ticket is JSON that identifies the lock: pass
    /// it to "lockkeeper renew" and "lockkeeper release". Works on Redis; on other stores a lock ends with the process
    /// that holds it.
    #[command(after_help = "\
A process that can read the ticket can renew and release the lock: protect it like a password.

Example: lockkeeper acquire deploy --ttl 10m > ticket.json

Exit codes: 0, 64 invalid usage or store URL, 69 store unavailable, 74 ticket not written (the lock
is released), 75 not acquired in time")]
    Acquire(Acquire),
    /// Renew the lock of a ticket and print the new ticket
    ///
    /// The new ticket differs only in its TTL. The old one stays valid.
    #[command(after_help = "\
Example: lockkeeper renew ticket.json --ttl 10m > new-ticket.json

Exit codes: 0, 64 invalid usage, ticket or store URL, 69 store unavailable, 70 the lock was lost,
74 ticket not written (the lock stays held)")]
    Renew(Renew),
    /// Release the lock of a ticket
    #[command(after_help = "\
Example: lockkeeper release ticket.json

Exit codes: 0, 64 invalid usage, ticket or store URL, 69 store unavailable, 70 the lock was already
released or lost")]
    Release(ReleaseTicket),
    /// Check a store for problems that make its locks unsafe
    ///
    /// Prints one line per check: OK, WARN or FAIL, the finding, and what to do about it.
    #[command(after_help = "\
Example: lockkeeper doctor --store redis://127.0.0.1/

Exit codes: 0 no problems, 1 warnings, 2 failures, 64 invalid usage or store URL")]
    Doctor(Doctor),
    /// Print a completion script for a shell
    #[command(after_help = "\
Example: lockkeeper completions bash > ~/.local/share/bash-completion/completions/lockkeeper")]
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the manual page
    #[command(after_help = "Example: lockkeeper man | man -l -")]
    Man,
}

#[derive(Debug, Args)]
pub(crate) struct Store {
    /// URL of the store, such as redis://host/ [default: $LOCKKEEPER_STORE, or local files]
    ///
    /// Other users can read command lines: pass a URL with a password in LOCKKEEPER_STORE. "lockkeeper --help" lists
    /// the stores and the default directories.
    #[arg(long = "store", value_name = "URL")]
    pub(crate) url: Option<String>,
}

/// A lock, and how to acquire it.
#[derive(Debug, Args)]
pub(crate) struct Lock {
    /// Name of the lock
    #[arg(value_parser = name)]
    pub(crate) name: Name,
    /// How long to wait for the lock: 30s, 5m, 1h30m; 0 tries once [default: no limit]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse, conflicts_with = "no_wait")]
    wait: Option<Duration>,
    /// Try once, like --wait 0
    #[arg(long)]
    no_wait: bool,
    /// Lease time: how long the store keeps the lock without a renewal
    #[arg(long, value_name = "DURATION", value_parser = duration::parse, default_value = "30s")]
    pub(crate) ttl: Duration,
    /// Acquire the lock in shared mode, together with other shared holders
    #[arg(long, conflicts_with = "permits")]
    pub(crate) shared: bool,
    /// Acquire one permit of a semaphore with N permits: at most N holders at a time
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) permits: Option<u32>,
    /// Name of this holder in ls, show and waiting messages [default: host:pid:program]
    #[arg(long, value_parser = label)]
    pub(crate) label: Option<Label>,
    /// Exit code if the lock is not acquired in time [default: 75]
    #[arg(long, value_name = "N")]
    pub(crate) conflict_exit_code: Option<u8>,
}

impl Lock {
    /// Returns how long to wait; `None` means without limit.
    pub(crate) fn max_wait(&self) -> Option<Duration> {
        if self.no_wait { Some(Duration::ZERO) } else { self.wait }
    }
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) lock: Lock,
    #[command(flatten)]
    pub(crate) store: Store,
    /// Time between TERM and KILL [default: 5s, or a third of --ttl if that is less]
    ///
    /// If the lock cannot be renewed, the command gets KILL shortly before the lease ends, so before another process can
    /// acquire the lock, and TERM this long before KILL. After a forwarded INT, TERM, HUP or QUIT, the processes of the
    /// command's group get KILL after this time. At most half of --ttl, except on files, which have no leases.
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    pub(crate) kill_after: Option<Duration>,
    /// Time between TERM and KILL after the store has dropped the lock [default: 0]
    ///
    /// The store drops a lock when it is broken, or when the session that holds it ends. The next holder may start at
    /// that moment, so by default the command gets KILL at once. With this option it gets TERM first, and two commands
    /// may run under one lock for this time, but not longer than the rest of the lease.
    #[arg(long, value_name = "DURATION", value_parser = duration::parse, default_value = "0", hide_default_value = true)]
    pub(crate) overlap_grace: Duration,
    /// Do not print waiting messages
    #[arg(long, short, conflicts_with = "json")]
    pub(crate) quiet: bool,
    /// Print events and errors as JSON on stderr, one object per line
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
    /// Do not print waiting messages
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only locks whose names start with PREFIX
    #[arg(default_value = "", hide_default_value = true)]
    pub(crate) prefix: String,
    #[command(flatten)]
    pub(crate) store: Store,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Show {
    /// Name of the lock
    #[arg(value_parser = name)]
    pub(crate) name: Name,
    #[command(flatten)]
    pub(crate) store: Store,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Break {
    /// Name of the lock
    #[arg(value_parser = name)]
    pub(crate) name: Name,
    #[command(flatten)]
    pub(crate) store: Store,
    /// Do not ask for confirmation
    #[arg(long, short)]
    pub(crate) yes: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Renew {
    /// File that contains the ticket [default: stdin]
    pub(crate) ticket: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) store: Store,
    /// New lease time, from now on [default: that of the ticket]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    pub(crate) ttl: Option<Duration>,
}

#[derive(Debug, Args)]
pub(crate) struct ReleaseTicket {
    /// File that contains the ticket [default: stdin]
    pub(crate) ticket: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) store: Store,
}

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    #[command(flatten)]
    pub(crate) store: Store,
    /// Print JSON, one object per finding
    #[arg(long)]
    pub(crate) json: bool,
}

fn name(text: &str) -> Result<Name, String> {
    Name::new(text).map_err(|error| error.to_string())
}

fn label(text: &str) -> Result<Label, String> {
    Label::new(text).map_err(|error| error.to_string())
}

/// Returns clap's error as one line, without arguments that may contain a password.
pub(crate) fn usage_error(error: &clap::Error, args: &[OsString]) -> String {
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
        "no subcommand given".clone_into(&mut line);
    }
    if [clap::error::ErrorKind::InvalidSubcommand, none].contains(&error.kind()) {
        let cli = Cli::command();
        let commands: Vec<&str> = cli.get_subcommands().map(clap::Command::get_name).collect();
        line = format!("{line}: use one of {} (see lockkeeper --help)", commands.join(", "));
    }
    // clap repeats arguments that it does not accept, and a URL may be among them.
    for arg in args {
        let arg = arg.to_string_lossy();
        let value = arg.split_once('=').map_or(&*arg, |(_, value)| value);
        for secret in [&*arg, value] {
            if secret.contains('@') || secret.contains("://") {
                line = line.replace(secret, "(hidden: it may contain a password)");
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
    fn the_command_line_passes_the_checks_of_clap() {
        Cli::command().debug_assert();
    }
}
