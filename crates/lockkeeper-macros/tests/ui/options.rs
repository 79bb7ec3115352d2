use lockkeeper::{Result, locked};

#[locked]
async fn no_key() -> Result<()> {
    Ok(())
}

#[locked(key = "a", timeout = "5s")]
async fn unknown_option() -> Result<()> {
    Ok(())
}

#[locked(key = "a", wait = "5 seconds")]
async fn not_a_duration() -> Result<()> {
    Ok(())
}

#[locked(key = "a", mode = "shared", permits = 4)]
async fn lock_or_semaphore() -> Result<()> {
    Ok(())
}

#[locked(key = "a", keeper = "self.")]
async fn not_an_expression() -> Result<()> {
    Ok(())
}

fn main() {}
