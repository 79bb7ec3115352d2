//! The report as Markdown.

use std::fmt::Write as _;

use crate::figures::{Figure, short};
use crate::plots::Plot;
use crate::report::{Better, Report, Row, Section};

/// A load average above this before the run means that the machine is busy with something else.
const BUSY: f64 = 1.0;

/// Returns the whole page. The plots are in the directory `dir` beside it.
pub(crate) fn page(report: &Report, command: &str, plots: &[Plot], dir: &str) -> String {
    let mut page = String::from("# Performance\n\n");
    let length = match (report.quick, report.partial) {
        (true, _) => "**quick** run, which is for a look, not for quoting,",
        (false, true) => "run of **some scenarios** only",
        (false, false) => "full run",
    };
    let _ = writeln!(
        page,
        "Lockkeeper beside its peers from crates.io and the bare drivers: what is fast, what is not, and who breaks.\n\n\
         All of this page was written by one {length} of {:.1} minutes:\n\n```sh\n{command}\n```\n",
        report.seconds / 60.0
    );
    if report.load_before > BUSY {
        let _ = writeln!(
            page,
            "**The machine was busy with something else when this run began (load average above {BUSY}): do not quote its figures.**\n"
        );
    }
    how_to_read(&mut page, report);
    thresholds(&mut page, report);
    losses(&mut page, report);
    if !plots.is_empty() {
        page.push_str("\n## Plots\n");
        for plot in plots {
            let _ = write!(page, "\n![{}]({dir}/{}.svg)\n", plot.title, plot.file);
        }
        page.push_str("\nThe same as PNG lie beside them.\n");
    }
    page.push_str("\n## Tables\n");
    for section in &report.sections {
        table(&mut page, section);
    }
    machine(&mut page, report);
    page
}

fn how_to_read(page: &mut String, report: &Report) {
    let _ = writeln!(
        page,
        "## How to read it\n\n\
         - Everything runs on one machine: the servers and all implementations share its cores, unless a section says otherwise. Times are this machine's; ratios travel better.\n\
         - All tasks of an implementation are in one process and have one client, unless a section says otherwise. What calls share there, locks in processes of their own do not.\n\
         - Each figure is the median of {} repetitions (of seven for take-overs on PostgreSQL and files), with the least and the most of them in brackets. In a repetition all implementations take \
         acquisitions in short slices, in an order that changes, so that what else happens on the machine happens to all; but held locks and idle waiters are watched all at once, on all stores (but those who poll Redis while they \
         wait, implementation after implementation), and take-overs on Redis all at once. Ratios are taken repetition by repetition; one that failed has no part in them. What is without brackets was measured once. \
         An implementation that failed says so beneath its table, and has a dash where it has no figure.\n\
         - PINGs and raw pairs on Redis are by the `redis` crate, which most peers use; Lockkeeper has a transport of its own.\n\
         - A release counts when the store has confirmed it; where an implementation does not tell, its row says so.\n\
         - In every contended slice each holder checks that it is alone. Whoever is not is counted as *granted twice*, beside the figure.\n\
         - Peers run with their defaults and, where they poll, also with the shortest pause that makes sense (1 ms), and are labelled so. Raw rows are \
         the bare driver, which renews nothing, tells of no loss, has no fence and no order.\n\
         - A longest wait as long as a slice ({:.2} s) means that somebody was never served.\n\
         - A lease of 30 s, where there is one and no section says otherwise. Lockkeeper's figures include fences (unless a row says *fence off*), loss detection and, but on files, order.\n",
        report.repetitions,
        crate::scenarios::queue::SLICE[usize::from(report.quick)] as f64 / 1e3
    );
}

fn thresholds(page: &mut String, report: &Report) {
    if report.thresholds.is_empty() {
        return;
    }
    page.push_str(
        "## Bars\n\nWhat Lockkeeper is held to.\n\n| what | threshold | is | |\n|---|---|---|---|\n",
    );
    for threshold in &report.thresholds {
        let verdict = if threshold.met { "met" } else { "**MISSED**" };
        let _ = writeln!(
            page,
            "| {} | {} | {} | {verdict} |",
            threshold.name,
            threshold.limit,
            threshold.figure.show()
        );
    }
    let mut limits = Vec::new();
    for threshold in report.thresholds.iter().filter(|threshold| !threshold.met) {
        let known = LIMITS.iter().find(|(start, _)| threshold.name.starts_with(start));
        let (what, limit) = known.copied().unwrap_or((&threshold.name, "not known."));
        let line = format!("- **{}:** {limit}", what.trim_end_matches([',', ' ']));
        if !limits.contains(&line) {
            limits.push(line);
        }
    }
    if !limits.is_empty() {
        let _ = writeln!(page, "\nWhat limits those that are missed:\n\n{}", limits.join("\n"));
    }
}

/// What limits a threshold that is missed, by the prefix of the threshold's name.
const LIMITS: &[(&str, &str)] = &[
    (
        "Redis: uncontended",
        "the server, by callgrind. A lock and its release are seven commands inside two scripts: whether anybody holds, reads or waits, the time (for the fence), the \
         holder, its record; then whose it is, who waits, and away with both. Two PINGs run no script at all; the raw pair, with three commands and one script, is in \
         the table. What a command in a script costs stands in ARCHITECTURE.md.",
    ),
    (
        "Redis: 64 tasks on 64 keys",
        "processor time, in the table; the server's above all, which runs scripts. Client and server share the cores, so that what one uses the other lacks.",
    ),
    (
        "Redis: wake-up",
        "both ends have slept: the release, a script that hands over, and a push to another client, against one PING.",
    ),
    (
        "Redis: hand-offs, ",
        "the server's processor time for a hand-off, in the table: twelve commands to hand over, and nine for the last holder to get in line again, which here comes at \
         the same moment and is in the way, since nobody holds the lock for any time. It is the same for 8 tasks and for 64, where the threshold is higher.",
    ),
    (
        "Redis: hand-offs at 8, 64, 512 tasks",
        "compare the spread within one size, in the table of hand-offs by number of waiters: so far that was as large as what lies between sizes, and 2,048 waiters were no \
         slower than 8.",
    ),
    (
        "Redlock of five",
        "five servers share the cores with the client, and a lock is three rounds, not two: the fence goes back to a majority before there is a guard.",
    ),
    (
        "PostgreSQL: uncontended",
        "processor time on this side: the engine, its timers, the bookkeeping of sessions.",
    ),
    (
        "PostgreSQL: hand-offs, 8 tasks",
        "of the waiters in one process only the first waits on the server, so that a thousand of them do not take a thousand connections; the next one's question goes out \
         when the first has the lock, and here that is given back at once. With many waiters it does not matter: so many connections cost the raw one more.",
    ),
];

/// Why a peer may be faster, by the prefix of the section's id.
const REASONS: &[(&str, &str)] = &[
    (
        "memory/uncontended",
        "A lease, an owner, a fence and a index to be one_line of a loss, where tokio's lock has a flag.",
    ),
    ("memory/queue", "The same; tokio's lock wakes the next task, and nothing else."),
    (
        "redis/uncontended",
        "One script looks at holder, readers and queue and mints a fence; the raw pair is a SET and a compare and delete.",
    ),
    ("redis/keys", "Processor time, in the table: the scripts do more than SET NX does."),
    ("redis/scaling-keys", "The same. With few tasks there is little that calls could share."),
    (
        "redis/held",
        "A guard that renews, knows its deadline and can be asked for its state is larger than one that does not.",
    ),
    (
        "redlock/five",
        "All five servers share this machine's cores. Peers send each a SET and return; Lockkeeper runs its scripts, and writes the highest fence of its \
         majority back to a majority before the guard exists, which is a round trip more.",
    ),
    (
        "redis/takeover",
        "Those who ask every millisecond find the lock as soon as Redis has expired it; Lockkeeper asks once, when the lease is said to have ended.",
    ),
    (
        "postgres/uncontended",
        "A fence that survives a crash of the server costs a transaction and a flush to disk; `fence=off` leaves it out.",
    ),
    (
        "postgres/keys",
        "The fence, as above; and held locks share connections, where the others have one for each task.",
    ),
    ("postgres/queue", "The fence, as above: it is taken after the grant, while everybody waits."),
    ("postgres/wake", "The fence, as above."),
    ("postgres/takeover", "The fence, as above."),
    ("postgres/readers", "The fence, as above: readers have one as well."),
    ("postgres/scaling", "The fence, as above; the row without it is beside."),
    (
        "postgres/held",
        "Each lock is renewed every third of its ttl by an empty statement, which is what the log of the server shows; the peers hold a session open and say nothing.",
    ),
    ("postgres/idle", "The holder's renewals: nobody who waits sends anything."),
    (
        "file/held",
        "Every third of a ttl the path of each file is looked at, with two calls (by strace); the peers never look again.",
    ),
    ("file/idle", "Of the threads, one listens to inotify."),
    (
        "file/",
        "The fence and the label are written into the file, and the path is looked at again after locking, so that files may be removed; `fence=off` leaves \
         the writing out. Those who block in a thread for each waiter are woken by the kernel directly, Lockkeeper by way of its runtime.",
    ),
];

/// Lists the figures in which another implementation is better than Lockkeeper with its defaults.
fn losses(page: &mut String, report: &Report) {
    page.push_str(
        "\n## Where Lockkeeper loses\n\nEvery figure of a table, where one way is the better, that is better than that of Lockkeeper with its defaults in every \
         repetition. Found by the program.\n\n",
    );
    let mut lines = Vec::new();
    let mut reasons: Vec<String> = Vec::new();
    for section in &report.sections {
        let Some(ours) = section.ours() else { continue };
        let before = lines.len();
        for column in &section.columns {
            let Some(our) = ours.figures.get(&column.key) else { continue };
            for row in section.rows.iter().filter(|row| !row.is_ours()) {
                if let Some(their) = row.figures.get(&column.key)
                    && let Some(factor) = their.beats(our, column.better)
                    && row.implementation != crate::stores::PINGS
                    && row.implementation != crate::stores::SELECTS
                    && row.implementation != crate::scenarios::wake::UNIT
                {
                    let breaks = row.all_notes().iter().any(|note| note.starts_with("**"));
                    let breaks = if breaks { " (**breaks**: see its notes)" } else { "" };
                    let factor =
                        if factor.is_finite() { format!("{factor:.2} ×") } else { "–".into() };
                    lines.push(format!(
                        "| {}, {} | {}{breaks} | {} | {} | {factor} |",
                        section.title,
                        column.title,
                        row.implementation,
                        show(their),
                        show(our),
                    ));
                }
            }
        }
        if lines.len() > before
            && let Some((id, reason)) = REASONS.iter().find(|(id, _)| section.id.starts_with(id))
        {
            let line = format!("- `{id}`: {reason}");
            if !reasons.contains(&line) {
                reasons.push(line);
            }
        }
    }
    if lines.is_empty() {
        page.push_str("Nowhere in this run.\n");
        return;
    }
    page.push_str("| scenario | to | theirs | ours | factor |\n|---|---|---:|---:|---:|\n");
    let _ = writeln!(page, "{}", lines.join("\n"));
    if !reasons.is_empty() {
        let _ = writeln!(page, "\nWhy, as far as it is known:\n\n{}", reasons.join("\n"));
    }
}

fn show(figure: &Figure) -> String {
    figure.median().map_or_else(|| "–".into(), short)
}

/// Writes a section as a table, with the notes of its rows below.
pub(crate) fn table(page: &mut String, section: &Section) {
    let _ = write!(page, "\n### {}\n\n`{}`. {}\n\n|", section.title, section.id, section.text);
    let titles = section.columns.iter().map(|column| column.title.as_str());
    for title in ["implementation"].into_iter().chain(titles) {
        let _ = write!(page, " {title} |");
    }
    page.push_str("\n|---|");
    page.push_str(&"---:|".repeat(section.columns.len()));
    page.push('\n');
    let mut notes: Vec<String> = Vec::new();
    for row in sorted(section) {
        let mut marks = String::new();
        for note in row.all_notes() {
            let index = notes.iter().position(|known| *known == note).unwrap_or_else(|| {
                notes.push(note);
                notes.len() - 1
            });
            let _ = write!(marks, " [{}]", index + 1);
        }
        let name = if row.is_ours() {
            format!("**{}**", row.implementation)
        } else {
            row.implementation.clone()
        };
        let _ = write!(page, "| {name}{marks} |");
        for column in &section.columns {
            let figure = row.figures.get(&column.key).map_or_else(|| "–".into(), Figure::show);
            let _ = write!(page, " {figure} |");
        }
        page.push('\n');
    }
    if !notes.is_empty() {
        page.push('\n');
        for (number, note) in notes.iter().enumerate() {
            let _ = writeln!(page, "[{}] {note}  ", number + 1);
        }
    }
}

/// Returns the rows, best first.
fn sorted(section: &Section) -> Vec<&Row> {
    let mut rows: Vec<&Row> = section.rows.iter().collect();
    let Some(column) = section.main_column() else { return rows };
    let key = |row: &Row| {
        let median = row.figures.get(&column.key).and_then(Figure::median);
        match column.better {
            Better::High => median.map_or(f64::MAX, |median| -median),
            Better::Low | Better::Neither => median.unwrap_or(f64::MAX),
        }
    };
    rows.sort_by(|a, b| key(a).total_cmp(&key(b)));
    rows
}

fn machine(page: &mut String, report: &Report) {
    page.push_str("\n## Machine, versions, noise\n\n| | |\n|---|---|\n");
    for (name, value) in &report.machine {
        let _ = writeln!(page, "| {name} | {value} |");
    }
    let pings = Figure { repetitions: report.sections.iter().map(|s| s.ping).collect() };
    let loads =
        Figure { repetitions: report.sections.iter().map(|s| Some(s.load_average)).collect() };
    let _ = writeln!(
        page,
        "\nNoise: before each section 200 PINGs were sent; their p50 was {} µs over the run, and the load average {}. On a machine that is not \
         otherwise used, the load average is what this program makes. The spread of each figure stands beside it.",
        pings.show(),
        loads.show()
    );
}
