//! A lock that ends with a transaction, with the synchronous crate `postgres`.
//!
//! `cargo run -p lockkeeper-postgres-drivers --features postgres --example with_postgres`

use std::error::Error;

use lockkeeper_postgres::TransactionLock;
use lockkeeper_postgres_drivers::Shop;
use postgres::{Client, NoTls};

fn main() -> Result<(), Box<dyn Error>> {
    let shop = Shop::open()?;
    let mut client = Client::connect(&shop.url(), NoTls)?;
    client.batch_execute(Shop::TABLE)?;
    let lock = TransactionLock::new("orders/42");

    // Waits until no other client has the lock.
    let mut transaction = client.transaction()?;
    transaction.execute(&lock.lock_sql(), &[&lock.key().as_i64()])?;
    assert!(shop.other_client_locks("orders/42")?.is_none());
    transaction.execute("UPDATE orders SET booked = true WHERE id = 42", &[])?;
    transaction.commit()?; // and the lock is free

    // Tries, while another client has the lock.
    let guard = shop.other_client_locks("orders/42")?.expect("the lock is free");
    let mut transaction = client.transaction()?;
    let row = transaction.query_one(&lock.try_lock_sql(), &[&lock.key().as_i64()])?;
    assert!(!row.get::<_, bool>(0));
    guard.blocking_release()?;
    Ok(())
}
