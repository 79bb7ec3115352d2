//! The conformance suite on the memory store and on every combinator around it.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::sync::Arc;

use common::unordered::Unordered;
use common::{WithoutPermits, millis};
use lockkeeper_core::{Backend, Inspector, LocalQueue, Memory, Name, Prefixed, Quorum, Slots};
use lockkeeper_testkit::conformance::{Held, Subject};
use lockkeeper_testkit::{Fault, Faulty, Op};

/// Returns a subject whose holds are severed by breaking them in each of the stores.
fn subject(backend: impl Backend, stores: Vec<Memory>, prefix: &'static str) -> Subject {
    Subject::new(Arc::new(backend), move |held: Held| {
        let stores = stores.clone();
        async move {
            let name = Name::new(format!("{prefix}{}", held.name)).unwrap();
            let mut broken = 0;
            for store in &stores {
                broken += store.break_lock(&name).await.unwrap();
            }
            assert!(broken > stores.len() / 2, "the lock was held");
        }
    })
}

async fn memory() -> Subject {
    let store = Memory::new();
    subject(store.clone(), vec![store], "")
}

async fn prefixed() -> Subject {
    let store = Memory::new();
    let backend = Prefixed::new(Arc::new(store.clone()), "some").unwrap();
    subject(backend, vec![store], "some/")
}

async fn quorum() -> Subject {
    let stores: Vec<Memory> = (0..3).map(|_| Memory::new()).collect();
    let open = |stores: &[Memory]| {
        let nodes = stores.iter().map(|store| Arc::new(store.clone()) as Arc<dyn Backend>);
        Quorum::new(nodes).unwrap()
    };
    let subject = subject(open(&stores), stores.clone(), "");
    subject.another(move || std::future::ready(Arc::new(open(&stores)) as Arc<dyn Backend>))
}

async fn without_permits() -> Subject {
    let store = Memory::new();
    subject(WithoutPermits(store.clone()), vec![store], "")
}

async fn slots() -> Subject {
    let store = Memory::new();
    let subject =
        subject(Slots::new(Arc::new(WithoutPermits(store.clone()))), vec![store.clone()], "");
    // The latency of each request is random.
    subject.another(move || {
        let (node, faults) = Faulty::new(WithoutPermits(store.clone()));
        for _ in 0..500 {
            faults.once(Op::Attempt, Fault::SlowRequest(millis(fastrand::u64(..4))));
        }
        faults.always(Op::Release, Fault::SlowRequest(millis(1)));
        std::future::ready(Arc::new(Slots::new(Arc::new(node))) as Arc<dyn Backend>)
    })
}

async fn local_queue() -> Subject {
    let store = Memory::new();
    subject(LocalQueue::new(Arc::new(store.clone())), vec![store], "")
}

async fn local_queue_one_by_one() -> Subject {
    let store = Memory::new();
    subject(LocalQueue::one_by_one(Arc::new(store.clone())), vec![store], "")
}

/// Returns a subject on a store without hand-offs.
fn unordered_subject(backend: impl Backend, store: Unordered) -> Subject {
    Subject::new(Arc::new(backend), move |held: Held| {
        let store = store.clone();
        async move {
            let broken = store.break_lock(&Name::new(held.name).unwrap()).await.unwrap();
            assert_eq!(broken, 1, "the lock was held");
        }
    })
}

async fn unordered() -> Subject {
    let store = Unordered::default();
    unordered_subject(store.clone(), store).without_waiters()
}

async fn local_queue_unordered() -> Subject {
    let store = Unordered::default();
    unordered_subject(LocalQueue::new(Arc::new(store.clone())), store)
}

async fn slots_of_local_queue() -> Subject {
    let store = Unordered::default();
    let queue = LocalQueue::new(Arc::new(store.clone()));
    unordered_subject(Slots::new(Arc::new(queue)), store)
}

mod on_memory {
    lockkeeper_testkit::conformance!(super::memory);
}

mod on_prefixed {
    lockkeeper_testkit::conformance!(super::prefixed);
}

mod on_quorum {
    lockkeeper_testkit::conformance!(super::quorum);
}

mod on_store_without_permits {
    lockkeeper_testkit::conformance!(super::without_permits);
}

mod on_slots {
    lockkeeper_testkit::conformance!(super::slots);
}

mod on_local_queue {
    lockkeeper_testkit::conformance!(super::local_queue);
}

mod on_local_queue_one_by_one {
    lockkeeper_testkit::conformance!(super::local_queue_one_by_one);
}

mod on_unordered {
    lockkeeper_testkit::conformance!(super::unordered);
}

mod on_local_queue_unordered {
    lockkeeper_testkit::conformance!(super::local_queue_unordered);
}

mod on_slots_of_local_queue {
    lockkeeper_testkit::conformance!(super::slots_of_local_queue);
}
