//! `acquire`, `renew` and `release`: locks that outlive the process, as tickets.

use std::fs;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use lockkeeper::{Keeper, ReleaseOutcome, Ticket};

use crate::acquire::LockRequest;
use crate::args;
use crate::failure::Failure;
use crate::output;
use crate::report::{Reporter, Style};
use crate::signals::Signals;
use crate::store;

/// How long requests in flight may delay the exit.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// `acquire`
pub(crate) async fn acquire(args: &args::Acquire) -> Result<(), Failure> {
    let mut signals = Signals::new().map_err(|error| Failure::signal_handlers(&error))?;
    let style = if args.quiet { Style::Quiet } else { Style::Text };
    let mut reporter = Reporter::new(style, &args.lock.name);
    let keeper = signals.unless(open(&args.store)).await??;
    let request = LockRequest::new(&keeper, &args.lock);
    let ended = match signals.unless(request.acquire(&mut reporter)).await {
        Ok(Ok(guard)) => print_or_release(&keeper, guard.detach()?).await,
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
    let mut signals = Signals::new().map_err(|error| Failure::signal_handlers(&error))?;
    let keeper = signals.unless(open(&args.store)).await??;
    let ended = signals.unless(async {
        let guard = keeper.adopt(ticket).await?;
        if let Some(ttl) = args.ttl {
            guard.extend(ttl).await?;
        }
        guard.detach()
    });
    let ended = match ended.await? {
        // If the write fails, the lock stays held: the old ticket is still valid.
        Ok(ticket) => write(&ticket).map_err(|error| Failure::output(&error)),
        Err(error) => Err(error.into()),
    };
    close(&keeper, &mut signals).await;
    ended
}

/// `release`
pub(crate) async fn release(args: &args::ReleaseTicket) -> Result<(), Failure> {
    let ticket = read(args.ticket.as_ref())?;
    let mut signals = Signals::new().map_err(|error| Failure::signal_handlers(&error))?;
    let keeper = signals.unless(open(&args.store)).await??;
    let ended = signals.unless(release_ticket(&keeper, ticket)).await?;
    // The keeper retries a failed release in the background, and `close` waits for that.
    close(&keeper, &mut signals).await;
    ended
}

/// Prints a ticket. If that fails, releases the lock, which no process could release otherwise.
async fn print_or_release(keeper: &Keeper, ticket: Ticket) -> Result<(), Failure> {
    let Err(error) = write(&ticket) else { return Ok(()) };
    let failure = Failure::output(&error);
    let message = match release_ticket(keeper, ticket).await {
        Ok(()) => format!("{failure}; the lock was released"),
        Err(error) => format!("{failure}; the lock stays held until its lease ends: {error}"),
    };
    Err(Failure { message, ..failure })
}

/// Releases the lock of a ticket without adopting it: adopting renews the lease, which would keep the lock held for
/// longer if the release then failed.
async fn release_ticket(keeper: &Keeper, ticket: Ticket) -> Result<(), Failure> {
    let name = ticket.name.clone();
    match keeper.release_ticket(ticket).await? {
        ReleaseOutcome::Released => Ok(()),
        ReleaseOutcome::AlreadyLost => Err(Failure::lost(format!(
            "{:?} is not held with this ticket: it was already released or broken, its lease expired, or the ticket is \
             for another store",
            name.as_str()
        ))),
    }
}

async fn open(store: &args::Store) -> Result<Keeper, Failure> {
    let keeper = store::open(store).await?;
    if !keeper.capabilities().leases {
        return Err(Failure {
            kind: "unsupported",
            ..Failure::usage(
                "this store does not support tickets, because its locks end with the process that holds them: use \
                 Redis (redis://, redis+unix://, redis+sentinel://, redis+cluster:// or redlock://)",
            )
        });
    }
    Ok(keeper)
}

/// Waits for requests in flight, until a timeout or a signal.
async fn close(keeper: &Keeper, signals: &mut Signals) {
    let _ = signals.unless(tokio::time::timeout(CLOSE_TIMEOUT, keeper.close())).await;
}

fn write(ticket: &Ticket) -> io::Result<()> {
    let mut line = output::safe_json(serde_json::to_string(ticket)?);
    line.push('\n');
    let mut stdout = io::stdout().lock();
    stdout.write_all(line.as_bytes())?;
    stdout.flush()
}

fn read(file: Option<&PathBuf>) -> Result<Ticket, Failure> {
    let (origin, text) = match file.filter(|file| file.as_os_str() != "-") {
        Some(file) => (file.display().to_string(), fs::read_to_string(file)),
        None => ("stdin".to_owned(), io::read_to_string(io::stdin())),
    };
    let text =
        text.map_err(|error| Failure::usage(format!("cannot read the ticket: {origin}: {error}")))?;
    serde_json::from_str(&text).map_err(|error| {
        let advice = "pass what \"lockkeeper acquire\" printed";
        Failure::usage(format!("{origin}: not a ticket: {error}: {advice}"))
    })
}
