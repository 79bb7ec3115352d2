//! Recipes built on locks: elections, re-entrant scopes, `#[locked]`, plugins, fence registers.

pub(crate) mod election;
pub(crate) mod fence_register;
#[doc(hidden)]
pub mod locked;
pub mod plugin;
pub(crate) mod scope;
