//! A lock that ends with a transaction, with `sqlx`.
//!
//! `cargo run -p lockkeeper-postgres-drivers --features sqlx --example with_sqlx`

use std::error::Error;

use lockkeeper_postgres::TransactionLock;
use lockkeeper_postgres_drivers::Shop;
use sqlx::{Connection, Executor, PgConnection};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let shop = Shop::open()?;
    let mut connection = PgConnection::connect(&shop.url()).await?;
    connection.execute(Shop::TABLE).await?;
    let lock = TransactionLock::new("orders/42");

    // Waits until no other client has the lock.
    let mut transaction = connection.begin().await?;
    sqlx::query(&lock.lock_sql()).bind(lock.key().as_i64()).execute(&mut *transaction).await?;
    assert!(shop.other_client_locks("orders/42")?.is_none());
    transaction.execute("UPDATE orders SET booked = true WHERE id = 42").await?;
    transaction.commit().await?; // and the lock is free

    // Tries, while another client has the lock.
    let guard = shop.other_client_locks("orders/42")?.expect("the lock is free");
    let mut transaction = connection.begin().await?;
    let sql = lock.try_lock_sql();
    let attempt = sqlx::query_scalar(&sql).bind(lock.key().as_i64());
    let granted: bool = attempt.fetch_one(&mut *transaction).await?;
    assert!(!granted);
    guard.release().await?;
    Ok(())
}
