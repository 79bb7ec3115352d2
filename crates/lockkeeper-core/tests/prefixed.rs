//! Stores with a prefix.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

use std::sync::Arc;

use lockkeeper_core::{Backend, ErrorKind, Keeper, Memory, Prefixed};

#[tokio::test(start_paused = true)]
async fn prefixes_are_independent_and_the_whole_store_lists_them_all() {
    let store = Arc::new(Memory::new());
    let whole = Keeper::from_backend(store.clone());
    let red = Keeper::new(Prefixed::new(store.clone(), "red").unwrap());
    let blue = Keeper::new(Prefixed::new(store.clone(), "blue").unwrap());
    let _red = red.mutex("a/b").lock().await.unwrap();
    let _blue = blue.mutex("a/b").lock().await.unwrap();
    assert!(red.mutex("a/b").try_lock().await.unwrap().is_none());
    let names = async |keeper: &Keeper| -> Vec<String> {
        let listed = keeper.inspect().unwrap().list("").await.unwrap();
        listed.iter().map(|info| info.name.to_string()).collect()
    };
    assert_eq!(names(&whole).await, ["blue/a/b", "red/a/b"]);
    assert_eq!(names(&red).await, ["a/b"]);
    assert_eq!(red.inspect().unwrap().show("a/b").await.unwrap().len(), 1);
    assert_eq!(red.inspect().unwrap().break_lock("a/b").await.unwrap(), 1);
    assert_eq!(names(&whole).await, ["blue/a/b"]);
    let longest = red.mutex("x".repeat(1024)).lock().await.unwrap();
    assert_eq!(longest.name().len(), 1024, "the prefix does not count towards the name's length");
}

#[test]
fn a_prefix_that_could_collide_with_another_is_rejected() {
    let store: Arc<dyn Backend> = Arc::new(Memory::new());
    for bad in ["", "a/b", "/", "a\0", &"x".repeat(257)] {
        let error = Prefixed::new(store.clone(), bad).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{bad:?}");
    }
}
