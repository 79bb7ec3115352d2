//! The keeper of the whole process, for `#[locked]` functions that name none.

use std::sync::OnceLock;

use lockkeeper_core::{Error, ErrorKind, Keeper, Result};

static INSTALLED: OnceLock<Keeper> = OnceLock::new();

/// Sets the keeper of [`#[locked]`](crate::locked) functions that have no `keeper = "…"`. Once, for the whole
/// process.
///
/// It serves async functions and those that are not. If the latter are called on threads of an async runtime, take a
/// keeper from [`blocking::open`](crate::blocking::open): it depends on no runtime but the blocking one.
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
pub fn install(keeper: Keeper) -> Result<()> {
    INSTALLED.set(keeper).map_err(|_| {
        let message = "a keeper is installed already: install one, once, when the program starts";
        Error::new(ErrorKind::Config, message)
    })
}

/// Returns the installed keeper.
pub fn installed() -> Result<&'static Keeper> {
    INSTALLED.get().ok_or_else(|| {
        let message = "no keeper is installed for #[locked]: call lockkeeper::install(keeper) when the \
                       program starts, or name one with keeper = \"…\"";
        Error::new(ErrorKind::Config, message)
    })
}
