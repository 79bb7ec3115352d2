//! The state that all claims of a store share.

use std::sync::Arc;

use lockkeeper_core::{Error, ErrorKind, Name, Result};

use crate::local_claims::LocalClaims;
use crate::names::AdvisoryKey;
use crate::sessions::{Fencing, SessionPool};

/// The state that all claims of a store share.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    pub(crate) sessions: Arc<SessionPool>,
    pub(crate) local_claims: Arc<LocalClaims>,
    pub(crate) fencing: Arc<Fencing>,
    pub(crate) foreign_keys: bool,
}

impl Store {
    /// Returns the key of a name.
    pub(crate) fn key_of(&self, name: &Name) -> Result<AdvisoryKey> {
        match AdvisoryKey::parse(name) {
            None => Ok(AdvisoryKey::of(name)),
            Some(key) if self.foreign_keys => Ok(key),
            Some(_) => Err(Error::new(
                ErrorKind::InvalidName,
                "names of this form are advisory keys of other programs: open the store with foreign_keys=on to lock them, \
                 or choose another name",
            )),
        }
    }
}
