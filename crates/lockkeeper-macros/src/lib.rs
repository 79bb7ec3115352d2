//! The attribute `#[locked]`. Users import it from the `lockkeeper` crate, with the feature `macros`.

mod expand;
mod options;
mod template;

use proc_macro::TokenStream;

/// Runs a function under a lock whose name is built from its arguments.
///
/// The lock is acquired before the body runs and released before the function returns, also after `?`, `return`
/// or a panic. If the future is dropped, the lock is released in the background. An async body runs inside
/// [`while_held`]: if the lock is lost, the body is dropped and the caller gets an error of the kind `Lost`.
///
/// The attribute applies to functions and methods, async or not. The function must return a `Result` whose error
/// implements `From<lockkeeper::Error>`, which reports a failed acquire or a lost lock. An error that the body
/// returns is never replaced, even if the lock was lost. A failed release is only logged.
///
/// [`while_held`]: https://docs.rs/lockkeeper/latest/lockkeeper/struct.Guard.html#method.while_held
///
/// # Options
///
/// | option | meaning | default |
/// |---|---|---|
/// | `key = "order:{order_id}"` | the name of the lock | required |
/// | `keeper = "self.keeper"` | an expression: a keeper, a reference to one, or an `Arc` of one | the keeper passed to `lockkeeper::install` |
/// | `mode = "shared"` | `"shared"` for a reader, `"exclusive"` for a writer | `"exclusive"` |
/// | `permits = 4` | acquires one permit of a semaphore with this many, instead of a lock | a lock |
/// | `wait = "2s"` | how long to wait for other holders; `"0s"` makes one attempt | the keeper's `max_wait` |
/// | `ttl = "15s"` | how long the lock lasts in the store without renewal | the keeper's `ttl` |
/// | `reentrant` | within a `lockkeeper::scope`, shares a lock that an outer function holds | a nested call excludes itself |
///
/// Durations are written as `500ms`, `30s`, `5m`, `1h30m`, `2d`.
///
/// # The key
///
/// `{argument}` and `{argument.field}` insert an argument or its field, formatted with `Display`. Arguments include
/// names bound in patterns, and `{self.field}` inserts a field of the receiver. `{{` and `}}` are literal braces.
/// Other expressions are not supported; compute them in a function that calls this one. An unknown name does not
/// compile. A common prefix belongs to the keeper, not to the key.
///
/// Two calls exclude each other if and only if their formatted keys are equal. Separate adjacent arguments with a
/// character that they cannot contain: `"{a}{b}"` is the same key for 1 and 23 as for 12 and 3.
///
/// # Functions that are not async
///
/// They block the calling thread, which may be any thread. They cannot be cancelled when the lock is lost: they run
/// to their end, and then the caller gets the error. If they are called on threads of an async runtime, use a keeper from
/// `lockkeeper::blocking::open`: the store of another keeper may depend on that runtime.
///
/// # What it does not do
///
/// - It does not support `const` or `unsafe` functions, or functions that return a future.
/// - The result is kept while the lock is released. The function's future is `Send` only if both the body's future and
///   the result are.
/// - Arguments that the body does not use are dropped after the lock is released.
///
/// # Examples
///
/// ```
/// use lockkeeper::{ErrorKind, Keeper, locked};
///
/// #[derive(Debug)]
/// enum AppError {
///     Locking(lockkeeper::Error),
/// }
///
/// impl From<lockkeeper::Error> for AppError {
///     fn from(error: lockkeeper::Error) -> Self {
///         Self::Locking(error)
///     }
/// }
///
/// struct Shop {
///     keeper: Keeper,
/// }
///
/// impl Shop {
///     #[locked(key = "order:{order_id}", keeper = "self.keeper", ttl = "15s", wait = "0s")]
///     async fn pay(&self, order_id: &str, cents: u64) -> Result<u64, AppError> {
///         Ok(cents) // no other call pays this order at the same time
///     }
/// }
///
/// # fn main() {
/// # let runtime = lockkeeper::blocking::block_on(async {
/// let shop = Shop { keeper: Keeper::new(lockkeeper::Memory::new()) };
/// assert_eq!(shop.pay("42", 100).await.unwrap(), 100);
///
/// let _held = shop.keeper.mutex("order:42").lock().await.unwrap();
/// let AppError::Locking(error) = shop.pay("42", 100).await.unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::TimedOut); // the lock is held, and "0s" does not wait
/// # });
/// # }
/// ```
#[proc_macro_attribute]
pub fn locked(options: TokenStream, item: TokenStream) -> TokenStream {
    expand::locked(options.into(), &item.into()).into()
}
