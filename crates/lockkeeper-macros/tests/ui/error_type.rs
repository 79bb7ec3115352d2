use lockkeeper::{Keeper, locked};

struct AppError;

#[locked(key = "a", keeper = "keeper")]
async fn without_conversion(keeper: &Keeper) -> Result<(), AppError> {
    Ok(())
}

#[locked(key = "a", keeper = "keeper", reentrant)]
fn without_conversion_blocking(keeper: &Keeper) -> Result<(), AppError> {
    Ok(())
}

fn main() {}
