//! Many tasks, each on a lock of its own.

use lockkeeper_testkit::server::RedisServer;

use crate::bench::{Bench, REPETITIONS, shuffled};
use crate::load;
use crate::make::{Make, Outcome, fresh};
use crate::report::{Better, Section};
use crate::slice::{self, Contend, Plan};

/// Measures locks per second, with 64 tasks. With a Redis server: what they cost it.
pub(crate) async fn run(
    bench: &mut Bench,
    section: Section,
    makes: &[Make],
    unit: (&str, &str),
    server: Option<&RedisServer>,
) -> Outcome<()> {
    let mut section = section.column("rate", "locks per second", Better::High).column(
        "client",
        "client µs per lock",
        Better::Neither,
    );
    if server.is_some() {
        section = section.column("server", "server µs per lock", Better::Neither);
    }
    bench.begin(&mut section).await?;
    // Those with connections open them now, and not while it counts.
    for make in makes {
        one(bench, make, 64, None).await?;
    }
    for _ in 0..REPETITIONS {
        for make in shuffled(makes) {
            let slice = one(bench, make, 64, server).await?;
            let row = section.row(make);
            row.put("rate", Some(slice.turns_per_second()));
            let each = |seconds: f64| Some(seconds * 1e6 / slice.all_turns().max(1) as f64);
            row.put("client", each(slice.client));
            if server.is_some() {
                row.put("server", each(slice.load.processor));
            }
            row.wrongs_of(&slice);
        }
    }
    section.in_units_of("rate", unit.0, unit.1);
    bench.end(section);
    Ok(())
}

/// The same, over numbers of tasks and keys.
pub(crate) async fn scaling(
    bench: &mut Bench,
    section: Section,
    makes: &[Make],
    points: &[usize],
) -> Outcome<()> {
    let mut section = section;
    for point in points {
        section = section.column(&point.to_string(), &format!("{point} keys"), Better::High);
    }
    bench.begin(&mut section).await?;
    for _ in 0..REPETITIONS {
        for point in points {
            for make in shuffled(makes) {
                let slice = one(bench, make, *point, None).await?;
                let row = section.row(make);
                row.put(&point.to_string(), Some(slice.turns_per_second()));
                row.wrongs_of(&slice);
            }
        }
    }
    bench.end(section);
    Ok(())
}

async fn one(
    bench: &Bench,
    make: &Make,
    tasks: usize,
    server: Option<&RedisServer>,
) -> Outcome<slice::Slice> {
    let locks = make.many(&fresh("many"), tasks.min(make.most_tasks)).await?;
    let (warm, time) = (bench.ms(80, 20), bench.ms(350, 40));
    let read = server.map(|server| move || load::of_redis(server, make));
    let meter = read.as_ref().map(|read| read as &load::Meter<'_>);
    let plan = Plan { contend: Contend::Each, readers: 0, warm, time, meter };
    Ok(slice::run(locks, plan).await)
}
