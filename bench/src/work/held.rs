//! Many locks that are held, and nothing else.

use std::time::{Duration, Instant};

use lockkeeper_testkit::server::RedisServer;

use crate::bench::{Bench, REPETITIONS};
use crate::child::Holder;
use crate::figures::Figure;
use crate::load::{self, Load};
use crate::make::{Kind, Make, Outcome, fresh};
use crate::makes;
use crate::report::{Better, Section};

struct Held {
    make: Make,
    server: RedisServer,
    holder: Holder,
    key: String,
}

/// Measures what it costs to hold many locks: each make in a process of its own, on a server of its own, all at once.
pub(crate) async fn run(bench: &mut Bench, section: Section) -> Outcome<()> {
    let mut section = section
        .column("requests", "requests per second", Better::Neither)
        .column("client", "client % of a core", Better::Low)
        .column("server", "server % of a core", Better::Neither)
        .column("bytes", "client bytes each", Better::Low)
        .column("kept", "still held, %", Better::Neither);
    bench.begin(&mut section).await?;
    let (count, ttl) = (bench.either(10_000, 2_000), Duration::from_secs(bench.either(30, 3)));
    let mut all = Vec::new();
    let server = RedisServer::start().map_err(|error| error.to_string())?;
    for make in makes::on_redis(&server.url(), ttl).await? {
        // Those that poll hold as they do with other pauses; the bare one holds nothing up.
        if matches!(make.kind, Kind::Raw | Kind::Tuned) || make.most_tasks < usize::MAX {
            continue;
        }
        let server = RedisServer::start().map_err(|error| error.to_string())?;
        let key = fresh("held");
        let place = server.url();
        let holder = Holder::start("redis", &place, &make, ttl, &key, count).await?;
        section.row(&make).put("bytes", Some(holder.bytes / count as f64));
        all.push(Held { make, server, holder, key });
    }
    let read = |held: &Held| {
        let server = load::of_redis(&held.server, &held.make);
        (server, Load { requests: 0.0, processor: load::processor_time(held.holder.pid()) })
    };
    for _ in 0..REPETITIONS {
        let before: Vec<_> = all.iter().map(read).collect();
        let start = Instant::now();
        // In a third of the ttl everything is renewed once.
        tokio::time::sleep(ttl / 3).await;
        let seconds = start.elapsed().as_secs_f64();
        for (held, before) in all.iter().zip(before) {
            let now = read(held);
            let (server, client) = (now.0 - before.0, now.1 - before.1);
            let row = section.row(&held.make);
            row.put("requests", Some(server.requests / seconds));
            row.put("server", Some(server.processor / seconds * 100.0));
            row.put("client", Some(client.processor / seconds * 100.0));
        }
    }
    for held in &all {
        let samples = (0..count).step_by(count / 100);
        let keys: Vec<_> =
            samples.map(|number| held.make.key_of(&format!("{}-{number}", held.key))).collect();
        let there =
            keys.iter().filter(|key| held.server.command(&["EXISTS", key.as_str()]) == "1").count();
        let row = section.row(&held.make);
        row.put("kept", Some(there as f64 / keys.len() as f64 * 100.0));
        if row.figures.get("requests").and_then(Figure::most) == Some(0.0) {
            row.note("**does not renew: what is held longer than its ttl is lost**");
        }
    }
    bench.end(section);
    Ok(())
}
