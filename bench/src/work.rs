//! The works: what each make has to do.

pub(crate) mod keys;
pub(crate) mod manners;
pub(crate) mod memory;
pub(crate) mod queue;
pub(crate) mod quiet;
pub(crate) mod quorum;
pub(crate) mod readers;
pub(crate) mod takeover;
pub(crate) mod uncontended;
pub(crate) mod wake;

use std::time::Duration;

use crate::make::{Fut, Held, Lock, Mode, Outcome};
use crate::slice::{self, Contend, Plan};

/// A lock that excludes nobody.
struct Broken;

impl Lock for Broken {
    fn acquire(&self, _: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async {
            tokio::task::yield_now().await;
            Ok(Box::new(Broken) as Box<dyn Held>)
        })
    }
}

impl Held for Broken {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async { Ok(()) })
    }
}

/// Sees first that a lock which is broken on purpose is found out: a referee that sees nothing would find all well.
pub(crate) async fn honest() -> Outcome<()> {
    let time = Duration::from_millis(20);
    for readers in [0, 95] {
        let locks = (0..8).map(|_| Box::new(Broken) as Box<dyn Lock>).collect();
        let plan = Plan { contend: Contend::One, readers, warm: time, time, meter: None };
        if slice::run(locks, plan).await.overlaps == 0 {
            return Err("the referee does not see a broken lock".into());
        }
    }
    Ok(())
}
