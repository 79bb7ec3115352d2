//! Two calls exclude each other if and only if their rendered keys are equal.

use std::time::Duration;

use lockkeeper::{ErrorKind, Keeper, Result, locked};
use proptest::prelude::*;

use crate::common::keeper;

#[derive(Debug, Clone)]
struct Item {
    shop: String,
    number: i16,
}

/// Holds its lock while `other` runs.
#[locked(key = "{prefix}:{item.shop}/{item.number}", keeper = "keeper", wait = "0s")]
async fn hold(
    keeper: &Keeper,
    prefix: &str,
    item: &Item,
    other: impl AsyncFnOnce() -> Result<()>,
) -> Result<Result<()>> {
    Ok(other().await)
}

#[locked(key = "{prefix}:{item.shop}/{item.number}", keeper = "keeper", wait = "0s")]
async fn try_it(keeper: &Keeper, prefix: &str, item: &Item) -> Result<()> {
    Ok(())
}

/// Few characters, including the separators, so that different arguments often render to the same key.
fn text() -> impl Strategy<Value = String> {
    proptest::string::string_regex("[a:/0-1{}é]{0,3}").unwrap()
}

fn arguments() -> impl Strategy<Value = (String, Item)> {
    (text(), text(), -2_i16..3).prop_map(|(prefix, shop, number)| (prefix, Item { shop, number }))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() })]

    #[test]
    fn two_calls_exclude_each_other_if_and_only_if_their_keys_are_equal(
        (one, other) in (arguments(), arguments()).prop_flat_map(|(one, other)| {
            // Often equal, or with the separator in another place.
            let (prefix, item) = &one;
            let moved = (format!("{prefix}:{}", item.shop), item.clone());
            let same = (prefix.clone(), item.clone());
            (Just(one.clone()), prop_oneof![Just(other), Just(same), Just(moved)])
        }),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let equal = key(&one) == key(&other);
        let tried = runtime.block_on(async {
            // Unexpected waits must not add up over all cases.
            let keeper = keeper().max_wait(Duration::from_millis(100));
            let again = async || try_it(&keeper, &other.0, &other.1).await;
            hold(&keeper, &one.0, &one.1, again).await
        });
        match tried.unwrap() {
            Ok(()) => prop_assert!(!equal, "both held {:?}", key(&one)),
            Err(error) => {
                prop_assert_eq!(error.kind(), ErrorKind::TimedOut);
                prop_assert!(equal, "{:?} excluded {:?}", key(&one), key(&other));
            }
        }
    }
}

fn key((prefix, item): &(String, Item)) -> String {
    format!("{prefix}:{}/{}", item.shop, item.number)
}
