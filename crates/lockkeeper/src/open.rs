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

const SCHEMES: &[Scheme] = &[
    Scheme { name: "memory", feature: "memory", open: MEMORY },
    Scheme { name: "file", feature: "file", open: FILE },
    Scheme { name: "redis", feature: "redis", open: REDIS },
    Scheme { name: "rediss", feature: "redis-tls", open: REDIS },
    Scheme { name: "redis+sentinel", feature: "redis", open: REDIS },
    Scheme { name: "rediss+sentinel", feature: "redis-tls", open: REDIS },
    Scheme { name: "redis+cluster", feature: "redis", open: REDIS },
    Scheme { name: "rediss+cluster", feature: "redis-tls", open: REDIS },
    Scheme { name: "redlock", feature: "redis", open: REDLOCK },
    Scheme { name: "postgres", feature: "postgres", open: POSTGRES },
    Scheme { name: "postgresql", feature: "postgres", open: POSTGRES },
];

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

#[cfg(feature = "redis")]
const REDIS: Option<Open> = Some(|url| {
    Box::pin(async move {
        let config = lockkeeper_redis::Config::from_url(url)?;
        Ok(Arc::new(lockkeeper_redis::Redis::connect(config).await?) as Arc<dyn Backend>)
    })
});
#[cfg(feature = "redis")]
const REDLOCK: Option<Open> = Some(|url| {
    Box::pin(async move {
        let nodes = lockkeeper_redis::Config::redlock_from_url(url)?;
        Ok(Arc::new(lockkeeper_redis::redlock(nodes).await?) as Arc<dyn Backend>)
    })
});
#[cfg(not(feature = "redis"))]
const REDIS: Option<Open> = None;
#[cfg(not(feature = "redis"))]
const REDLOCK: Option<Open> = None;
#[cfg(feature = "file")]
const FILE: Option<Open> = Some(|url| Box::pin(std::future::ready(file(url))));
#[cfg(not(feature = "file"))]
const FILE: Option<Open> = None;

#[cfg(feature = "file")]
fn file(url: &str) -> Result<Arc<dyn Backend>> {
    Ok(Arc::new(lockkeeper_file::File::from_url(url)?))
}

#[cfg(feature = "postgres")]
const POSTGRES: Option<Open> = Some(|url| Box::pin(postgres(url)));
#[cfg(not(feature = "postgres"))]
const POSTGRES: Option<Open> = None;

#[cfg(feature = "postgres")]
async fn postgres(url: &str) -> Result<Arc<dyn Backend>> {
    Ok(Arc::new(lockkeeper_postgres::Postgres::connect(url).await?))
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
pub(crate) fn scheme_of(url: &str) -> Result<String> {
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+.-".contains(&b));
    // A blank at an end is a secret file read with its newline, and would go to the store unseen.
    if is_scheme && url.trim() == url { Ok(scheme.to_ascii_lowercase()) } else { Err(malformed()) }
}

// None of these messages has any part of the URL in it but the scheme: the rest may be a password.

fn malformed() -> Error {
    config(
        "not a store URL: it starts with a scheme and a colon, as in \"file:/a/directory\" or \
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
            "redis://user:hunter2@127.0.0.1:1",
            "redis://user:hunter2@127.0.0.1:port",
            "rediss://user:hunter2@127.0.0.1:1",
            "redis+sentinel://user:hunter2@127.0.0.1:1/m?sentinel_password=hunter2",
            "redis+cluster://user:hunter2@127.0.0.1:1",
            "redlock://user:hunter2@127.0.0.1:1,127.0.0.1:2,127.0.0.1:3",
            "user:hunter2@host",
            "hunter2",
            "//user:hunter2@host",
            " redis://user:hunter2@host",
            "memory://user:hunter2@host",
            "memory:hunter2",
            "nosuch://user:hunter2@host",
            "postgres:hunter2",
            "postgres://user:hunter2@host:hunter2/",
            "postgresql://user:hunter2@host/?hunter2",
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

    #[cfg(feature = "file")]
    mod with_file {
        use super::*;
        use crate::{Keeper, blocking};

        #[tokio::test]
        async fn a_file_url_opens_a_directory_and_two_opens_exclude_each_other() {
            let dir = tempfile::tempdir().unwrap();
            let url = format!("File:{}/locks", dir.path().display());
            let one = Keeper::open(&url).await.unwrap();
            let other = Keeper::open(&format!("{url}?polling=on")).await.unwrap();
            let guard = one.mutex("orders/42").lock().await.unwrap();
            assert!(guard.fence().is_some());
            assert!(dir.path().join("locks/orders%2F42.lock").exists());
            assert!(other.mutex("orders/42").try_lock().await.unwrap().is_none());
            guard.release().await.unwrap();
            let off = Keeper::open(&format!("{url}?fence=off")).await.unwrap();
            assert_eq!(off.mutex("orders/42").lock().await.unwrap().fence(), None);
        }

        #[test]
        fn a_file_url_opens_for_code_that_is_not_async() {
            let dir = tempfile::tempdir().unwrap();
            let keeper = blocking::Keeper::open(&format!("file:{}", dir.path().display())).unwrap();
            let guard = keeper.mutex("a").lock().unwrap();
            assert!(keeper.mutex("a").try_lock().unwrap().is_none());
            assert_eq!(keeper.inspect().unwrap().list("").unwrap().len(), 1);
            guard.release().unwrap();
            assert!(keeper.mutex("a").try_lock().unwrap().is_some());
        }

        #[tokio::test]
        async fn a_wrong_file_url_is_refused_and_not_shown() {
            for url in ["file:", "file://host/hunter2", "file:/hunter2?fence=maybe"] {
                assert!(!complaint(url).await.contains("hunter2"), "{url:?}");
            }
        }
    }

    #[cfg(not(feature = "file"))]
    mod without_file {
        use super::*;

        #[tokio::test]
        async fn a_file_url_is_answered_with_the_feature() {
            let message = complaint("file:/run/locks").await;
            assert!(message.contains("enable the feature \"file\""), "{message}");
        }
    }

    #[cfg(not(feature = "postgres"))]
    #[tokio::test]
    async fn a_postgres_url_is_answered_with_the_feature_that_is_off() {
        for url in ["postgres://host/", "PostgreSQL://host/"] {
            assert!(complaint(url).await.contains("enable the feature \"postgres\""));
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
