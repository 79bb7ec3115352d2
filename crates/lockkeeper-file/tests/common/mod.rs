//! What the tests of the file store share.
#![allow(dead_code, reason = "each test uses some of it")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::Backend;
use lockkeeper_file::{File, Options};
use lockkeeper_testkit::conformance::Subject;

/// Longer than anything takes that works, even on a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(30);

/// The program that takes locks in other processes.
pub(crate) fn helper() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let helper = tests.ancestors().nth(2).unwrap().join("examples/file_helper");
    assert!(helper.exists(), "{} is missing: run `cargo build --examples`", helper.display());
    helper
}

/// The URL of a store.
pub(crate) fn url(dir: &Path) -> String {
    format!("file:{}", dir.display())
}

/// A store for the conformance suite, in a directory of its own.
pub(crate) fn subject(options: &Options, query: &str) -> Subject {
    let dir = tempfile::tempdir().unwrap();
    let store = options.open(dir.path()).unwrap();
    let behind = store.clone();
    Subject::new(Arc::new(store), move |held| {
        let path = behind.path(&held.name);
        async move { std::fs::remove_file(path).unwrap() }
    })
    .without_waiters()
    .another({
        let (options, path) = (options.clone(), dir.path().to_owned());
        move || std::future::ready(Arc::new(options.open(&path).unwrap()) as Arc<dyn Backend>)
    })
    .helper(helper(), format!("{}{query}", url(dir.path())))
    .keep(dir)
}

/// Awaits what should not take long.
pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    let output = tokio::time::timeout(SOON, future).await;
    output.unwrap_or_else(|_| panic!("{what}: not within {SOON:?}"))
}

/// A store, and the directory that it is in.
pub(crate) fn store() -> (File, tempfile::TempDir) {
    lockkeeper_testkit::wait::no_longer_than(Duration::from_secs(600));
    let dir = tempfile::tempdir().unwrap();
    (File::open(dir.path()).unwrap(), dir)
}
