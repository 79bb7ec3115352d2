//! Helpers for these tests.

use std::time::Duration;

use lockkeeper::{Error, ErrorKind, Keeper, Memory};
use lockkeeper_testkit::{Faults, Faulty};

/// An application's error type.
#[derive(Debug)]
pub(crate) enum AppError {
    Locking(Error),
    Declined,
}

impl From<Error> for AppError {
    fn from(error: Error) -> Self {
        Self::Locking(error)
    }
}

impl AppError {
    /// Returns the kind of a locking error.
    pub(crate) fn kind(&self) -> Option<ErrorKind> {
        match self {
            Self::Locking(error) => Some(error.kind()),
            Self::Declined => None,
        }
    }
}

/// Returns a healthy keeper, and one on the same store with fault injection.
pub(crate) fn faulty() -> (Keeper, Keeper, Faults) {
    let memory = Memory::new();
    let (store, faults) = Faulty::new(memory.clone());
    (bounded(Keeper::new(memory)), bounded(Keeper::new(store)), faults)
}

pub(crate) fn keeper() -> Keeper {
    bounded(Keeper::new(Memory::new()))
}

/// Limits waits, so that a test fails instead of hanging.
fn bounded(keeper: Keeper) -> Keeper {
    keeper.max_wait(Duration::from_secs(30))
}

/// Whether a lock has neither a holder nor a waiter.
pub(crate) async fn is_free(keeper: &Keeper, name: &str) -> bool {
    keeper.mutex(name).try_lock().await.unwrap().is_some()
}

/// Returns the names of held locks.
pub(crate) async fn held(keeper: &Keeper) -> Vec<String> {
    let locks = keeper.inspect().unwrap().list("").await.unwrap();
    locks.iter().filter(|lock| !lock.holders.is_empty()).map(|lock| lock.name.to_string()).collect()
}
