//! The current leader of an election, and changes of the leader.

use crate::blocking_runtime::block_on;
use crate::contract::Kind;
use crate::error::{Error, Result};
use crate::fence::Fence;
use crate::locks::inspect::Inspect;
use crate::name::{Label, Name};
use crate::owner::Owner;

/// The leader of an election, as recorded in the store. Fields that the store does not record are `None`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Leader {
    /// A human-readable name of the leader.
    pub label: Option<Label>,
    /// The id of this leadership.
    pub owner: Option<Owner>,
    /// The term.
    pub term: Option<Fence>,
}

impl Leader {
    /// Returns the label, or `(unknown)` without one.
    pub fn who(&self) -> &str {
        Label::or_unknown(self.label.as_ref())
    }

    /// Reads the leader from the store: the holder of the election's lock.
    pub(super) async fn read(inspect: &Inspect, name: &Result<Name>) -> Result<Option<Self>> {
        let shown = inspect.show_name(name.as_ref().map_err(Error::clone)?).await?;
        let locks = shown.into_iter().filter(|info| info.kind == Kind::Lock);
        Ok(locks.flat_map(|info| info.holders).next().map(|holder| Self {
            label: holder.label,
            owner: holder.owner,
            term: holder.fence,
        }))
    }
}

/// A watch for changes of the leader. From [`Election::observe`](crate::Election::observe).
#[derive(Debug)]
pub struct Observe {
    pub(super) inspect: Inspect,
    /// The name of the election's lock.
    pub(super) name: Result<Name>,
    /// Whether a result has been returned, and the last one.
    pub(super) begun: bool,
    pub(super) last: Option<Leader>,
}

impl Observe {
    /// Returns the leader, or `None` if the election has none. The first call returns the current state. Later calls wait
    /// until it differs from the last result.
    ///
    /// The store is read when it notifies of a change, and once a second. A leader that is elected and resigns between two
    /// reads is not reported.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the store does not answer. A later call continues from the last
    /// result.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, no change is lost: the next call returns it.
    pub async fn next(&mut self) -> Result<Option<Leader>> {
        let Self { inspect, name, begun, last } = self;
        let leader = inspect
            .until(async || {
                let leader = Leader::read(inspect, name).await?;
                Ok((!*begun || *last != leader).then_some(leader))
            })
            .await?;
        (*begun, *last) = (true, leader.clone());
        Ok(leader)
    }

    /// Blocks until the leader differs from the last result. The [blocking](crate::blocking) form of
    /// [`next`](Self::next).
    ///
    /// # Errors
    ///
    /// Same as [`next`](Self::next).
    pub fn blocking_next(&mut self) -> Result<Option<Leader>> {
        block_on(self.next())
    }
}
