//! Advisory keys, and how other programs lock them.

use lockkeeper_core::{ErrorKind, Keeper};
use lockkeeper_postgres::{AdvisoryKey, TransactionLock};

use crate::common::{client, holders_and_waiters, keeper, name, store};

/// A name from a user must not lock the key of another program or of another name.
#[tokio::test]
async fn a_name_that_spells_a_key_is_refused_unless_the_store_is_opened_for_keys() {
    let plain = keeper("");
    let key = AdvisoryKey::of(&name("victim"));
    let inspect = plain.inspect().unwrap();
    for text in [key.to_string(), AdvisoryKey::from_pair(-7, 42).to_string()] {
        let errors = [
            plain.mutex(text.clone()).try_lock().await.unwrap_err(),
            plain.rw_lock(text.clone()).try_read().await.unwrap_err(),
            inspect.show(text.clone()).await.unwrap_err(),
            inspect.break_lock(text.clone()).await.unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::InvalidName, "{error}");
            assert!(error.to_string().contains("foreign_keys=on"), "{error}");
        }
    }
    // A name that only resembles a key is a plain name.
    for text in ["pg:", "pg:042", "pg:+1", "pg:1,2,3", "PG:1", "pg:x"] {
        drop(plain.mutex(format!("{text}{}", name("-like"))).try_lock().await.unwrap().unwrap());
        let guard = plain.mutex(text).lock().await.unwrap();
        guard.release().await.unwrap();
    }
    let client = client().await;
    for keeper in [keeper("foreign_keys=on"), Keeper::new(store("").with_foreign_keys())] {
        let guard = keeper.mutex(key).try_lock().await.unwrap().unwrap();
        assert_eq!(holders_and_waiters(&client, key).await, (1, 0));
        guard.release().await.unwrap();
    }
    let off = keeper("foreign_keys=off").mutex(key).try_lock().await.unwrap_err();
    assert_eq!(off.kind(), ErrorKind::InvalidName, "{off}");
}

#[tokio::test]
async fn a_key_is_locked_as_other_programs_lock_it() {
    let keeper = keeper("foreign_keys=on");
    let client = client().await;
    let pid = i64::from(std::process::id());
    let keys = [
        (AdvisoryKey::from_i64(-pid), format!("{}::bigint", -pid)),
        (AdvisoryKey::from_i64(i64::MIN), format!("({})::bigint", i64::MIN)),
        (AdvisoryKey::from_pair(-7, std::process::id().cast_signed()), format!("-7, {pid}")),
        (AdvisoryKey::from_pair(i32::MAX, i32::MIN), format!("{}, {}", i32::MAX, i32::MIN)),
        // The .NET library packs "a" into the pair that a raw client locks here.
        (AdvisoryKey::dotnet("a"), format!("{}, {}", 0xc2ff_ffff_u32.cast_signed(), -1)),
        // The library parses 16 hexadecimal digits as one number.
        (AdvisoryKey::dotnet("00000000000000ff"), "255::bigint".to_owned()),
        // It hashes other names.
        (AdvisoryKey::dotnet("0123456789"), format!("{}::bigint", 0x20cd_9dcd_17ec_ac87_i64)),
    ];
    for (key, raw) in keys {
        let guard = keeper.mutex(key).lock().await.unwrap();
        assert_eq!(holders_and_waiters(&client, key).await, (1, 0), "{key}");
        let tried = client.query_one(&format!("SELECT pg_try_advisory_lock({raw})"), &[]).await;
        assert!(!tried.unwrap().get::<_, bool>(0), "{key} does not exclude {raw}");
        guard.release().await.unwrap();
        let tried = client.query_one(&format!("SELECT pg_try_advisory_lock({raw})"), &[]).await;
        assert!(tried.unwrap().get::<_, bool>(0), "{key} is still locked");
        assert!(
            keeper.mutex(key).try_lock().await.unwrap().is_none(),
            "{raw} does not exclude {key}"
        );
        client.batch_execute(&format!("SELECT pg_advisory_unlock({raw})")).await.unwrap();
    }
}

#[tokio::test]
async fn keys_of_two_numbers_support_readers_and_downgrades() {
    let keeper = keeper("foreign_keys=on");
    for name in
        [AdvisoryKey::from_pair(11, std::process::id().cast_signed()).to_string(), name("rw")]
    {
        let lock = keeper.rw_lock(name.clone());
        let writer = lock.write().await.unwrap();
        writer.downgrade().await.unwrap();
        writer.downgrade().await.unwrap();
        let reader = lock.try_read().await.unwrap().expect("readers share");
        assert!(lock.try_write().await.unwrap().is_none());
        writer.release().await.unwrap();
        reader.release().await.unwrap();
        assert!(lock.try_write().await.unwrap().is_some(), "a lock was left");
    }
}

#[tokio::test]
async fn a_transaction_lock_of_a_name_excludes_the_mutex_of_that_name() {
    let keeper = keeper("");
    let (name, mut client) = (name("same"), client().await);
    let guard = keeper.mutex(name.clone()).lock().await.unwrap();
    let transaction = client.transaction().await.unwrap();
    assert!(!TransactionLock::new(&name).try_lock(&transaction).await.unwrap());
    guard.release().await.unwrap();
    assert!(
        TransactionLock::from_key(AdvisoryKey::of(&name)).try_lock(&transaction).await.unwrap()
    );
    assert!(keeper.mutex(name).try_lock().await.unwrap().is_none());
    transaction.commit().await.unwrap();
}
