//! Fence registers in memory, and on a store that does not respond.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

use lockkeeper_core::{
    BoxFuture, ErrorKind, Fence, FenceCheck, FenceRegister, FenceStore, Name, Result,
};
use lockkeeper_testkit::fences::check_register;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_register_in_memory_passes_the_conformance_check() {
    let register = FenceRegister::in_memory();
    check_register(&[register.clone(), register]).await;
}

#[tokio::test]
async fn two_registers_in_memory_are_independent() {
    let (one, other) = (FenceRegister::in_memory(), FenceRegister::in_memory());
    assert!(one.check("a", Fence::MAX).await.unwrap().is_passed());
    assert!(other.check("a", Fence::new(1).unwrap()).await.unwrap().is_passed());
}

/// A store that never responds.
#[derive(Debug)]
struct Silent;

impl FenceStore for Silent {
    fn name(&self) -> &'static str {
        "silent"
    }

    fn check(&self, _: &Name, _: Fence) -> BoxFuture<'_, Result<FenceCheck>> {
        Box::pin(std::future::pending())
    }
}

#[tokio::test(start_paused = true)]
async fn a_check_on_a_hung_store_times_out() {
    let error = FenceRegister::new(Silent).check("a", Fence::MAX).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let expected =
        "silent: check the fence of \"a\": no answer from the store within 10.0s".to_owned();
    assert_eq!(error.to_string(), expected);
}
