//! Names of locks and labels of holders.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use crate::error::{Error, ErrorKind, Result};

/// The name of a lock: UTF-8 text of 1 byte to 1 KiB without NUL.
///
/// Every name works on every store, and two names are two locks: a store that does not accept a name encodes it.
/// Names are compared byte by byte; `Orders` and `orders` are different.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "String"))]
pub struct Name(Arc<str>);

impl Name {
    /// The maximum length in bytes.
    pub const MAX_LEN: usize = 1024;

    /// Creates a name from text.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidName`] if the text is empty, longer than 1 KiB or contains NUL.
    pub fn new(text: impl Into<Arc<str>>) -> Result<Self> {
        let text = text.into();
        let fault = if text.is_empty() {
            "a name must not be empty".to_owned()
        } else if text.len() > Self::MAX_LEN {
            format!("a name has at most {} bytes, not {}", Self::MAX_LEN, text.len())
        } else if text.contains('\0') {
            "a name must not contain NUL".to_owned()
        } else {
            return Ok(Self(text));
        };
        Err(Error::new(ErrorKind::InvalidName, fault))
    }

    /// Creates a name that a combinator derives from a user's name, or that a store reads back. It may be longer than a
    /// user's name. A NUL distinguishes it from every user's name.
    pub fn derived(text: String) -> Self {
        Self(text.into())
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Deref for Name {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl From<&Name> for Arc<str> {
    fn from(name: &Name) -> Self {
        name.0.clone()
    }
}

/// The human-readable label of a holder or waiter: host, process id and program by default.
#[derive(Clone, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "String"))]
pub struct Label(Arc<str>);

impl Label {
    /// The maximum length in bytes.
    pub const MAX_LEN: usize = 256;

    /// Creates a label from text.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidOption`] if the text is longer than 256 bytes or contains a control character.
    pub fn new(text: impl Into<Arc<str>>) -> Result<Self> {
        let text = text.into();
        let fault = if text.len() > Self::MAX_LEN {
            format!("a label has at most {} bytes, not {}", Self::MAX_LEN, text.len())
        } else if text.contains(char::is_control) {
            "a label must not contain control characters".to_owned()
        } else {
            return Ok(Self(text));
        };
        Err(Error::new(ErrorKind::InvalidOption, fault))
    }

    /// Returns the label as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns a label as text, or `(unknown)` if there is none.
    pub(crate) fn or_unknown(label: Option<&Self>) -> &str {
        label.map_or("(unknown)", Self::as_str)
    }
}

impl Default for Label {
    /// Host, process id and program: `web-1:4242:billing`.
    fn default() -> Self {
        static OWN: OnceLock<Label> = OnceLock::new();
        OWN.get_or_init(|| {
            let program = std::env::current_exe().ok();
            let program = program.as_deref().and_then(|path| path.file_name());
            let program = program.map_or("?".into(), |name| name.to_string_lossy());
            let text = format!("{}:{}:{program}", host_name(), std::process::id());
            let clean = text.chars().filter(|c| !c.is_control());
            let mut label = String::new();
            for c in clean.take_while(|c| !c.is_whitespace()) {
                if label.len() + c.len_utf8() > Self::MAX_LEN {
                    break;
                }
                label.push(c);
            }
            Self(label.into())
        })
        .clone()
    }
}

#[cfg(unix)]
fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(not(unix))]
fn host_name() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_else(|_| "?".into())
}

/// The traits that names and labels have in common.
macro_rules! impl_text {
    ($text:ident) => {
        impl fmt::Display for $text {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl fmt::Debug for $text {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }

        impl TryFrom<String> for $text {
            type Error = Error;

            fn try_from(text: String) -> Result<Self> {
                Self::new(text)
            }
        }
    };
}

impl_text!(Name);
impl_text!(Label);
