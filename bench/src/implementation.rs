//! A common interface to the lock implementations that are compared.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

/// The timeout for connecting. An implementation that hangs must not block the run.
const SETUP_TIMEOUT: Duration = Duration::from_secs(4);

/// A boxed future. Boxing costs about 50 ns per call, for every implementation alike.
pub(crate) type Fut<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A result whose error is a single line of text.
pub(crate) type Outcome<T> = Result<T, String>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Exclusive,
    Shared,
}

/// A handle of one task to one lock.
pub(crate) trait Lock: Send + Sync {
    /// Waits for the lock. If the future is dropped, the implementation decides whether it leaks the lock or a queue entry.
    fn acquire(&self, mode: Mode) -> Fut<'_, Outcome<Box<dyn Held>>>;
}

/// A held lock. Dropping it drops the guard of the implementation.
pub(crate) trait Held: Send {
    /// Releases the lock and waits until the store has confirmed it.
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>>;
}

/// Creates lock handles. The task number distinguishes tasks, for implementations with a connection per task.
pub(crate) trait LockFactory: Send + Sync {
    fn lock(&self, key: &str, task: usize) -> Fut<'_, Outcome<Box<dyn Lock>>>;
}

/// A lock implementation with one configuration.
#[derive(Clone)]
pub(crate) struct Implementation {
    /// The name of the crate.
    pub(crate) name: &'static str,
    /// The configuration, where several are measured.
    pub(crate) variant: &'static str,
    /// Caveats shown next to its figures.
    pub(crate) caveats: &'static [&'static str],
    /// The Redis commands that its client sends. Commands called by scripts appear in the server's statistics too, and are not listed here.
    pub(crate) commands: &'static [&'static str],
    /// The Redis key of the holder, with `*` for the name.
    pub(crate) key: &'static str,
    /// Whether it polls at intervals so long that a measurement depends on its phase within one.
    pub(crate) polls: bool,
    /// The maximum number of tasks it is run with.
    pub(crate) max_tasks: usize,
    /// The maximum number of locks that it can hold at once.
    pub(crate) max_held: usize,
    pub(crate) kind: Kind,
    pub(crate) factory: Arc<dyn LockFactory>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Lockkeeper.
    Ours,
    /// A peer with its defaults.
    Peer,
    /// A peer that polls, with the shortest interval that is sensible.
    Tuned,
    /// The plain recipe on the bare driver.
    Raw,
}

impl Implementation {
    pub(crate) fn new(name: &'static str, kind: Kind, factory: impl LockFactory + 'static) -> Self {
        Self {
            name,
            variant: "",
            caveats: &[],
            commands: &[],
            key: "*",
            polls: false,
            max_tasks: usize::MAX,
            max_held: usize::MAX,
            kind,
            factory: Arc::new(factory),
        }
    }

    /// Creates an implementation that needs a setup. If the setup fails, the run continues and the rows of the implementation show the error.
    pub(crate) async fn set_up<S: LockFactory + 'static>(
        name: &'static str,
        kind: Kind,
        factory: impl Future<Output = Outcome<S>>,
    ) -> Self {
        match timeout(SETUP_TIMEOUT, factory).await {
            Ok(Ok(factory)) => Self::new(name, kind, factory),
            Ok(Err(error)) => Self::new(name, kind, Unavailable(error)),
            Err(_) => {
                Self::new(name, kind, Unavailable(format!("no answer within {SETUP_TIMEOUT:?}")))
            }
        }
    }

    /// Returns the name and variant, as shown in tables.
    pub(crate) fn label(&self) -> String {
        if self.variant.is_empty() {
            self.name.to_owned()
        } else {
            format!("{}, {}", self.name, self.variant)
        }
    }

    /// Returns the note for a row that is not measured because of the number of tasks.
    pub(crate) fn too_many_tasks(&self, tasks: usize) -> String {
        format!("not run with {tasks} tasks, but with up to {}", self.max_tasks)
    }

    /// Returns the Redis key of the holder of a lock.
    pub(crate) fn key_of(&self, name: &str) -> String {
        self.key.replace('*', name)
    }

    pub(crate) async fn lock(&self, key: &str, task: usize) -> Outcome<Box<dyn Lock>> {
        let lock = timeout(SETUP_TIMEOUT, self.factory.lock(key, task)).await;
        lock.unwrap_or_else(|_| Err(format!("no lock handle within {SETUP_TIMEOUT:?}")))
    }

    /// Returns `count` handles to one lock, one per task.
    pub(crate) async fn locks_on_one_key(
        &self,
        key: &str,
        count: usize,
    ) -> Outcome<Vec<Box<dyn Lock>>> {
        let mut locks = Vec::with_capacity(count);
        for task in 0..count {
            locks.push(self.lock(key, task).await?);
        }
        Ok(locks)
    }

    /// Returns handles to `count` different locks, one per task.
    pub(crate) async fn locks_on_own_keys(
        &self,
        key: &str,
        count: usize,
    ) -> Outcome<Vec<Box<dyn Lock>>> {
        let mut locks = Vec::with_capacity(count);
        for task in 0..count {
            locks.push(self.lock(&format!("{key}-{task}"), task).await?);
        }
        Ok(locks)
    }
}

/// An implementation whose setup failed, with the error.
struct Unavailable(String);

impl LockFactory for Unavailable {
    fn lock(&self, _: &str, _: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        Box::pin(async { Err(format!("setup failed: {}", self.0)) })
    }
}

/// An implementation without locks, for rows that are measured otherwise.
pub(crate) struct NoLocks;

impl LockFactory for NoLocks {
    fn lock(&self, _: &str, _: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        Box::pin(async { Err("has no locks".into()) })
    }
}

/// Formats an error as a single line.
pub(crate) fn one_line(error: impl fmt::Display) -> String {
    error.to_string().lines().collect::<Vec<_>>().join(" ")
}

/// Returns a name that is used once per run, so that leftovers of one slice do not affect the next.
pub(crate) fn unique_name(prefix: &str) -> String {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    format!("{prefix}-{}", NUMBER.fetch_add(1, Ordering::Relaxed))
}
