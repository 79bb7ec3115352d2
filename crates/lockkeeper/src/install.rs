//! The process-wide keeper, for `#[locked]` functions that name none.

use std::sync::OnceLock;

use lockkeeper_core::{Error, ErrorKind, Keeper, Result};

static INSTALLED: OnceLock<Keeper> = OnceLock::new();

/// Sets the process-wide keeper of [`#[locked]`](crate::locked) functions that have no `keeper = "…"`.
///
/// A program calls it once, in `main`. A library should take a keeper as an argument instead, and name it in the
/// attribute.
///
/// The keeper serves async and blocking functions. If blocking functions are called on threads of an async runtime, use
/// a keeper from [`blocking::open`](crate::blocking::open), which does not depend on that runtime.
///
/// # Errors
///
/// [`Config`](ErrorKind::Config) if a keeper is installed already. It stays installed.
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
        let message =
            "a keeper is installed already: call lockkeeper::install once, when the program starts";
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
