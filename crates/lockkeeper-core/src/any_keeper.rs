//! Keepers of either kind, for what takes both.

use std::fmt;
use std::sync::Arc;

use crate::{Keeper, blocking};

/// A keeper, async or blocking, or a reference to one.
///
/// For what is used from code of both kinds: a blocking keeper works in async code as it is, and an async
/// one has a [blocking twin](blocking::Keeper::of).
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a keeper",
    label = "not a keeper",
    note = "a keeper is a `lockkeeper::Keeper` or a `lockkeeper::blocking::Keeper`, or a reference to one"
)]
pub trait AnyKeeper: fmt::Debug + Send + Sync {
    /// For async code.
    fn as_async(&self) -> &Keeper;

    /// For code that is not async.
    fn to_blocking(&self) -> blocking::Keeper;
}

impl AnyKeeper for Keeper {
    fn as_async(&self) -> &Keeper {
        self
    }

    fn to_blocking(&self) -> blocking::Keeper {
        blocking::Keeper::of(self)
    }
}

impl AnyKeeper for blocking::Keeper {
    fn as_async(&self) -> &Keeper {
        Self::as_async(self)
    }

    fn to_blocking(&self) -> blocking::Keeper {
        self.clone()
    }
}

macro_rules! through_a_pointer {
    ($($pointer:ty),*) => { $(
        impl<K: AnyKeeper + ?Sized> AnyKeeper for $pointer {
            fn as_async(&self) -> &Keeper {
                (**self).as_async()
            }

            fn to_blocking(&self) -> blocking::Keeper {
                (**self).to_blocking()
            }
        }
    )* };
}

through_a_pointer!(&K, &mut K, Arc<K>, Box<K>);
