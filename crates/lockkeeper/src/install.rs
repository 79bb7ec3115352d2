//! The keeper of the whole process, for `#[locked]` functions that name none.

use std::sync::OnceLock;

use lockkeeper_core::{AnyKeeper, Error, ErrorKind, Result, blocking};

static INSTALLED: OnceLock<Box<dyn AnyKeeper>> = OnceLock::new();

/// Sets the keeper of [`#[locked]`](crate::locked) functions that have no `keeper = "…"`. Once, for the whole
/// process.
///
/// Take a [`blocking::Keeper`](crate::blocking::Keeper) if functions that are not async may be called on
/// threads of an async runtime: it depends on no runtime but its own, and serves async functions as
/// well. A [`Keeper`](crate::Keeper) serves those that are not async, too, as long as the runtime that it was
/// opened in has a thread left to run on.
///
/// For a program, in its `main`. A library takes the keeper as an argument, and names it.
///
/// # Errors
///
/// [`Config`](ErrorKind::Config) if one is installed already. That one stays.
///
/// # Examples
///
/// ```standalone_crate
/// use lockkeeper::{Keeper, Memory, Result, locked};
///
/// #[locked(key = "order:{order_id}")]
/// async fn pay(order_id: u64) -> Result<u64> {
///     Ok(order_id)
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<()> {
/// lockkeeper::install(Keeper::new(Memory::new()))?;
/// assert_eq!(pay(42).await?, 42);
/// # Ok(())
/// # }
/// ```
pub fn install(keeper: impl AnyKeeper + 'static) -> Result<()> {
    INSTALLED.set(Box::new(keeper)).map_err(|_| {
        let message = "a keeper is installed already: install one, once, when the program starts";
        Error::new(ErrorKind::Config, message)
    })
}

/// The keeper for async functions.
pub fn installed() -> Result<&'static lockkeeper_core::Keeper> {
    any().map(AnyKeeper::as_async)
}

/// The keeper for functions that are not async.
pub fn installed_blocking() -> Result<blocking::Keeper> {
    any().map(AnyKeeper::to_blocking)
}

fn any() -> Result<&'static dyn AnyKeeper> {
    INSTALLED.get().map(|keeper| &**keeper).ok_or_else(|| {
        let message = "no keeper is installed for #[locked]: call lockkeeper::install(keeper) when the \
                       program starts, or name one with keeper = \"…\"";
        Error::new(ErrorKind::Config, message)
    })
}
