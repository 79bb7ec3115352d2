//! Inspection of locks of other processes.

use lockkeeper_core::{ErrorKind, Label, Mode};
use lockkeeper_postgres::AdvisoryKey;

use crate::common::{client, eventually, keeper, name, soon};

/// Two stores in one process do not share state, as if they were in two processes.
#[tokio::test]
async fn locks_of_other_processes_are_shown_with_their_labels() {
    let name = name("shown");
    let (one, other) = (keeper("").label("the other"), keeper("names_table=off"));
    let guard = one.mutex(name.clone()).lock().await.unwrap();
    let inspect = other.inspect().unwrap();
    let shown = inspect.show(name.clone()).await.unwrap();
    assert_eq!(shown.len(), 1);
    assert_eq!(*shown[0].name, *name);
    assert_eq!(shown[0].holders[0].who(), "the other");
    assert_eq!((shown[0].holders[0].mode, shown[0].holders[0].owner), (Mode::Exclusive, None));

    // Without the table of names, a list shows keys.
    let key = AdvisoryKey::of(&name).to_string();
    let listed = inspect.list("").await.unwrap();
    assert!(listed.iter().any(|info| *info.name == *key), "{key} is not in {listed:?}");
    let foreign = keeper("foreign_keys=on&names_table=off");
    assert_eq!(foreign.inspect().unwrap().show(key).await.unwrap()[0].holders.len(), 1);

    let waiter = tokio::spawn({
        let mutex = other.mutex(name.clone()).label("who waits");
        async move { mutex.lock().await.unwrap() }
    });
    let theirs = one.inspect().unwrap();
    eventually("it waits", async || {
        let shown = theirs.show(name.clone()).await.unwrap();
        shown[0].waiters.iter().any(|participant| participant.who() == "who waits")
    })
    .await;
    guard.release().await.unwrap();
    soon("the waiter", waiter).await.unwrap().release().await.unwrap();
    assert!(inspect.show(name).await.unwrap().is_empty());
}

#[tokio::test]
async fn permits_of_other_processes_are_counted() {
    let name = name("permits");
    let (one, other) = (keeper(""), keeper(""));
    let semaphore = other.semaphore(name.clone(), 5);
    let permits = one.semaphore(name, 5).acquire_many(3).await.unwrap();
    assert_eq!(semaphore.available().await.unwrap(), 2);
    permits.release().await.unwrap();
    assert_eq!(semaphore.available().await.unwrap(), 5);
}

#[tokio::test]
async fn a_lock_of_another_process_can_be_broken() {
    let name = name("broken");
    let (one, other) = (keeper(""), keeper(""));
    let guard = one.mutex(name.clone()).lock().await.unwrap();
    assert_eq!(other.inspect().unwrap().break_lock(name.clone()).await.unwrap(), 1);
    soon("the loss", guard.lost()).await;
    assert_eq!(
        guard.extend(std::time::Duration::from_secs(9)).await.unwrap_err().kind(),
        ErrorKind::Lost
    );
    soon("lock", other.mutex(name).lock()).await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_foreign_session_is_shown_by_its_application_name_and_without_one_as_unknown() {
    let (name, keeper, client) = (name("foreign"), keeper(""), client().await);
    let key = AdvisoryKey::of(&name).to_string();
    let key = key.strip_prefix("pg:").unwrap();
    client.batch_execute(&format!("SELECT pg_advisory_lock({key})")).await.unwrap();
    let inspect = keeper.inspect().unwrap();
    for (application, label) in [("nightly import", Some("nightly import")), ("", None)] {
        client.batch_execute(&format!("SET application_name = '{application}'")).await.unwrap();
        let shown = inspect.show(name.clone()).await.unwrap();
        let [holder] = &shown[0].holders[..] else { panic!("{shown:?}") };
        assert_eq!(holder.label.as_ref().map(Label::as_str), label);
        assert_eq!(holder.who(), label.unwrap_or("(unknown)"));
        assert_eq!(holder.owner, None);
    }
}

#[tokio::test]
async fn the_leader_of_an_election_in_another_process_is_shown() {
    let name = name("election");
    let (one, other) = (keeper("").label("the leader"), keeper(""));
    let leadership = one.election(name.clone()).campaign().await.unwrap();
    let election = other.election(name);
    assert_eq!(election.leader().await.unwrap().unwrap().who(), "the leader");
    let mut observe = election.observe().unwrap();
    let leader = soon("the leader", observe.next()).await.unwrap().unwrap();
    assert_eq!(leader.who(), "the leader");
    leadership.resign().await.unwrap();
    assert!(soon("no leader", observe.next()).await.unwrap().is_none());
}
