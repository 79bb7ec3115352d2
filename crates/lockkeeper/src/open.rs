//! From a URL to a store: which schemes there are, and which of them this build has.
//!
//! A new store is a line in [`SCHEMES`] and an opener of its own, with a `None` in its place for
//! builds without its feature.

use std::sync::Arc;

use lockkeeper_core::{Backend, BoxFuture, Error, ErrorKind, Result};

/// Opens a store. It is given the whole URL, whose scheme is known by then to be its own.
type Open = for<'a> fn(&'a str) -> BoxFuture<'a, Result<Arc<dyn Backend>>>;

/// A scheme that `open` knows.
struct Scheme {
    /// What stands before the colon, in lower case.
    name: &'static str,
    /// The feature of this crate that it needs.
    feature: &'static str,
    /// `None` if the feature is off.
    open: Option<Open>,
}

const SCHEMES: &[Scheme] = &[Scheme { name: "memory", feature: "memory", open: MEMORY }];

#[cfg(feature = "memory")]
const MEMORY: Option<Open> = Some(|url| Box::pin(std::future::ready(memory(url))));
#[cfg(not(feature = "memory"))]
const MEMORY: Option<Open> = None;

#[cfg(feature = "memory")]
fn memory(url: &str) -> Result<Arc<dyn Backend>> {
    match url.split_once(':') {
        Some((_, "")) => Ok(Arc::new(lockkeeper_core::Memory::new())),
        _ => Err(config("a memory: URL takes nothing after the colon: write \"memory:\"")),
    }
}

/// The store that a URL names: a backend and not a keeper, so that blocking keepers can have it, too.
pub(crate) async fn open(url: &str) -> Result<Arc<dyn Backend>> {
    let name = scheme_of(url)?;
    match SCHEMES.iter().find(|scheme| scheme.name == name) {
        Some(Scheme { open: Some(open), .. }) => open(url).await,
        Some(Scheme { feature, .. }) => Err(config(format!(
            "this build has no {name}: stores: enable the feature {feature:?} of lockkeeper"
        ))),
        None => Err(unknown(&name)),
    }
}

/// What stands before the colon, in lower case, if the URL looks like one at all.
fn scheme_of(url: &str) -> Result<String> {
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+.-".contains(&b));
    // A blank at an end is a secret file read with its newline, and would go to the store unseen.
    if is_scheme && url.trim() == url { Ok(scheme.to_ascii_lowercase()) } else { Err(malformed()) }
}

// None of these messages has any part of the URL in it but the scheme: the rest may be a password.

fn malformed() -> Error {
    config(
        "not a store URL: it starts with a scheme and a colon, as in \"memory:\" or \
         \"redis://host/\", without blanks around it",
    )
}

fn unknown(name: &str) -> Error {
    let built = SCHEMES.iter().filter(|scheme| scheme.open.is_some());
    let built: Vec<String> = built.map(|scheme| format!("{}:", scheme.name)).collect();
    let has = if built.is_empty() {
        "none, as no store feature of lockkeeper is enabled".to_owned()
    } else {
        built.join(", ")
    };
    config(format!("unknown store scheme {name:?}: this build has {has}"))
}

fn config(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `open` has against a URL.
    async fn complaint(url: &str) -> String {
        let error = open(url).await.expect_err(url);
        assert_eq!(error.kind(), ErrorKind::Config, "{url:?}: {error}");
        let message = error.to_string();
        assert!(!message.contains('\n'), "{message}");
        message
    }

    #[test]
    fn every_scheme_in_the_table_is_valid_lower_case_and_there_once() {
        for (at, scheme) in SCHEMES.iter().enumerate() {
            assert_eq!(scheme_of(&format!("{}:", scheme.name)).unwrap(), scheme.name);
            assert!(SCHEMES[..at].iter().all(|other| other.name != scheme.name), "{}", scheme.name);
        }
    }

    #[tokio::test]
    async fn what_is_not_a_url_is_answered_with_what_one_looks_like() {
        let bad = [
            "",
            " ",
            ":",
            "://",
            "memory",
            "/run/locks",
            "localhost/0",
            "1password:x",
            "mem ory:",
            " memory:",
            "memory: ",
            "memory:\n",
            "mémoire:",
            "a_b://c",
            "user@host:1",
        ];
        for url in bad {
            assert!(complaint(url).await.starts_with("not a store URL"), "{url:?}");
        }
    }

    #[tokio::test]
    async fn an_unknown_scheme_is_named_and_nothing_else_of_the_url() {
        for url in ["zookeeper://user:hunter2@host/x", "ZooKeeper:hunter2"] {
            let message = complaint(url).await;
            assert!(message.starts_with("unknown store scheme \"zookeeper\""), "{message}");
            assert!(!message.contains("hunter2"), "{message}");
        }
    }

    #[tokio::test]
    async fn a_password_is_never_shown() {
        let urls = [
            "redis://user:hunter2@host",
            "user:hunter2@host",
            "hunter2",
            "//user:hunter2@host",
            " redis://user:hunter2@host",
            "memory://user:hunter2@host",
            "memory:hunter2",
            "nosuch://user:hunter2@host",
        ];
        for url in urls {
            let error = open(url).await.expect_err(url);
            for shown in [error.to_string(), format!("{error:?}"), format!("{error:#?}")] {
                assert!(!shown.contains("hunter2"), "{shown}");
            }
            let mut cause = std::error::Error::source(&error);
            while let Some(error) = cause {
                assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
                cause = error.source();
            }
        }
    }

    #[cfg(feature = "memory")]
    mod with_memory {
        use super::*;
        use crate::Keeper;

        #[tokio::test]
        async fn a_memory_url_opens_a_store_in_any_case() {
            for url in ["memory:", "Memory:", "MEMORY:"] {
                let keeper = Keeper::open(url).await.unwrap();
                assert!(keeper.mutex("a").try_lock().await.unwrap().is_some());
            }
        }

        #[tokio::test]
        async fn two_opens_do_not_exclude_each_other_but_clones_do() {
            let one = Keeper::open("memory:").await.unwrap();
            let other = Keeper::open("memory:").await.unwrap();
            let guard = one.mutex("a").lock().await.unwrap();
            assert!(one.clone().mutex("a").try_lock().await.unwrap().is_none());
            assert!(other.mutex("a").try_lock().await.unwrap().is_some());
            drop(guard);
        }

        #[tokio::test]
        async fn a_memory_url_takes_nothing_after_the_colon() {
            for url in ["memory:x", "memory://", "memory:///", "MEMORY::", "memory:?a=b"] {
                let message = complaint(url).await;
                assert!(message.contains("nothing after the colon"), "{url:?}: {message}");
            }
        }

        #[tokio::test]
        async fn an_unknown_scheme_is_answered_with_those_that_there_are() {
            assert!(complaint("nosuch://x").await.contains("this build has memory:"));
        }
    }

    #[cfg(not(feature = "memory"))]
    mod without_memory {
        use super::*;

        #[tokio::test]
        async fn a_scheme_whose_feature_is_off_is_answered_with_the_feature() {
            for url in ["memory:", "MEMORY:", "memory:x"] {
                let message = complaint(url).await;
                assert!(message.contains("enable the feature \"memory\""), "{message}");
            }
        }

        #[tokio::test]
        async fn an_unknown_scheme_is_not_answered_with_those_that_are_off() {
            assert!(!complaint("nosuch://x").await.contains("memory"));
        }
    }
}
