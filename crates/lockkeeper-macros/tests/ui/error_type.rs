use lockkeeper::{Keeper, locked};

struct AppError;

#[locked(key = "a", keeper = "keeper")]
async fn cannot_tell(keeper: &Keeper) -> Result<(), AppError> {
    Ok(())
}

#[locked(key = "a", keeper = "keeper", reentrant)]
fn cannot_tell_either(keeper: &Keeper) -> Result<(), AppError> {
    Ok(())
}

fn main() {}
