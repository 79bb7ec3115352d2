//! A store in which every name begins with a prefix.

use std::sync::Arc;

use crate::contract::{Backend, BoxFuture, Capabilities, Claim, ClaimSpec, Inspector, LockInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::name::Name;

/// A part of another store: its names stand in that store as `prefix/name`.
///
/// Two prefixes never meet, because a prefix contains no slash. Whoever uses the store without one
/// sees them all, as `prefix/name`.
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
    /// With its slash.
    prefix: Arc<str>,
}

impl Prefixed {
    /// The part of a store under a prefix.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] if the prefix is empty, longer than 256 bytes or contains a slash or NUL.
    pub fn new(inner: Arc<dyn Backend>, prefix: &str) -> Result<Self> {
        if prefix.is_empty() || prefix.len() > 256 || prefix.contains(['/', '\0']) {
            let message = "a prefix has from 1 to 256 bytes, without slash and NUL";
            return Err(Error::new(ErrorKind::Config, message));
        }
        Ok(Self { inner, prefix: format!("{prefix}/").into() })
    }

    fn inside(&self, name: &str) -> Name {
        Name::derived(format!("{}{name}", self.prefix))
    }

    /// What the user sees of a lock of the inner store.
    fn outside(&self, mut info: LockInfo) -> Option<LockInfo> {
        info.name = Name::derived(info.name.strip_prefix(&*self.prefix)?.to_owned());
        Some(info)
    }

    fn inspector(&self) -> Result<&dyn Inspector> {
        self.inner.inspector().ok_or_else(|| Error::unsupported("way to be looked into"))
    }

    async fn look(
        &self,
        infos: impl Future<Output = Result<Vec<LockInfo>>>,
    ) -> Result<Vec<LockInfo>> {
        Ok(infos.await?.into_iter().filter_map(|info| self.outside(info)).collect())
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
        spec.name = self.inside(&spec.name);
        self.inner.claim(spec)
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.inner.inspector().map(|_| self as _)
    }
}

impl Inspector for Prefixed {
    fn list(&self, prefix: &str) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let inside = self.inside(prefix);
        Box::pin(async move { self.look(self.inspector()?.list(&inside)).await })
    }

    fn show(&self, name: &Name) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let inside = self.inside(name);
        Box::pin(async move { self.look(self.inspector()?.show(&inside)).await })
    }

    fn break_lock(&self, name: &Name) -> BoxFuture<'_, Result<usize>> {
        let inside = self.inside(name);
        Box::pin(async move { self.inspector()?.break_lock(&inside).await })
    }

    fn changed(&self) -> BoxFuture<'_, ()> {
        match self.inner.inspector() {
            Some(inspector) => inspector.changed(),
            None => Box::pin(std::future::pending()),
        }
    }
}
