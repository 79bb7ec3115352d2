//! A lock that ends with a transaction, with `diesel`.
//!
//! `cargo run -p lockkeeper-postgres-drivers --features diesel --example with_diesel`

use std::error::Error;

use diesel::connection::SimpleConnection;
use diesel::sql_types::{BigInt, Bool};
use diesel::{Connection, PgConnection, QueryableByName, RunQueryDsl, sql_query};
use lockkeeper_postgres::TransactionLock;
use lockkeeper_postgres_drivers::Shop;
// Links libpq.
use pq_sys as _;

#[derive(QueryableByName)]
struct Granted {
    #[diesel(sql_type = Bool, column_name = pg_try_advisory_xact_lock)]
    granted: bool,
}

fn main() -> Result<(), Box<dyn Error>> {
    let shop = Shop::open()?;
    let mut connection = PgConnection::establish(&shop.url())?;
    connection.batch_execute(Shop::TABLE)?;
    let lock = TransactionLock::new("orders/42");
    let key = lock.key().as_i64().expect("the key of a name is one number");

    // Waits until no other client has the lock.
    connection.transaction(|connection| {
        sql_query(lock.lock_sql()).bind::<BigInt, _>(key).execute(connection)?;
        assert!(shop.other_client_locks("orders/42")?.is_none());
        sql_query("UPDATE orders SET booked = true WHERE id = 42").execute(connection)?;
        Ok::<_, Box<dyn Error>>(())
    })?; // and the lock is free

    // Tries, while another client has the lock.
    let guard = shop.other_client_locks("orders/42")?.expect("the lock is free");
    connection.transaction(|connection| {
        let answer: Granted =
            sql_query(lock.try_lock_sql()).bind::<BigInt, _>(key).get_result(connection)?;
        assert!(!answer.granted);
        Ok::<_, Box<dyn Error>>(())
    })?;
    guard.blocking_release()?;
    Ok(())
}
