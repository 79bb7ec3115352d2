//! Many readers and a few writers.

use crate::bench::{Bench, REPETITIONS, shuffled};
use crate::implementation::{Implementation, Outcome, unique_name};
use crate::report::{Better, Section};
use crate::slice::{self, Contention, SliceOptions};

/// The number of tasks.
pub(crate) const TASKS: usize = 32;

/// Measures readers and writers per second: 95 of 100 acquisitions read.
pub(crate) async fn run(
    bench: &mut Bench,
    section: Section,
    implementations: &[Implementation],
) -> Outcome<()> {
    let mut section = section
        .column("reads", "readers per second", Better::High)
        .column("writes", "writers per second", Better::Neither)
        .column("longest", "longest wait, ms", Better::Neither);
    bench.begin(&mut section).await?;
    for repetition in 0..REPETITIONS {
        for implementation in shuffled(implementations) {
            let row = section.row(implementation);
            let locks = implementation.locks_on_one_key(&unique_name("readers"), TASKS).await;
            let Some(locks) = row.ok_or_record(locks) else { continue };
            let (warm, time) = (bench.ms(80, 15), bench.ms(400, 40));
            let options = SliceOptions {
                contention: Contention::SharedLock,
                readers: 95,
                warm,
                time,
                meter: None,
            };
            let slice = slice::run(locks, options).await;
            let seconds = slice.took.as_secs_f64();
            row.record("reads", repetition, Some(slice.reads as f64 / seconds));
            row.record(
                "writes",
                repetition,
                Some((slice.total_acquisitions() - slice.reads) as f64 / seconds),
            );
            row.record("longest", repetition, Some(slice.longest.as_secs_f64() * 1e3));
            row.add_errors(&slice);
        }
    }
    bench.end(section);
    Ok(())
}
