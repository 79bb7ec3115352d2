//! `ls`, `show`, `watch` and `break`: a look into the store.

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

/// How often a watch looks whether anybody still reads it.
const UNREAD: Duration = Duration::from_secs(1);

/// The exit code of a command that may have been asked for JSON, after its failure has been told.
pub(crate) fn ended(json: bool, ended: Result<u8, Failure>) -> ExitCode {
    ExitCode::from(ended.unwrap_or_else(|failure| {
        let style = if json { Style::Json } else { Style::Text };
        Reporter::new(style, "").failed(&failure);
        failure.code
    }))
}

async fn inspect(store: &args::Store) -> Result<Inspect, Failure> {
    Ok(store::open(store).await?.inspect()?)
}

/// `ls`
pub(crate) async fn ls(args: &args::Look) -> Result<u8, Failure> {
    let infos = inspect(&args.store).await?.list(&args.prefix).await?;
    tell(&infos, args.json)?;
    Ok(0)
}

/// `show`
pub(crate) async fn show(args: &args::Show) -> Result<u8, Failure> {
    let infos = inspect(&args.store).await?.show(args.name.as_str()).await?;
    tell(&infos, args.json)?;
    if infos.is_empty() && !args.json {
        report::say(&format!("nobody holds {:?} or waits for it", args.name));
    }
    Ok(0)
}

fn tell(infos: &[LockInfo], json: bool) -> Result<(), Failure> {
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
pub(crate) async fn watch(args: &args::Look) -> Result<u8, Failure> {
    let inspect = inspect(&args.store).await?;
    let mut watch = inspect.watch(&args.prefix).await?;
    // Whoever reads this knows that from now on nothing is missed.
    tell(&inspect.list(&args.prefix).await?, args.json)?;
    let paint = Paint::stdout();
    loop {
        let event = tokio::select! {
            event = watch.next() => event?,
            // Between events nothing is written that could fail.
            () = tokio::time::sleep(UNREAD) => {
                if output::is_unread() {
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
        return print_line(&format!("nobody holds {name:?}"));
    }
    if !args.yes {
        confirm(&format!("{name:?} is held by {holders}. Break it?"))?;
        // Another may hold it by now, and nobody has agreed to break that.
        let now = inspect.show(name).await?;
        if owners(&now) != owners(&before) {
            let now = if owners(&now).is_empty() { "nobody".to_owned() } else { describe(&now) };
            let message = format!("not broken: {name:?} is now held by {now}: look again");
            return Err(Failure { code: 1, kind: "changed", message });
        }
    }
    let broken = inspect.break_lock(name).await?;
    match broken {
        0 => print_line(&format!("nobody holds {name:?} any more")),
        _ => print_line(&format!("{name:?} is free; it was held by {holders}")),
    }
}

fn print_line(text: &str) -> Result<(), Failure> {
    print(&format!("{}\n", visible(text)))
}

/// Who holds, as the store knows them.
fn owners(infos: &[LockInfo]) -> Vec<(Option<Owner>, String)> {
    let holders = infos.iter().flat_map(|info| &info.holders);
    holders.map(|holder| (holder.owner, holder.who().to_owned())).collect()
}

fn describe(infos: &[LockInfo]) -> String {
    let mut parts = Vec::new();
    for info in infos {
        for holder in &info.holders {
            let since = holder.age.map(|age| format!(" for {}", output::span(age)));
            let kind = output::kind(info.kind);
            parts.push(format!("{}{} ({kind})", holder.who(), since.unwrap_or_default()));
        }
    }
    parts.join(", ")
}

fn confirm(question: &str) -> Result<(), Failure> {
    let refused = |message: &str| Failure { code: 1, kind: "refused", message: message.to_owned() };
    if !io::stdin().is_terminal() {
        let message = format!("{question} Say so with --yes, as there is no terminal to ask on");
        return Err(Failure::usage(message));
    }
    let _ =
        write!(io::stderr(), "{} [y/N] ", visible(question)).and_then(|()| io::stderr().flush());
    let mut answer = String::new();
    let _ = io::stdin().read_line(&mut answer);
    match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => Err(refused("not broken")),
    }
}
