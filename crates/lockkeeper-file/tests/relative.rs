//! A relative directory. In a separate binary, because the test changes the working directory.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

use lockkeeper_core::Keeper;
use lockkeeper_file::File;

#[tokio::test]
async fn a_relative_directory_does_not_change_with_the_working_directory() {
    let here = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    std::env::set_current_dir(&here).unwrap();
    let keeper = Keeper::new(File::from_url("file:a/locks").unwrap());
    std::env::set_current_dir(&elsewhere).unwrap();
    let guard = keeper.mutex("orders").lock().await.unwrap();
    assert!(here.path().join("a/locks/orders.lock").exists());
    guard.release().await.unwrap();
    assert_eq!(std::fs::read_dir(&elsewhere).unwrap().count(), 0);
    std::env::set_current_dir("/").unwrap();
}
