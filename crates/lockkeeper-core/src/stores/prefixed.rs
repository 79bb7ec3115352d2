//! A store that adds a prefix to every name.

use std::sync::Arc;

use crate::contract::{Backend, BoxFuture, Capabilities, Claim, ClaimSpec, Inspector, LockInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::name::Name;

/// A namespace in another store: the lock `name` is `prefix/name` in that store.
///
/// Locks of different prefixes never conflict, because a prefix contains no slash. A client that uses the store without a
/// prefix sees the locks of all prefixes, as `prefix/name`.
///
/// # Examples
///
/// ```
/// # use lockkeeper_core as lockkeeper;
/// use std::sync::Arc;
/// use lockkeeper::{Keeper, Memory, Prefixed};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// let store = Arc::new(Memory::new());
/// let red = Keeper::new(Prefixed::new(store.clone(), "red")?);
/// let blue = Keeper::new(Prefixed::new(store, "blue")?);
///
/// let _red = red.mutex("orders").lock().await?;
/// assert!(blue.mutex("orders").try_lock().await?.is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Prefixed {
    inner: Arc<dyn Backend>,
    /// Includes the slash.
    prefix: Arc<str>,
}

impl Prefixed {
    /// Creates a namespace in a store.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] if the prefix is empty, is longer than 256 bytes, or contains a slash or NUL.
    pub fn new(inner: Arc<dyn Backend>, prefix: &str) -> Result<Self> {
        if prefix.is_empty() || prefix.len() > 256 || prefix.contains(['/', '\0']) {
            let message = format!(
                "the prefix {prefix:?} is not valid: it must have 1 to 256 bytes, without slash and NUL"
            );
            return Err(Error::new(ErrorKind::Config, message));
        }
        Ok(Self { inner, prefix: format!("{prefix}/").into() })
    }

    fn inner_name(&self, name: &str) -> Name {
        Name::derived(format!("{}{name}", self.prefix))
    }

    /// Removes the prefix from a lock of the inner store; `None` for a lock without it.
    fn without_prefix(&self, mut info: LockInfo) -> Option<LockInfo> {
        info.name = Name::derived(info.name.strip_prefix(&*self.prefix)?.to_owned());
        Some(info)
    }

    fn inner_inspector(&self) -> Result<&dyn Inspector> {
        self.inner.inspector().ok_or_else(|| Error::unsupported("inspection"))
    }

    async fn without_prefixes(
        &self,
        infos: impl Future<Output = Result<Vec<LockInfo>>>,
    ) -> Result<Vec<LockInfo>> {
        Ok(infos.await?.into_iter().filter_map(|info| self.without_prefix(info)).collect())
    }
}

impl Backend for Prefixed {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn claim(&self, mut spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        spec.name = self.inner_name(&spec.name);
        self.inner.claim(spec)
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.inner.inspector().map(|_| self as _)
    }
}

impl Inspector for Prefixed {
    fn list(&self, prefix: &str) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let inner = self.inner_name(prefix);
        Box::pin(async move { self.without_prefixes(self.inner_inspector()?.list(&inner)).await })
    }

    fn show(&self, name: &Name) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let inner = self.inner_name(name);
        Box::pin(async move { self.without_prefixes(self.inner_inspector()?.show(&inner)).await })
    }

    fn break_lock(&self, name: &Name) -> BoxFuture<'_, Result<usize>> {
        let inner = self.inner_name(name);
        Box::pin(async move { self.inner_inspector()?.break_lock(&inner).await })
    }

    fn changed(&self) -> BoxFuture<'_, ()> {
        match self.inner.inspector() {
            Some(inspector) => inspector.changed(),
            None => Box::pin(std::future::pending()),
        }
    }
}
