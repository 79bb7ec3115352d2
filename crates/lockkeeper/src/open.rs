//! Opens stores by URL: the built-in schemes and those that are registered at run time.
//!
//! A built-in store has an entry in [`SCHEMES`] and an opener constant, which is `None` in a build without its
//! feature.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use lockkeeper_core::{Backend, BoxFuture, Error, ErrorKind, Keeper, Result};

/// Opens a built-in store from the whole URL. The scheme has been matched.
type Open = for<'a> fn(&'a str) -> BoxFuture<'a, Result<Arc<dyn Backend>>>;

/// A built-in scheme.
struct Scheme {
    /// The part before the colon, in lower case.
    name: &'static str,
    /// The feature of this crate that enables it.
    feature: &'static str,
    /// `None` if the feature is off.
    open: Option<Open>,
}

const SCHEMES: &[Scheme] = &[
    Scheme { name: "memory", feature: "memory", open: MEMORY },
    Scheme { name: "file", feature: "file", open: FILE },
    Scheme { name: "redis", feature: "redis", open: REDIS },
    Scheme { name: "rediss", feature: "redis-tls", open: REDIS },
    Scheme { name: "redis+unix", feature: "redis", open: REDIS },
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
        _ => Err(config("a memory: URL has nothing after the colon: write \"memory:\"")),
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

/// Opens a registered store from the whole URL.
type Opener =
    Arc<dyn Fn(String) -> BoxFuture<'static, Result<Arc<dyn Backend>>> + Send + Sync + 'static>;

/// Registered schemes, in lower case.
static REGISTERED: RwLock<BTreeMap<String, Opener>> = RwLock::new(BTreeMap::new());

/// Registers a URL scheme for a store of another crate, for the whole process.
///
/// Afterwards [`open`](crate::open()), [`blocking::open`](crate::blocking::open) and everything else that takes a store
/// URL accepts the scheme. Call it when the program starts. A crate with a store should export a function that does so.
///
/// The opener receives the whole URL, in the case in which it was written. `open` returns its errors unchanged, so they
/// must not contain a password from the URL.
///
/// # Errors
///
/// [`Config`](ErrorKind::Config) if the scheme is registered already or built in, even if its feature is off. The
/// earlier registration stays. `Config` also if it is not a valid scheme: a letter, then letters, digits, `+`, `.` or `-`.
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
        // The message leaves it out: it may be a whole URL, with a password.
        return Err(config(
            "not a URL scheme: write the part before the colon, a letter, then letters, digits, \"+\", \".\" or \"-\"",
        ));
    }
    let opener: Opener = Arc::new(move |url| {
        let store = opener(url);
        Box::pin(async move { Ok(Arc::new(store.await?) as Arc<dyn Backend>) })
    });
    let mut registered = REGISTERED.write().unwrap_or_else(PoisonError::into_inner);
    if registered.contains_key(&name) || SCHEMES.iter().any(|scheme| scheme.name == name) {
        return Err(config(format!("the store scheme {name:?} is taken: choose another name")));
    }
    registered.insert(name, opener);
    Ok(())
}

/// Whether a scheme was registered.
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
/// | `redis+unix:///path/of/socket[?db=database]` | Redis, one node, by its Unix socket | `redis` |
/// | `redis+sentinel://host,host,…/master[/database]` | Redis, the master that the sentinels name | `redis` |
/// | `redis+cluster://host,host,…` | Redis Cluster | `redis` |
/// | `redlock://host,host,host[,…]` | a [`Quorum`](crate::backend::Quorum) of independent Redis nodes | `redis` |
/// | `rediss://…`, `rediss+sentinel://…`, `rediss+cluster://…` | the same over TLS | `redis-tls` |
/// | `file:/run/locks`, `file:locks` | files in a directory | `file` |
/// | `postgres://user:password@host/database?…` | a PostgreSQL server | `postgres`, `postgres-tls` |
/// | a [registered](crate::backend::register) scheme | a store of another crate | |
///
/// Schemes are not case-sensitive. Every call with `memory:` creates a new store: **two such keepers do not exclude each
/// other**, clones of one keeper do.
///
/// Blocking code uses [`blocking::open`](crate::blocking::open).
///
/// # Errors
///
/// [`Config`](ErrorKind::Config), without any I/O, if the URL is malformed, its scheme is unknown or its feature is off.
/// Messages contain the scheme and no other part of the URL, which may contain a password. Exception: a directory or
/// a socket that cannot be used is named. [`Unavailable`](ErrorKind::Unavailable) if the store cannot be reached.
///
/// # Cancel safety
///
/// Dropping the future leaves no keeper and no open connection.
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
            "this build does not support {name}: URLs: enable the feature {feature:?} of lockkeeper"
        ))),
        None => Err(unknown(&name)),
    }
}

/// Returns the scheme of a URL in lower case.
pub(crate) fn scheme_of(url: &str) -> Result<String> {
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    // A trailing newline comes from reading the URL from a file. Some stores would take it as a part of the path.
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

// These messages contain no part of the URL but the scheme, since the rest may contain a password.

fn malformed() -> Error {
    config(
        "not a store URL: write a scheme and a colon, as in \"file:/a/directory\" or \
         \"redis://host/\", without white space around it",
    )
}

fn unknown(name: &str) -> Error {
    let built = SCHEMES.iter().filter(|scheme| scheme.open.is_some());
    let mut built: Vec<String> = built.map(|scheme| format!("{}:", scheme.name)).collect();
    let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
    built.extend(registered.keys().map(|name| format!("{name}:")));
    let has = if built.is_empty() {
        "none: enable a store feature of lockkeeper, or register a scheme".to_owned()
    } else {
        built.join(", ")
    };
    config(format!("unknown store scheme {name:?}: this build supports {has}"))
}

fn config(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the message of the `Config` error that `open` must return.
    async fn config_error(url: &str) -> String {
        let error = open(url).await.expect_err(url);
        assert_eq!(error.kind(), ErrorKind::Config, "{url:?}: {error}");
        let message = error.to_string();
        assert!(!message.contains('\n'), "{message}");
        message
    }

    #[test]
    fn every_built_in_scheme_is_valid_lower_case_and_listed_once() {
        for (at, scheme) in SCHEMES.iter().enumerate() {
            assert_eq!(scheme_of(&format!("{}:", scheme.name)).unwrap(), scheme.name);
            assert!(SCHEMES[..at].iter().all(|other| other.name != scheme.name), "{}", scheme.name);
        }
    }

    #[tokio::test]
    async fn a_malformed_url_is_rejected_with_an_example() {
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
            assert!(config_error(url).await.starts_with("not a store URL"), "{url:?}");
        }
    }

    #[tokio::test]
    async fn the_error_for_an_unknown_scheme_contains_no_other_part_of_the_url() {
        for url in ["zookeeper://user:hunter2@host/x", "ZooKeeper:hunter2"] {
            let message = config_error(url).await;
            assert!(message.starts_with("unknown store scheme \"zookeeper\""), "{message}");
            assert!(!message.contains("hunter2"), "{message}");
        }
    }

    #[tokio::test]
    async fn no_error_contains_the_password() {
        let urls = [
            "redis://user:hunter2@127.0.0.1:1",
            "redis://user:hunter2@127.0.0.1:port",
            "rediss://user:hunter2@127.0.0.1:1",
            "redis+sentinel://user:hunter2@127.0.0.1:1/m?sentinel_password=hunter2",
            "redis+cluster://user:hunter2@127.0.0.1:1",
            "redis+unix://user:hunter2@/nowhere/redis.sock",
            "redis+unix://user:hunter2@host/redis.sock",
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
        async fn a_memory_url_is_not_case_sensitive() {
            for url in ["memory:", "Memory:", "MEMORY:"] {
                let keeper = open(url).await.unwrap();
                assert!(keeper.mutex("a").try_lock().await.unwrap().is_some());
            }
        }

        #[tokio::test]
        async fn two_memory_stores_do_not_exclude_each_other_but_clones_of_a_keeper_do() {
            let one = open("memory:").await.unwrap();
            let other = open("memory:").await.unwrap();
            let guard = one.mutex("a").lock().await.unwrap();
            assert!(one.clone().mutex("a").try_lock().await.unwrap().is_none());
            assert!(other.mutex("a").try_lock().await.unwrap().is_some());
            drop(guard);
        }

        #[tokio::test]
        async fn a_memory_url_with_text_after_the_colon_is_rejected() {
            for url in ["memory:x", "memory://", "memory:///", "MEMORY::", "memory:?a=b"] {
                let message = config_error(url).await;
                assert!(message.contains("nothing after the colon"), "{url:?}: {message}");
            }
        }

        #[tokio::test]
        async fn the_error_for_an_unknown_scheme_lists_the_supported_ones() {
            assert!(config_error("nosuch://x").await.contains("this build supports memory:"));
        }
    }

    #[cfg(feature = "file")]
    mod with_file {
        use super::*;
        use crate::blocking;

        #[tokio::test]
        async fn two_keepers_on_one_directory_exclude_each_other() {
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
        fn blocking_code_opens_a_file_url() {
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
        async fn the_error_for_a_wrong_file_url_does_not_contain_it() {
            for url in ["file:", "file://host/hunter2", "file:/hunter2?fence=maybe"] {
                assert!(!config_error(url).await.contains("hunter2"), "{url:?}");
            }
        }
    }

    #[cfg(not(feature = "file"))]
    mod without_file {
        use super::*;

        #[tokio::test]
        async fn the_error_for_a_file_url_names_the_feature() {
            let message = config_error("file:/run/locks").await;
            assert!(message.contains("enable the feature \"file\""), "{message}");
        }
    }

    #[cfg(not(feature = "postgres"))]
    #[tokio::test]
    async fn the_error_for_a_postgres_url_names_the_feature() {
        for url in ["postgres://host/", "PostgreSQL://host/"] {
            assert!(config_error(url).await.contains("enable the feature \"postgres\""));
        }
    }

    #[cfg(not(feature = "memory"))]
    mod without_memory {
        use super::*;

        #[tokio::test]
        async fn the_error_for_a_memory_url_names_the_feature() {
            for url in ["memory:", "MEMORY:", "memory:x"] {
                let message = config_error(url).await;
                assert!(message.contains("enable the feature \"memory\""), "{message}");
            }
        }

        #[tokio::test]
        async fn the_error_for_an_unknown_scheme_lists_no_disabled_one() {
            assert!(!config_error("nosuch://x").await.contains("memory"));
        }
    }
}
