//! The way to the lock.

use std::pin::pin;
use std::time::{Duration, Instant};

use lockkeeper::{Guard, Keeper, Kind};

use crate::args;
use crate::failure::{CONFLICT, Failure};
use crate::output::span;
use crate::report::{Reporter, Sight};

/// How long a look at the holders may take: it is for showing only.
const LOOK: Duration = Duration::from_secs(2);
/// How often the live line changes.
const REDRAW: Duration = Duration::from_secs(1);

/// A lock that is to be had.
pub(crate) struct Wanted<'a> {
    keeper: Keeper,
    lock: &'a args::Lock,
}

impl<'a> Wanted<'a> {
    pub(crate) fn new(keeper: &Keeper, lock: &'a args::Lock) -> Self {
        let mut keeper = keeper.clone().ttl(lock.ttl);
        if let Some(label) = &lock.label {
            keeper = keeper.label(label.as_str());
        }
        Self { keeper, lock }
    }

    /// Acquires, and tells of waiting once it is known that others hold it.
    pub(crate) async fn acquire(&self, reporter: &mut Reporter) -> Result<Guard, Failure> {
        let start = Instant::now();
        if let Some(guard) = self.ask(Some(Duration::ZERO)).await? {
            reporter.acquired(&guard, start.elapsed());
            return Ok(guard);
        }
        let left = self.lock.patience().map(|wait| wait.saturating_sub(start.elapsed()));
        if left == Some(Duration::ZERO) {
            return Err(self.conflict().await);
        }
        let mut asking = pin!(self.ask(left));
        let mut looking = pin!(self.look(Duration::ZERO));
        loop {
            tokio::select! {
                biased;
                asked = &mut asking => {
                    let Some(guard) = asked? else { return Err(self.conflict().await) };
                    reporter.acquired(&guard, start.elapsed());
                    return Ok(guard);
                }
                sight = &mut looking => {
                    reporter.waiting(&sight, start.elapsed());
                    // Plain lines are told once; it may come to the foreground, though, and live.
                    looking.set(self.look(REDRAW));
                }
            }
        }
    }

    /// Asks once, or waits; `None` if others have it.
    async fn ask(&self, wait: Option<Duration>) -> lockkeeper::Result<Option<Guard>> {
        let name = self.lock.name.as_str();
        match (self.lock.shared, self.lock.permits, wait) {
            (true, _, Some(wait)) => self.keeper.rw_lock(name).try_read_for(wait).await,
            (true, _, None) => self.keeper.rw_lock(name).read().await.map(Some),
            (_, Some(of), Some(wait)) => {
                self.keeper.semaphore(name, of).try_acquire_for(wait).await
            }
            (_, Some(of), None) => self.keeper.semaphore(name, of).acquire().await.map(Some),
            (_, None, Some(wait)) => self.keeper.mutex(name).try_lock_for(wait).await,
            (_, None, None) => self.keeper.mutex(name).lock().await.map(Some),
        }
    }

    /// Who holds it, after a pause.
    async fn look(&self, pause: Duration) -> Sight {
        tokio::time::sleep(pause).await;
        let kind = if self.lock.permits.is_some() { Kind::Semaphore } else { Kind::Lock };
        let infos = match self.keeper.inspect() {
            Ok(inspect) => {
                let shown = inspect.show(self.lock.name.as_str());
                tokio::time::timeout(LOOK, shown).await.ok().and_then(Result::ok)
            }
            Err(_) => None,
        };
        // One acquire at a time: whoever waits here is us.
        Sight::new(infos.unwrap_or_default(), kind, &self.keeper.waiting())
    }

    async fn conflict(&self) -> Failure {
        let within = match self.lock.patience() {
            None | Some(Duration::ZERO) => String::new(),
            Some(wait) => format!(" within {}", span(wait)),
        };
        let message = format!(
            "{:?} not acquired{within}: {}",
            self.lock.name,
            self.look(Duration::ZERO).await.describe()
        );
        let code = self.lock.conflict_exit_code.unwrap_or(CONFLICT);
        Failure { code, kind: "conflict", message }
    }
}
