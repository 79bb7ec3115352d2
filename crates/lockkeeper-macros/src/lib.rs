//! The attribute `#[locked]`. Users take it from the `lockkeeper` crate, with the feature `macros`.

mod arguments;
mod expand;
mod template;

use proc_macro::TokenStream;

/// Runs a function under a lock, whose name is made of its arguments.
///
/// The lock is acquired before the body and given back before the caller gets the result, whichever way the
/// body ends: by itself, with `?` or `return`, or by a panic. If the future is dropped, the lock is
/// given back at once, in the background. The body runs inside [`while_held`]: if the lock is lost, the body is
/// dropped at its next await and the caller gets an error of the kind `Lost`.
///
/// It takes functions and methods, async or not, with arguments of any form. The function returns a
/// `Result` whose error is `From<lockkeeper::Error>`: that is how the caller learns that the lock was
/// not to be had. An error of the body's own is never replaced: not if the lock is lost by then, and
/// not if it cannot be given back, which is logged.
///
/// [`while_held`]: https://docs.rs/lockkeeper/latest/lockkeeper/struct.Guard.html#method.while_held
///
/// # Options
///
/// | option | meaning | if not given |
/// |---|---|---|
/// | `key = "order:{order_id}"` | the name of the lock; must be there | |
/// | `keeper = "self.keeper"` | an expression: a keeper, a reference to one, or an `Arc` of one | the one that was given to `lockkeeper::install` |
/// | `mode = "shared"` | among readers, and not `"exclusive"` | `"exclusive"` |
/// | `permits = 4` | one of so many: a semaphore and not a lock | |
/// | `wait = "2s"` | how long to wait for other holders; `"0s"` is one attempt | as the keeper's `max_wait` |
/// | `ttl = "15s"` | how long the lock lasts in the store without renewal | as the keeper's `ttl` |
/// | `reentrant` | within a `lockkeeper::scope`, counts up on the same lock further out | excludes itself, too |
///
/// Durations are written as `500ms`, `30s`, `5m`, `1h30m`, `2d`.
///
/// # The key
///
/// `{argument}` and `{argument.field}` stand for arguments by name, also those bound inside of a pattern, and
/// `{self.field}` for the receiver's; `{{` and `}}` for braces. They are written with `Display`. There is
/// nothing more to it: compute what is more complicated in a function around this one. An unknown name does
/// not compile. A prefix is the keeper's business, not the key's.
///
/// Two calls with the same rendered key exclude each other, and no others. So put something between two
/// arguments that is not in them: `"{a}{b}"` is the same for 1 and 23 as for 12 and 3.
///
/// # Functions that are not async
///
/// They block their thread, and may be called on any. Nobody can stop them when the lock is lost: they run
/// to their end, and then the caller gets the error. Where they are
/// called on threads of an async runtime, take a keeper from `lockkeeper::blocking::open`: the store of another may need
/// that very runtime.
///
/// # What it does not do
///
/// - It does not take `const` or `unsafe` functions, nor those that return a future.
/// - The result is kept while the lock is given back: the future of the function is `Send` if the body's is
///   and the result is.
/// - What of the arguments the body does not use is dropped after the lock was given back.
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
///         Ok(cents) // nobody else pays this order meanwhile
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
/// assert_eq!(error.kind(), ErrorKind::TimedOut); // another holds it, and "0s" does not wait
/// # });
/// # }
/// ```
#[proc_macro_attribute]
pub fn locked(options: TokenStream, item: TokenStream) -> TokenStream {
    expand::locked(options.into(), &item.into()).into()
}
