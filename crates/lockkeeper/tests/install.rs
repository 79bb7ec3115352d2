//! The process-wide keeper. One test, because it can be installed only once per process.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

use std::time::Duration;

use lockkeeper::{ErrorKind, Keeper, Memory, Result, locked};
use lockkeeper_testkit::wait::soon;

#[locked(key = "order:{order_id}", wait = "0s")]
async fn pay(order_id: u64) -> Result<u64> {
    Ok(order_id)
}

#[locked(key = "order:{order_id}", wait = "0s")]
fn pay_blocking(order_id: u64) -> Result<u64> {
    Ok(order_id)
}

#[tokio::test]
async fn calls_fail_without_an_installed_keeper_and_a_second_keeper_is_rejected() {
    for error in [pay(42).await.unwrap_err(), pay_blocking(42).unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Config);
        let message = error.to_string();
        assert!(message.contains("call lockkeeper::install(keeper)"), "{message}");
    }

    let keeper = Keeper::new(Memory::new()).max_wait(Duration::from_secs(30));
    lockkeeper::install(keeper.clone()).unwrap();
    let error = lockkeeper::install(Keeper::new(Memory::new())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("installed already"), "{error}");

    assert_eq!(pay(42).await.unwrap(), 42);
    let guard = keeper.mutex("order:42").lock().await.unwrap();
    assert_eq!(
        pay(42).await.unwrap_err().kind(),
        ErrorKind::TimedOut,
        "the first keeper stays installed"
    );
    assert_eq!(pay(43).await.unwrap(), 43);
    let on_a_thread = || std::thread::spawn(|| pay_blocking(42));
    let error = on_a_thread().join().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(pay_blocking(42).unwrap_err().kind(), ErrorKind::TimedOut, "inside a runtime");
    guard.release().await.unwrap();
    assert_eq!(on_a_thread().join().unwrap().unwrap(), 42);
    assert_eq!(pay_blocking(42).unwrap(), 42, "inside a runtime");

    soon("the keeper closes", keeper.close()).await;
    assert_eq!(pay(42).await.unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(pay_blocking(42).unwrap_err().kind(), ErrorKind::Closed);
}
