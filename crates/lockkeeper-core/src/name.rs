//! Names of locks, and labels of those who hold them.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use crate::error::{Error, ErrorKind, Result};

/// The name of a lock: any UTF-8 text from 1 byte to 1 KiB without NUL.
///
/// Every such name works on every store, and two names never meet: stores that cannot take a name as
/// it is encode it. Names are compared byte by byte; `Orders` and `orders` are two.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "String"))]
pub struct Name(Arc<str>);

impl Name {
    /// The longest name that is taken, in bytes.
    pub const MAX_LEN: usize = 1024;

    /// A name, if the text may be one.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidName`] if it is empty, longer than 1 KiB or contains NUL.
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

    /// A name that a combinator makes from a user's, or that a store reads back. It may be longer than a
    /// user's, and a NUL in it keeps it apart from every user's.
    pub fn derived(text: String) -> Self {
        Self(text.into())
    }

    /// The name as text.
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

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl TryFrom<String> for Name {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        Self::new(text)
    }
}

/// Who holds or waits, for people to read: by default host, process id and program.
#[derive(Clone, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "String"))]
pub struct Label(Arc<str>);

impl Label {
    /// The longest label that is taken, in bytes.
    pub const MAX_LEN: usize = 256;

    /// A label, if the text may be one.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidOption`] if it is longer than 256 bytes or contains a control character.
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

    /// The label as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// A label as text, and what is shown of a client without one.
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

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl TryFrom<String> for Label {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        Self::new(text)
    }
}
