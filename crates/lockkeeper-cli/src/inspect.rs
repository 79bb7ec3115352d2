//! `ls`, `show`, `watch` and `break`.

use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use lockkeeper::text::visible;
use lockkeeper::{EventKind, Inspect, LockInfo, Owner};
use serde_json::json;

use crate::args;
use crate::failure::Failure;
use crate::output::{self, Paint, print};
use crate::report::{self, Reporter, Style};
use crate::store;

/// How often `watch` checks whether stdout is still open.
const STDOUT_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Prints the message of a failure, as JSON if requested, and returns the exit code.
pub(crate) fn exit_code(json: bool, result: Result<u8, Failure>) -> ExitCode {
    ExitCode::from(result.unwrap_or_else(|failure| {
        let style = if json { Style::Json } else { Style::Text };
        Reporter::new(style, "").failed(&failure);
        failure.code
    }))
}

async fn inspect(store: &args::Store) -> Result<Inspect, Failure> {
    Ok(store::open(store).await?.inspect()?)
}

/// `ls`
pub(crate) async fn ls(args: &args::List) -> Result<u8, Failure> {
    let infos = inspect(&args.store).await?.list(&args.prefix).await?;
    print_locks(&infos, args.json)?;
    Ok(0)
}

/// `show`
pub(crate) async fn show(args: &args::Show) -> Result<u8, Failure> {
    let infos = inspect(&args.store).await?.show(args.name.as_str()).await?;
    print_locks(&infos, args.json)?;
    if infos.is_empty() && !args.json {
        report::message(&format!("{:?} is free: it has no holder and no waiter", args.name));
    }
    Ok(0)
}

fn print_locks(infos: &[LockInfo], json: bool) -> Result<(), Failure> {
    if json {
        let infos: Vec<_> = infos.iter().map(output::lock).collect();
        return print(&output::json_line(&json!(infos)));
    }
    if infos.is_empty() {
        return Ok(());
    }
    print(&output::locks(infos, Paint::stdout()))
}

/// `watch`
pub(crate) async fn watch(args: &args::List) -> Result<u8, Failure> {
    let inspect = inspect(&args.store).await?;
    let mut watch = inspect.watch(&args.prefix).await?;
    // Printed after the watch has started, so no event between the table and the first line is missed.
    print_locks(&inspect.list(&args.prefix).await?, args.json)?;
    let paint = Paint::stdout();
    loop {
        let event = tokio::select! {
            event = watch.next() => event?,
            // Without events there is no write that would fail with EPIPE.
            () = tokio::time::sleep(STDOUT_CHECK_INTERVAL) => {
                if output::is_stdout_closed() {
                    return Ok(0);
                }
                continue;
            }
        };
        let (word, colour) = match event.what {
            EventKind::Queued => ("queued", output::YELLOW),
            EventKind::Left => ("left", output::YELLOW),
            EventKind::Acquired => ("acquired", output::GREEN),
            EventKind::Freed => ("freed", output::BOLD),
        };
        let line = if args.json {
            let (name, kind, what) = (&event.name, event.kind, event.what);
            let who = output::participant(&event.who);
            output::json_line(&json!({ "event": what, "name": name, "kind": kind, "who": who }))
        } else {
            let word = paint.paint(colour, &format!("{word:8}"));
            let label = visible(event.who.who());
            format!("{word}  {}  {label}\n", output::name(&event.name))
        };
        let mut stdout = io::stdout().lock();
        if write!(stdout, "{line}").and_then(|()| stdout.flush()).is_err() {
            return Ok(0);
        }
    }
}

/// `break`
pub(crate) async fn break_lock(args: &args::Break) -> Result<(), Failure> {
    let inspect = inspect(&args.store).await?;
    let name = args.name.as_str();
    let before = inspect.show(name).await?;
    let holders = describe(&before);
    if owners(&before).is_empty() {
        return print_line(&format!("{name:?} is not held"));
    }
    if !args.yes {
        confirm(&format!("{name:?} is held by {holders}"))?;
        // The user has confirmed only the holders that were shown.
        let now = inspect.show(name).await?;
        if owners(&now) != owners(&before) {
            let now = if owners(&now).is_empty() {
                "is no longer held".to_owned()
            } else {
                format!("is now held by {}: run the command again to break that", describe(&now))
            };
            let message = format!("not broken: {name:?} {now}");
            return Err(Failure { code: 1, kind: "changed", message });
        }
    }
    let broken = inspect.break_lock(name).await?;
    match broken {
        0 => print_line(&format!("{name:?} is no longer held")),
        _ => print_line(&format!("broke {name:?}: it was held by {holders}")),
    }
}

fn print_line(text: &str) -> Result<(), Failure> {
    print(&format!("{}\n", visible(text)))
}

/// Returns the owner and label of each holder.
fn owners(infos: &[LockInfo]) -> Vec<(Option<Owner>, String)> {
    let holders = infos.iter().flat_map(|info| &info.holders);
    holders.map(|holder| (holder.owner, holder.who().to_owned())).collect()
}

fn describe(infos: &[LockInfo]) -> String {
    let mut parts = Vec::new();
    for info in infos {
        for holder in &info.holders {
            let since = holder.age.map(|age| format!(" for {}", output::short_duration(age)));
            let kind = output::kind(info.kind);
            parts.push(format!("{}{} ({kind})", holder.who(), since.unwrap_or_default()));
        }
    }
    parts.join(", ")
}

fn confirm(state: &str) -> Result<(), Failure> {
    if !io::stdin().is_terminal() {
        let message = format!("{state}, and stdin is not a terminal: pass --yes to break it");
        return Err(Failure::usage(message));
    }
    let _ = write!(io::stderr(), "{}. Break it? [y/N] ", visible(state))
        .and_then(|()| io::stderr().flush());
    let mut answer = String::new();
    let _ = io::stdin().read_line(&mut answer);
    match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => Err(Failure { code: 1, kind: "refused", message: "not broken".to_owned() }),
    }
}
