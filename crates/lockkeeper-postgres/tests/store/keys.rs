//! Keys, as other programs see them.

use lockkeeper_postgres::{Key, TransactionLock};

use crate::kit::{client, holders_and_waiters, keeper, name};

#[tokio::test]
async fn a_key_is_locked_as_other_programs_lock_it() {
    let keeper = keeper("");
    let client = client().await;
    let pid = i64::from(std::process::id());
    let keys = [
        (Key::from_i64(-pid), format!("{}::bigint", -pid)),
        (Key::from_i64(i64::MIN), format!("({})::bigint", i64::MIN)),
        (Key::from_pair(-7, std::process::id().cast_signed()), format!("-7, {pid}")),
        (Key::from_pair(i32::MAX, i32::MIN), format!("{}, {}", i32::MAX, i32::MIN)),
        // The .NET library packs "a" into the pair that a raw client locks here.
        (Key::dotnet("a"), format!("{}, {}", 0xc2ff_ffff_u32.cast_signed(), -1)),
        // It takes 16 hexadecimal digits for one number.
        (Key::dotnet("00000000000000ff"), "255::bigint".to_owned()),
        // And it hashes the rest.
        (Key::dotnet("0123456789"), format!("{}::bigint", 0x20cd_9dcd_17ec_ac87_i64)),
    ];
    for (key, raw) in keys {
        let guard = keeper.mutex(key).lock().await.unwrap();
        assert_eq!(holders_and_waiters(&client, key).await, (1, 0), "{key}");
        let tried = client.query_one(&format!("SELECT pg_try_advisory_lock({raw})"), &[]).await;
        assert!(!tried.unwrap().get::<_, bool>(0), "{key} does not exclude {raw}");
        guard.release().await.unwrap();
        let tried = client.query_one(&format!("SELECT pg_try_advisory_lock({raw})"), &[]).await;
        assert!(tried.unwrap().get::<_, bool>(0), "{key} is still locked");
        assert!(keeper.mutex(key).try_lock().await.unwrap().is_none(), "{raw} excludes not {key}");
        client.batch_execute(&format!("SELECT pg_advisory_unlock({raw})")).await.unwrap();
    }
}

#[tokio::test]
async fn readers_and_downgrades_of_a_pair_work_as_those_of_a_name() {
    let keeper = keeper("");
    for name in [Key::from_pair(11, std::process::id().cast_signed()).to_string(), name("rw")] {
        let lock = keeper.rw_lock(name.clone());
        let writer = lock.write().await.unwrap();
        writer.downgrade().await.unwrap();
        writer.downgrade().await.unwrap();
        let reader = lock.try_read().await.unwrap().expect("readers share");
        assert!(lock.try_write().await.unwrap().is_none());
        writer.release().await.unwrap();
        reader.release().await.unwrap();
        assert!(lock.try_write().await.unwrap().is_some(), "all of it was given back");
    }
}

#[tokio::test]
async fn a_name_is_the_same_key_in_a_transaction() {
    let keeper = keeper("");
    let (name, mut client) = (name("same"), client().await);
    let guard = keeper.mutex(name.clone()).lock().await.unwrap();
    let transaction = client.transaction().await.unwrap();
    assert!(!TransactionLock::new(&name).try_lock(&transaction).await.unwrap());
    guard.release().await.unwrap();
    assert!(TransactionLock::from_key(Key::of(&name)).try_lock(&transaction).await.unwrap());
    assert!(keeper.mutex(name).try_lock().await.unwrap().is_none());
    transaction.commit().await.unwrap();
}
