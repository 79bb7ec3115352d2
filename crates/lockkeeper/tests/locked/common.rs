//! What these tests share.

use std::time::Duration;

use lockkeeper::{Error, ErrorKind, Keeper, Memory};
use lockkeeper_testkit::{Faults, Faulty};

/// An error of an application's own.
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
    /// What kind of error of ours it is.
    pub(crate) fn kind(&self) -> Option<ErrorKind> {
        match self {
            Self::Locking(error) => Some(error.kind()),
            Self::Declined => None,
        }
    }
}

/// A keeper, and one on the same store with the faults that are set.
pub(crate) fn faulty() -> (Keeper, Keeper, Faults) {
    let memory = Memory::new();
    let (store, faults) = Faulty::new(memory.clone());
    (bounded(Keeper::new(memory)), bounded(Keeper::new(store)), faults)
}

pub(crate) fn keeper() -> Keeper {
    bounded(Keeper::new(Memory::new()))
}

/// Whoever would wait for ever, does so for half a minute.
fn bounded(keeper: Keeper) -> Keeper {
    keeper.max_wait(Duration::from_secs(30))
}

/// Whether nobody holds a lock or waits for it.
pub(crate) async fn is_free(keeper: &Keeper, name: &str) -> bool {
    keeper.mutex(name).try_lock().await.unwrap().is_some()
}

/// The names that are held.
pub(crate) async fn held(keeper: &Keeper) -> Vec<String> {
    let locks = keeper.inspect().unwrap().list("").await.unwrap();
    locks.iter().filter(|lock| !lock.holders.is_empty()).map(|lock| lock.name.to_string()).collect()
}
