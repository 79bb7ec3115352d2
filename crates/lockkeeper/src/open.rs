//! From a URL to a store: which schemes there are, and which of them this build has.
//!
//! A store of this workspace is a line in [`SCHEMES`] and an opener of its own, with a `None` in its place for
//! builds without its feature. Any other store is registered at run time.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use lockkeeper_core::{Backend, BoxFuture, Error, ErrorKind, Keeper, Result};

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

/// Opens a store of another crate.
type Opener =
    Arc<dyn Fn(String) -> BoxFuture<'static, Result<Arc<dyn Backend>>> + Send + Sync + 'static>;

/// The schemes of other crates, by name.
static REGISTERED: RwLock<BTreeMap<String, Opener>> = RwLock::new(BTreeMap::new());

/// Makes a store known to [`open`](crate::open()) under a URL scheme of its own.
///
/// From then on `open`, [`blocking::open`](crate::blocking::open) and everything that is given a store URL can use the scheme,
/// in the whole process. Call it when the program starts. A crate with a store offers a function that does so.
///
/// The opener is given the whole URL, with its scheme in whatever case it was written. Its errors go to the
/// caller of `open` as they are: they must not show a password that is in the URL.
///
/// # Errors
///
/// [`Config`](ErrorKind::Config) if the scheme is taken: by a store of Lockkeeper, also one whose feature is off, or by an earlier
/// registration, which stays. `Config` as well if it is not a scheme: a letter, then letters, digits, `+`, `.` or `-`.
///
/// # Examples
///
/// ```
/// use lockkeeper::Memory;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// lockkeeper::backend::register("example", |_url| async { Ok(Memory::new()) })?;
///
/// let keeper = lockkeeper::open("example://host/").await?;
/// assert!(keeper.mutex("orders/42").try_lock().await?.is_some());
/// # Ok(())
/// # }
/// ```
pub fn register<F, B>(
    scheme: &str,
    opener: impl Fn(String) -> F + Send + Sync + 'static,
) -> Result<()>
where
    F: Future<Output = Result<B>> + Send + 'static,
    B: Backend,
{
    let name = scheme.to_ascii_lowercase();
    if !is_scheme(&name) {
        // Not shown: it may be a whole URL, with a password.
        return Err(config(
            "not a URL scheme: it is what comes before the colon, a letter, then letters, digits, \"+\", \".\" or \"-\"",
        ));
    }
    let opener: Opener = Arc::new(move |url| {
        let store = opener(url);
        Box::pin(async move { Ok(Arc::new(store.await?) as Arc<dyn Backend>) })
    });
    let mut registered = REGISTERED.write().unwrap_or_else(PoisonError::into_inner);
    if registered.contains_key(&name) || SCHEMES.iter().any(|scheme| scheme.name == name) {
        return Err(config(format!("the store scheme {name:?} is taken: choose another")));
    }
    registered.insert(name, opener);
    Ok(())
}

/// Whether a scheme is that of another crate's store.
pub(crate) fn is_registered(name: &str) -> bool {
    registered(name).is_some()
}

fn registered(name: &str) -> Option<Opener> {
    REGISTERED.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
}

/// Opens the store that a URL names, and returns a keeper on it.
///
/// | URL | store | feature |
/// |---|---|---|
/// | `memory:` | a new [`Memory`](crate::Memory) | `memory` (on by default) |
/// | `redis://[user:password@]host[:port][/database]` | Redis, one node | `redis` |
/// | `redis+sentinel://host,host,…/master[/database]` | Redis, wherever sentinels say | `redis` |
/// | `redis+cluster://host,host,…` | Redis Cluster | `redis` |
/// | `redlock://host,host,host[,…]` | a [`Quorum`](crate::backend::Quorum) of independent Redis nodes | `redis` |
/// | `rediss://…`, `rediss+sentinel://…`, `rediss+cluster://…` | the same over TLS | `redis-tls` |
/// | `file:/run/locks`, `file:locks` | `File`, in a directory | `file` |
/// | `postgres://user:password@host/database?…` | a PostgreSQL server | `postgres`, `postgres-tls` |
/// | a [registered](crate::backend::register) scheme | a store of another crate | |
///
/// The part before the colon, the scheme, may be in upper or lower case. Each call to open `memory:` creates a store
/// of its own: **two opens do not exclude each other**, clones of one keeper do.
///
/// For code that is not async there is [`blocking::open`](crate::blocking::open).
///
/// # Errors
///
/// [`Config`](ErrorKind::Config), at once, if the URL is not one, names no store that this build knows, or needs a feature
/// that is off; the message says which. It shows no more of the URL than its scheme, because the rest may hold a
/// password. (A directory is shown, if it cannot be used.) [`Unavailable`](ErrorKind::Unavailable) if the store cannot be
/// reached.
///
/// # Cancel safety
///
/// Dropping it opens nothing.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// # if !cfg!(feature = "memory") { return Ok(()) }
/// let keeper = lockkeeper::open("memory:").await?;
/// let guard = keeper.mutex("orders/42").lock().await?;
/// # drop(guard);
/// # Ok(())
/// # }
/// ```
pub async fn open(url: &str) -> Result<Keeper> {
    backend(url).await.map(Keeper::from_backend)
}

async fn backend(url: &str) -> Result<Arc<dyn Backend>> {
    let name = scheme_of(url)?;
    if let Some(open) = registered(&name) {
        return open(url.to_owned()).await;
    }
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
    // A blank at an end is a secret file read with its newline, and would go to the store unseen.
    if is_scheme(scheme) && url.trim() == url {
        Ok(scheme.to_ascii_lowercase())
    } else {
        Err(malformed())
    }
}

fn is_scheme(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"+.-".contains(&b))
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
    let mut built: Vec<String> = built.map(|scheme| format!("{}:", scheme.name)).collect();
    let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
    built.extend(registered.keys().map(|name| format!("{name}:")));
    let has = if built.is_empty() {
        "none: no store feature of lockkeeper is enabled, and no scheme is registered".to_owned()
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
        #[tokio::test]
        async fn a_memory_url_opens_a_store_in_any_case() {
            for url in ["memory:", "Memory:", "MEMORY:"] {
                let keeper = open(url).await.unwrap();
                assert!(keeper.mutex("a").try_lock().await.unwrap().is_some());
            }
        }

        #[tokio::test]
        async fn two_opens_do_not_exclude_each_other_but_clones_do() {
            let one = open("memory:").await.unwrap();
            let other = open("memory:").await.unwrap();
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
        use crate::blocking;

        #[tokio::test]
        async fn a_file_url_opens_a_directory_and_two_opens_exclude_each_other() {
            let dir = tempfile::tempdir().unwrap();
            let url = format!("File:{}/locks", dir.path().display());
            let one = open(&url).await.unwrap();
            let other = open(&format!("{url}?polling=on")).await.unwrap();
            let guard = one.mutex("orders/42").lock().await.unwrap();
            assert!(guard.fence().is_some());
            assert!(dir.path().join("locks/orders%2F42.lock").exists());
            assert!(other.mutex("orders/42").try_lock().await.unwrap().is_none());
            guard.release().await.unwrap();
            let off = open(&format!("{url}?fence=off")).await.unwrap();
            assert_eq!(off.mutex("orders/42").lock().await.unwrap().fence(), None);
        }

        #[test]
        fn a_file_url_opens_for_code_that_is_not_async() {
            let dir = tempfile::tempdir().unwrap();
            let keeper = blocking::open(&format!("file:{}", dir.path().display())).unwrap();
            let mutex = keeper.mutex("a");
            let guard = mutex.blocking_lock().unwrap();
            assert!(mutex.blocking_try_lock().unwrap().is_none());
            assert_eq!(keeper.inspect().unwrap().blocking_list("").unwrap().len(), 1);
            guard.blocking_release().unwrap();
            assert!(mutex.blocking_try_lock().unwrap().is_some());
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
