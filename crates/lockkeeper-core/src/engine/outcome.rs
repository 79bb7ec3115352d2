//! How an acquire and a hold end.

use std::task::Waker;
use std::time::Duration;

use crate::error::Error;

/// The outcome of an acquire.
#[derive(Debug)]
pub(crate) enum AcquireOutcome {
    Granted,
    /// The wait ended while other claims held the lock.
    NotAcquired {
        waited: Duration,
    },
    Failed(Error),
}

/// The requested end of a hold or of an acquire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Release it in the store.
    Release,
    /// The same, because the acquire or the guard was dropped.
    Drop,
    /// Leave it in the store, to be adopted.
    Detach,
}

/// Where an outcome comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reporter {
    /// The driver. If the waiting task itself polls the driver, it takes the outcome after that poll and need not be woken.
    Driver,
    /// Another task. The waiting task must be woken.
    Other,
}

/// An outcome, and the waker of the task that waits for it.
#[derive(Debug)]
pub(crate) struct OutcomeSlot<T> {
    outcome: Option<T>,
    waiter: Option<Waker>,
}

impl<T> OutcomeSlot<T> {
    pub(crate) const EMPTY: Self = Self { outcome: None, waiter: None };

    pub(crate) fn is_set(&self) -> bool {
        self.outcome.is_some()
    }

    /// Sets the outcome, unless one is set, and returns the waker to wake.
    pub(crate) fn set(&mut self, outcome: T) -> Option<Waker> {
        self.outcome.get_or_insert(outcome);
        self.waiter.take()
    }

    /// Takes the outcome. If there is none yet, registers the waker.
    pub(crate) fn take(&mut self, waker: &Waker) -> Option<T> {
        let outcome = self.outcome.take();
        if outcome.is_none() {
            self.waiter = Some(waker.clone());
        }
        outcome
    }

    pub(crate) fn waiter(&self) -> Option<Waker> {
        self.waiter.clone()
    }
}
