use std::pin::Pin;

use lockkeeper::{Result, locked};

#[locked(key = "a")]
const fn constant() -> Result<()> {
    Ok(())
}

#[locked(key = "a")]
unsafe fn dangerous() -> Result<()> {
    Ok(())
}

#[locked(key = "a")]
async fn returns_nothing() {}

#[locked(key = "a")]
fn returns_a_future() -> impl Future<Output = Result<()>> {
    async { Ok(()) }
}

#[locked(key = "a")]
fn returns_a_boxed_future() -> Pin<Box<dyn Future<Output = Result<()>> + Send>> {
    Box::pin(async { Ok(()) })
}

#[locked(key = "a")]
struct NotAFunction;

fn main() {}
