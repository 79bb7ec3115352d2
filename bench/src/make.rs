//! What is measured: locks of different makes behind one face.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

/// How long it may take to connect. One that hangs must not hold up the run.
const PATIENCE: Duration = Duration::from_secs(4);

/// A boxed future. Boxing costs some 50 ns a step, to every make alike.
pub(crate) type Fut<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What went well, or why not, in a line.
pub(crate) type Outcome<T> = Result<T, String>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Exclusive,
    Shared,
}

/// One task's way to one lock.
pub(crate) trait Lock: Send + Sync {
    /// Waits for the lock. Dropped half way, it may leave what its make leaves.
    fn acquire(&self, mode: Mode) -> Fut<'_, Outcome<Box<dyn Held>>>;
}

/// A lock that is held. Dropping it does what its make does.
pub(crate) trait Held: Send {
    /// Gives it back, and waits until the store has confirmed that.
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>>;
}

/// Makes locks: the way from a name to a [`Lock`]. The number tells tasks apart, for those that have a connection each.
pub(crate) trait Source: Send + Sync {
    fn lock(&self, key: &str, task: usize) -> Fut<'_, Outcome<Box<dyn Lock>>>;
}

/// One make of locks, set up in one way.
#[derive(Clone)]
pub(crate) struct Make {
    /// The crate.
    pub(crate) name: &'static str,
    /// How it is set up, where there is a choice.
    pub(crate) variant: &'static str,
    /// What must be known to read its figures.
    pub(crate) caveats: &'static [&'static str],
    /// Which requests its client sends. Those that scripts run in the server count among the server's commands, too.
    pub(crate) commands: &'static [&'static str],
    /// The Redis key of the holder, with `*` for the name.
    pub(crate) key: &'static str,
    /// Whether it asks again after pauses so long that it matters at which moment of one it is met.
    pub(crate) polls: bool,
    /// The most tasks it is run with.
    pub(crate) most_tasks: usize,
    /// The most locks that it can hold at once.
    pub(crate) most_held: usize,
    pub(crate) kind: Kind,
    pub(crate) source: Arc<dyn Source>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Ours.
    Ours,
    /// What a peer does if nothing is set.
    Peer,
    /// A peer that polls, with the shortest pause that makes sense.
    Tuned,
    /// What the bare driver can do.
    Raw,
}

impl Make {
    pub(crate) fn new(name: &'static str, kind: Kind, source: impl Source + 'static) -> Self {
        Self {
            name,
            variant: "",
            caveats: &[],
            commands: &[],
            key: "*",
            polls: false,
            most_tasks: usize::MAX,
            most_held: usize::MAX,
            kind,
            source: Arc::new(source),
        }
    }

    /// The same for one that has to be set up first. If it cannot be, that is what its rows say: a run goes on without it.
    pub(crate) async fn set_up<S: Source + 'static>(
        name: &'static str,
        kind: Kind,
        source: impl Future<Output = Outcome<S>>,
    ) -> Self {
        match timeout(PATIENCE, source).await {
            Ok(Ok(source)) => Self::new(name, kind, source),
            Ok(Err(error)) => Self::new(name, kind, Unavailable(error)),
            Err(_) => Self::new(name, kind, Unavailable(format!("not within {PATIENCE:?}"))),
        }
    }

    /// Its name and variant, as in tables.
    pub(crate) fn label(&self) -> String {
        if self.variant.is_empty() {
            self.name.to_owned()
        } else {
            format!("{}, {}", self.name, self.variant)
        }
    }

    /// Said where there are more tasks than it is run with.
    pub(crate) fn too_few(&self, tasks: usize) -> String {
        format!("not run with {tasks} tasks, but with up to {}", self.most_tasks)
    }

    /// The Redis key of the holder of a lock.
    pub(crate) fn key_of(&self, name: &str) -> String {
        self.key.replace('*', name)
    }

    pub(crate) async fn lock(&self, key: &str, task: usize) -> Outcome<Box<dyn Lock>> {
        let lock = timeout(PATIENCE, self.source.lock(key, task)).await;
        lock.unwrap_or_else(|_| Err(format!("no way to a lock within {PATIENCE:?}")))
    }

    /// So many ways to one lock, each for a task of its own.
    pub(crate) async fn locks(&self, key: &str, count: usize) -> Outcome<Vec<Box<dyn Lock>>> {
        let mut locks = Vec::with_capacity(count);
        for task in 0..count {
            locks.push(self.lock(key, task).await?);
        }
        Ok(locks)
    }

    /// So many locks, each with a task of its own.
    pub(crate) async fn many(&self, key: &str, count: usize) -> Outcome<Vec<Box<dyn Lock>>> {
        let mut locks = Vec::with_capacity(count);
        for task in 0..count {
            locks.push(self.lock(&format!("{key}-{task}"), task).await?);
        }
        Ok(locks)
    }
}

/// No locks, but the reason why.
struct Unavailable(String);

impl Source for Unavailable {
    fn lock(&self, _: &str, _: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        Box::pin(async { Err(format!("cannot be set up: {}", self.0)) })
    }
}

/// No locks: only a row of a table.
pub(crate) struct Nothing;

impl Source for Nothing {
    fn lock(&self, _: &str, _: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        Box::pin(async { Err("not to be had".into()) })
    }
}

/// An error as a line.
pub(crate) fn told(error: impl fmt::Display) -> String {
    error.to_string().lines().collect::<Vec<_>>().join(" ")
}

/// A name that no other part of this run has used: what one leaves behind is not in the way of the next.
pub(crate) fn fresh(what: &str) -> String {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    format!("{what}-{}", NUMBER.fetch_add(1, Ordering::Relaxed))
}
