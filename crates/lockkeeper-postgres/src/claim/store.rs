//! The state that all claims of a store share.

use std::sync::Arc;

use lockkeeper_core::{Error, ErrorKind, Name, Result};

use crate::local_claims::LocalClaims;
use crate::name_table::NameTable;
use crate::names::AdvisoryKey;
use crate::sessions::{Fencing, SessionPool};

/// The state that all claims of a store share.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    pub(crate) sessions: Arc<SessionPool>,
    pub(crate) local_claims: Arc<LocalClaims>,
    pub(crate) fencing: Arc<Fencing>,
    pub(crate) foreign_keys: bool,
    /// The table of names, unless it is off.
    pub(crate) names: Option<NameTable>,
}

impl Store {
    /// Schedules a write of the claims of this process to the table of names, if there is something to write.
    pub(crate) fn write_names(&self) {
        if let Some(names) = &self.names
            && self.local_claims.have_changes()
        {
            names.schedule();
        }
    }

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
