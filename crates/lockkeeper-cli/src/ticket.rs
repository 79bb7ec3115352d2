//! `acquire`, `renew` and `release`: a lock that is held by nobody but a ticket.

use std::fs;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use lockkeeper::{Keeper, ReleaseOutcome, Ticket};

use crate::args;
use crate::failure::Failure;
use crate::output;
use crate::report::{Reporter, Style};
use crate::signals::Signals;
use crate::store;
use crate::waiting::Wanted;

/// How long whatever is under way with the store may hold up the end.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// `acquire`
pub(crate) async fn acquire(args: &args::Acquire) -> Result<(), Failure> {
    let mut signals = hear()?;
    let style = if args.quiet { Style::Quiet } else { Style::Text };
    let mut reporter = Reporter::new(style, &args.lock.name);
    let keeper = signals.unless(open(&args.store)).await??;
    let wanted = Wanted::new(&keeper, &args.lock);
    let ended = match signals.unless(wanted.acquire(&mut reporter)).await {
        Ok(Ok(guard)) => hand_out(&keeper, guard.detach()?).await,
        Ok(Err(failure)) | Err(failure) => {
            reporter.clear();
            Err(failure)
        }
    };
    close(&keeper, &mut signals).await;
    ended
}

/// `renew`
pub(crate) async fn renew(args: &args::Renew) -> Result<(), Failure> {
    let ticket = read(args.ticket.as_ref())?;
    let mut signals = hear()?;
    let keeper = signals.unless(open(&args.store)).await??;
    let ended = signals.unless(async {
        let guard = keeper.adopt(ticket).await?;
        if let Some(ttl) = args.ttl {
            guard.extend(ttl).await?;
        }
        guard.detach()
    });
    let ended = match ended.await? {
        // The lock stays: whoever has the old ticket has the lock still.
        Ok(ticket) => write(&ticket).map_err(|error| Failure::output(&error)),
        Err(error) => Err(error.into()),
    };
    close(&keeper, &mut signals).await;
    ended
}

/// `release`
pub(crate) async fn release(args: &args::ReleaseTicket) -> Result<(), Failure> {
    let ticket = read(args.ticket.as_ref())?;
    let mut signals = hear()?;
    let keeper = signals.unless(open(&args.store)).await??;
    let ended = signals.unless(give_back(&keeper, ticket)).await?;
    // A release that failed is tried again, as that of any guard.
    close(&keeper, &mut signals).await;
    ended
}

/// Prints a ticket. Nobody could release a lock whose ticket nobody has.
async fn hand_out(keeper: &Keeper, ticket: Ticket) -> Result<(), Failure> {
    let Err(error) = write(&ticket) else { return Ok(()) };
    let failure = Failure::output(&error);
    match give_back(keeper, ticket).await {
        Ok(()) => Err(failure),
        Err(why) => {
            let message = format!("{failure}, and the lock stays until its lease ends: {why}");
            Err(Failure { message, ..failure })
        }
    }
}

/// Releases without adopting: to adopt is to renew, and if the release then failed, the lock would stay for longer.
async fn give_back(keeper: &Keeper, ticket: Ticket) -> Result<(), Failure> {
    let name = ticket.name.clone();
    match keeper.release_ticket(ticket).await? {
        ReleaseOutcome::Released => Ok(()),
        ReleaseOutcome::AlreadyLost => Err(Failure::lost(format!(
            "{:?} is lost: its lease ran out, it was released or broken, or the ticket is not that of a hold",
            name.as_str()
        ))),
    }
}

fn hear() -> Result<Signals, Failure> {
    Signals::new().map_err(|error| Failure::unavailable(format!("no signals: {error}")))
}

async fn open(store: &args::Store) -> Result<Keeper, Failure> {
    let keeper = store::open(store).await?;
    if !keeper.capabilities().leases {
        return Err(Failure {
            kind: "unsupported",
            ..Failure::usage(
                "this store has no tickets, as its locks end with the process that holds them: Redis \
                 has them (redis://, redis+sentinel://, redis+cluster://, redlock://)",
            )
        });
    }
    Ok(keeper)
}

/// Lets whatever is under way with the store end, unless a signal comes.
async fn close(keeper: &Keeper, signals: &mut Signals) {
    let _ = signals.unless(tokio::time::timeout(LAST_WORDS, keeper.close())).await;
}

fn write(ticket: &Ticket) -> io::Result<()> {
    let mut line = output::safe_json(serde_json::to_string(ticket)?);
    line.push('\n');
    let mut stdout = io::stdout().lock();
    stdout.write_all(line.as_bytes())?;
    stdout.flush()
}

fn read(file: Option<&PathBuf>) -> Result<Ticket, Failure> {
    let text = if let Some(file) = file.filter(|file| file.as_os_str() != "-") {
        let read = fs::read_to_string(file);
        read.map_err(|error| Failure::usage(format!("the ticket {}: {error}", file.display())))?
    } else {
        let read = io::read_to_string(io::stdin());
        read.map_err(|error| Failure::usage(format!("the ticket on stdin: {error}")))?
    };
    serde_json::from_str(&text).map_err(|error| {
        let message = "that is not a ticket: give what lockkeeper acquire has printed";
        Failure::usage(format!("{message} ({error})"))
    })
}
