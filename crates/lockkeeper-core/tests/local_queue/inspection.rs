//! Inspection, which adds the waiters of this process.

use lockkeeper_core::{Backend, Owner};

use crate::common::unordered::Unordered;
use crate::{Setup, is_granted};

#[tokio::test(start_paused = true)]
async fn inspection_shows_every_waiter_once_in_the_order_of_the_queue() {
    for setup in Setup::both() {
        let owners: Vec<Owner> = (0..6).map(|_| Owner::random()).collect();
        let mut claims = Vec::new();
        for owner in &owners {
            let mut claim = setup.claim(|spec| (spec.owner, spec.queue) = (*owner, true));
            claim.attempt(None).await.unwrap();
            claims.push(claim);
        }
        let waiters: Vec<_> = owners[1..].iter().copied().map(Some).collect();
        assert_eq!(setup.waiters("a").await, waiters, "{}", setup.store.name());
        let listed = setup.left().await;
        assert_eq!(listed.len(), 1);
        assert_eq!(listed[0].holders.len(), 1);
        assert_eq!(listed[0].waiters.len(), 5);
        assert!(setup.keeper.inspect().unwrap().list("b").await.unwrap().is_empty());
        claims[3].release().await.unwrap();
        assert_eq!(setup.waiters("a").await.len(), 4);
    }
}

#[tokio::test(start_paused = true)]
async fn inspection_shows_waiters_of_a_lock_that_the_store_does_not_list() {
    let setup = Setup::new(Unordered::default());
    let mut holder = setup.claim(|_| ());
    assert!(is_granted(&mut *holder).await);
    let mut waiter = setup.waiter();
    assert!(!is_granted(&mut *waiter).await);
    holder.release().await.unwrap();
    assert_eq!(setup.waiters("a").await.len(), 1, "it was not polled");
}
