//! Acquiring the lock, with waiting messages.

use std::pin::pin;
use std::time::{Duration, Instant};

use lockkeeper::{Guard, Keeper, Kind};

use crate::args;
use crate::failure::{CONFLICT, Failure};
use crate::output::short_duration;
use crate::report::{Contention, Reporter};

/// The timeout for reading the holders of the lock. Only messages need them.
const INSPECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The interval at which the waiting line is redrawn.
const REDRAW_INTERVAL: Duration = Duration::from_secs(1);

/// The lock to acquire, as the options describe it.
pub(crate) struct LockRequest<'a> {
    keeper: Keeper,
    lock: &'a args::Lock,
}

impl<'a> LockRequest<'a> {
    pub(crate) fn new(keeper: &Keeper, lock: &'a args::Lock) -> Self {
        let mut keeper = keeper.clone().ttl(lock.ttl);
        if let Some(label) = &lock.label {
            keeper = keeper.label(label.as_str());
        }
        Self { keeper, lock }
    }

    /// Acquires the lock. Reports the wait if a first try was refused.
    pub(crate) async fn acquire(&self, reporter: &mut Reporter) -> Result<Guard, Failure> {
        let start = Instant::now();
        if let Some(guard) = self.attempt(Some(Duration::ZERO)).await? {
            reporter.acquired(&guard, start.elapsed());
            return Ok(guard);
        }
        let left = self.lock.max_wait().map(|wait| wait.saturating_sub(start.elapsed()));
        if left == Some(Duration::ZERO) {
            return Err(self.conflict().await);
        }
        let mut attempt = pin!(self.attempt(left));
        let mut inspection = pin!(self.contention(Duration::ZERO));
        loop {
            tokio::select! {
                biased;
                granted = &mut attempt => {
                    let Some(guard) = granted? else { return Err(self.conflict().await) };
                    reporter.acquired(&guard, start.elapsed());
                    return Ok(guard);
                }
                contention = &mut inspection => {
                    reporter.waiting(&contention, start.elapsed());
                    // Also without a live line: the process may move to the foreground and get one.
                    inspection.set(self.contention(REDRAW_INTERVAL));
                }
            }
        }
    }

    /// Acquires the lock within `wait`; `None` if it stays contended.
    async fn attempt(&self, wait: Option<Duration>) -> lockkeeper::Result<Option<Guard>> {
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

    /// Reads the holders and the queue position from the store, after a pause.
    async fn contention(&self, pause: Duration) -> Contention {
        tokio::time::sleep(pause).await;
        let kind = if self.lock.permits.is_some() { Kind::Semaphore } else { Kind::Lock };
        let infos = match self.keeper.inspect() {
            Ok(inspect) => {
                let shown = inspect.show(self.lock.name.as_str());
                tokio::time::timeout(INSPECT_TIMEOUT, shown).await.ok().and_then(Result::ok)
            }
            Err(_) => None,
        };
        // This process acquires one lock, so every waiter of this keeper belongs to it.
        Contention::new(infos.unwrap_or_default(), kind, &self.keeper.waiting())
    }

    async fn conflict(&self) -> Failure {
        let within = match self.lock.max_wait() {
            None | Some(Duration::ZERO) => String::new(),
            Some(wait) => format!(" within {}", short_duration(wait)),
        };
        let message = format!(
            "{:?} not acquired{within}: {}",
            self.lock.name,
            self.contention(Duration::ZERO).await.describe()
        );
        let code = self.lock.conflict_exit_code.unwrap_or(CONFLICT);
        Failure { code, kind: "conflict", message }
    }
}
