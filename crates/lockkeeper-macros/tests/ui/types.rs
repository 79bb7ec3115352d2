use lockkeeper::{Keeper, Result, locked};

struct NotDisplay;

struct Order {
    id: u64,
}

#[locked(key = "order:{order}", keeper = "keeper")]
async fn not_display(keeper: &Keeper, order: NotDisplay) -> Result<()> {
    Ok(())
}

#[locked(key = "order:{order.number}", keeper = "keeper")]
async fn no_such_field(keeper: &Keeper, order: Order) -> Result<()> {
    Ok(())
}

#[locked(key = "a", keeper = "url")]
async fn not_a_keeper(url: &str) -> Result<()> {
    Ok(())
}

#[locked(key = "a", keeper = "keeper")]
async fn not_a_result(keeper: &Keeper) -> Option<u64> {
    Some(1)
}

fn main() {}
