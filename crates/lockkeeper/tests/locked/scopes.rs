//! `#[locked(reentrant)]`, within a scope and without.

use std::sync::atomic::{AtomicUsize, Ordering};

use lockkeeper::{ErrorKind, Fence, Keeper, Result, locked, scope};
use lockkeeper_testkit::wait::soon;

use crate::common::{held, is_free, keeper};

#[locked(key = "account:{account}", keeper = "keeper", wait = "0s", reentrant)]
async fn debit(keeper: &Keeper, account: u32) -> Result<Option<Fence>> {
    let shown = keeper.inspect()?.show(format!("account:{account}")).await?;
    assert_eq!(shown[0].holders.len(), 1);
    Ok(shown[0].holders[0].fence)
}

#[locked(key = "account:{account}", keeper = "keeper", wait = "0s", reentrant)]
async fn transfer(keeper: &Keeper, account: u32) -> Result<[Option<Fence>; 2]> {
    let first = debit(keeper, account).await?;
    assert_eq!(held(keeper).await.len(), 1, "the inner call releases nothing");
    Ok([first, debit(keeper, account).await?])
}

#[tokio::test]
async fn in_a_scope_nested_calls_share_the_hold_and_the_outermost_releases_it() {
    let keeper = keeper();
    let [first, second] = scope(transfer(&keeper, 1)).await.unwrap();
    assert!(first.is_some());
    assert_eq!(first, second);
    assert!(is_free(&keeper, "account:1").await);
}

#[tokio::test]
async fn without_a_scope_there_is_no_re_entrancy() {
    let error = transfer(&keeper(), 1).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
}

#[locked(key = "account:{account}", keeper = "keeper", wait = "0s")]
async fn plain(keeper: &Keeper, account: u32) -> Result<Option<Fence>> {
    debit(keeper, account).await
}

#[tokio::test]
async fn a_plain_function_excludes_re_entrant_ones() {
    let keeper = keeper();
    let error = scope(plain(&keeper, 1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    let error = scope(async {
        let _guard = keeper.lock_scoped("account:1").await?;
        plain(&keeper, 1).await
    });
    assert_eq!(error.await.unwrap_err().kind(), ErrorKind::TimedOut);
}

#[tokio::test]
async fn a_re_entrant_function_shares_the_hold_of_a_scoped_guard() {
    let keeper = keeper();
    scope(async {
        let guard = keeper.lock_scoped("account:1").await.unwrap();
        assert_eq!(debit(&keeper, 1).await.unwrap(), guard.fence());
        assert!(guard.is_held());
        assert!(guard.release().await.unwrap().is_some());
        assert!(is_free(&keeper, "account:1").await);
    })
    .await;
}

#[locked(key = "side", keeper = "keeper", reentrant)]
async fn side_by_side(keeper: &Keeper, inside: &AtomicUsize) -> Result<()> {
    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders at a time");
    again(keeper).await?;
    tokio::task::yield_now().await;
    inside.fetch_sub(1, Ordering::SeqCst);
    Ok(())
}

#[locked(key = "side", keeper = "keeper", reentrant)]
async fn again(keeper: &Keeper) -> Result<()> {
    assert_eq!(held(keeper).await, ["side"]);
    tokio::task::yield_now().await;
    Ok(())
}

#[tokio::test]
async fn branches_of_one_scope_exclude_each_other() {
    let (keeper, inside) = (keeper(), AtomicUsize::new(0));
    let branches = scope(async {
        let one = side_by_side(&keeper, &inside);
        let two = side_by_side(&keeper, &inside);
        let three = async {
            tokio::task::yield_now().await;
            side_by_side(&keeper, &inside).await
        };
        tokio::join!(one, two, three)
    });
    let (one, two, three) = soon("the branches", branches).await;
    one.and(two).and(three).unwrap();
    assert!(is_free(&keeper, "side").await);
}

#[tokio::test]
async fn branches_share_a_lock_acquired_before_they_start() {
    let keeper = keeper();
    scope(async {
        let guard = keeper.lock_scoped("side").await.unwrap();
        let (one, two) = tokio::join!(again(&keeper), again(&keeper));
        one.and(two).unwrap();
        drop(guard);
    })
    .await;
    assert!(is_free(&keeper, "side").await);
}

#[locked(key = "m", keeper = "keeper", mode = "shared", wait = "0s", reentrant)]
async fn read(keeper: &Keeper, then_write: bool) -> Result<()> {
    if then_write { Box::pin(write(keeper, false)).await } else { Ok(()) }
}

#[locked(key = "m", keeper = "keeper", wait = "0s", reentrant)]
async fn write(keeper: &Keeper, then_read: bool) -> Result<()> {
    if then_read { read(keeper, false).await } else { Ok(()) }
}

#[locked(key = "m", keeper = "keeper", permits = 1, wait = "0s", reentrant)]
async fn one_permit(keeper: &Keeper, depth: u32) -> Result<()> {
    if depth == 0 {
        return write(keeper, true).await;
    }
    Box::pin(one_permit(keeper, depth - 1)).await
}

#[tokio::test]
async fn a_nested_read_in_a_write_is_granted_and_a_nested_write_in_a_read_is_rejected() {
    let keeper = keeper();
    scope(write(&keeper, true)).await.unwrap();
    let error = scope(read(&keeper, true)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption);
    assert!(error.to_string().contains("held for reading in this scope"), "{error}");
    assert!(is_free(&keeper, "m").await);
    scope(one_permit(&keeper, 3)).await.unwrap();
    assert_eq!(keeper.semaphore("m", 1).available().await.unwrap(), 1);
}

#[tokio::test]
async fn a_waiting_writer_does_not_block_a_nested_reader() {
    let keeper = keeper();
    let writer = keeper.rw_lock("m");
    scope(async {
        let done = async {
            let mut waiting = Box::pin(writer.write());
            tokio::select! {
                biased;
                _ = &mut waiting => panic!("the writer entered beside a reader"),
                read = soon("the inner reader", read(&keeper, false)) => read.unwrap(),
            }
        };
        read_and(&keeper, done).await.unwrap();
    })
    .await;
}

#[locked(key = "m", keeper = "keeper", mode = "shared", reentrant)]
async fn read_and(keeper: &Keeper, work: impl Future<Output = ()>) -> Result<()> {
    work.await;
    Ok(())
}

#[locked(key = "account:{account}", keeper = "keeper", wait = "0s", reentrant)]
fn debit_blocking(keeper: &Keeper, account: u32) -> Result<u32> {
    if account > 0 { Ok(account) } else { debit_blocking_inner(keeper, account) }
}

#[locked(key = "account:{account}", keeper = "keeper", wait = "0s", reentrant)]
fn debit_blocking_inner(keeper: &Keeper, account: u32) -> Result<u32> {
    Ok(account)
}

#[locked(key = "account:{account}", keeper = "keeper", wait = "0s", reentrant)]
async fn mixed(keeper: &Keeper, account: u32) -> Result<u32> {
    debit_blocking(keeper, account)
}

#[tokio::test]
async fn blocking_functions_share_the_scope_of_their_async_callers() {
    let keeper = keeper();
    assert_eq!(scope(mixed(&keeper, 5)).await.unwrap(), 5);
    assert_eq!(lockkeeper::blocking::scope(|| debit_blocking(&keeper, 0)).unwrap(), 0);
    assert_eq!(debit_blocking(&keeper, 0).unwrap_err().kind(), ErrorKind::TimedOut);
    assert!(is_free(&keeper, "account:5").await && is_free(&keeper, "account:0").await);
}

#[locked(key = "m", keeper = "keeper", permits = 2, wait = "0s", reentrant)]
async fn of_two(keeper: &Keeper) -> Result<()> {
    one_permit(keeper, 0).await
}

#[tokio::test]
async fn a_nested_semaphore_of_another_size_is_rejected() {
    let error = scope(of_two(&keeper())).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
}
