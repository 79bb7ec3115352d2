use lockkeeper::{Keeper, Result, locked};

#[locked(key = "order:{ordre_id}", keeper = "keeper")]
async fn misspelt(keeper: &Keeper, order_id: u64) -> Result<()> {
    Ok(())
}

#[locked(key = "{self.id}")]
async fn without_a_receiver() -> Result<()> {
    Ok(())
}

#[locked(key = "{order.customer.id}")]
async fn too_deep(order: u64) -> Result<()> {
    Ok(())
}

#[locked(key = "{order_id:?}")]
fn with_a_format(order_id: u64) -> Result<()> {
    Ok(())
}

#[locked(key = "")]
async fn empty() -> Result<()> {
    Ok(())
}

fn main() {}
