//! Options and `file:` URLs.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

use lockkeeper_core::{Error, ErrorKind, Result};

use crate::names;

/// Options of a store, created by [`File::options`](crate::File::options).
#[derive(Debug, Clone)]
pub struct Options {
    pub(crate) fence: bool,
    pub(crate) polling: bool,
    pub(crate) inherit: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { fence: true, polling: false, inherit: false }
    }
}

impl Options {
    /// Sets whether grants carry a fence and files name their holder (default: true).
    ///
    /// With `false`, a lock costs less, and the store does not support inspection. All processes that use a directory should
    /// set the same value: a holder that writes nothing leaves the previous holder's label in the file.
    #[must_use]
    pub fn fence(mut self, fence: bool) -> Self {
        self.fence = fence;
        self
    }

    /// Sets whether waiters poll instead of waiting for notifications (default: false).
    ///
    /// Use it on file systems that do not report all changes, such as a directory shared by virtual machines. Without inotify,
    /// waiters always poll.
    #[must_use]
    pub fn polling(mut self, polling: bool) -> Self {
        self.polling = polling;
        self
    }

    /// Sets whether programs that the process starts while it holds a lock inherit it (default: false).
    ///
    /// A release still frees the lock. But if the process dies without a release, those programs keep the lock until they
    /// end. Use it in a process that holds a lock on behalf of its children.
    #[must_use]
    pub fn inherit(mut self, inherit: bool) -> Self {
        self.inherit = inherit;
        self
    }
}

/// Parses a URL into options and a directory.
pub(crate) fn parse(url: &str) -> Result<(Options, PathBuf)> {
    let rest = match url.split_once(':') {
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("file") => rest,
        _ => return Err(config("not a file: URL: write file:/a/directory")),
    };
    let (path, query) = match rest.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (rest, None),
    };
    let path = match path.strip_prefix("//") {
        Some(local) if local.starts_with('/') => local,
        Some(_) => {
            let message = "a file: URL has no host: write file:/a/directory, or file:a/directory \
                           for a relative path";
            return Err(config(message));
        }
        None => path,
    };
    let bytes = names::decode(path).filter(|bytes| !bytes.contains(&0));
    let Some(bytes) = bytes.filter(|_| !path.contains('#')) else {
        let message = "the path of a file: URL contains an invalid %, # or NUL: write %25 for a percent \
                       sign, %23 for a number sign, %3F for a question mark";
        return Err(config(message));
    };
    if bytes.is_empty() {
        return Err(config("a file: URL needs a directory: write file:/a/directory"));
    }
    Ok((options(query)?, OsString::from_vec(bytes).into()))
}

fn options(query: Option<&str>) -> Result<Options> {
    let mut options = Options::default();
    let mut seen = Vec::new();
    for option in query.into_iter().flat_map(|query| query.split('&')) {
        let (key, value) = option.split_once('=').unwrap_or((option, ""));
        let on = match value {
            "on" => true,
            "off" => false,
            _ => return Err(wrong_option()),
        };
        options = match key {
            _ if seen.contains(&key) => return Err(wrong_option()),
            "fence" => options.fence(on),
            "polling" => options.polling(on),
            "inherit" => options.inherit(on),
            _ => return Err(wrong_option()),
        };
        seen.push(key);
    }
    Ok(options)
}

fn wrong_option() -> Error {
    config(
        "the options of a file: URL are fence, polling and inherit, each once, and on or off: \
         file:/a/directory?polling=on",
    )
}

fn config(message: &str) -> Error {
    Error::new(ErrorKind::Config, message)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_url_has_an_absolute_or_relative_directory() {
        let good = [
            ("file:/run/locks", "/run/locks"),
            ("FILE:/run/locks/", "/run/locks/"),
            ("file:///run/locks", "/run/locks"),
            ("file:locks", "locks"),
            ("file:./a/../locks", "./a/../locks"),
            ("file:/a%20b%3Fc%23d%25", "/a b?c#d%"),
            ("file:/a b", "/a b"),
            ("file:/a:b@c", "/a:b@c"),
        ];
        for (url, dir) in good {
            assert_eq!(parse(url).unwrap().1, Path::new(dir), "{url}");
        }
    }

    #[test]
    fn options_follow_a_question_mark() {
        let shown = |url: &str| format!("{:?}", parse(url).unwrap().0);
        let expected = |fence, polling| {
            format!("Options {{ fence: {fence}, polling: {polling}, inherit: false }}")
        };
        assert_eq!(shown("file:/a"), expected(true, false));
        assert_eq!(shown("file:/a?fence=off"), expected(false, false));
        assert_eq!(shown("file:/a?fence=on&polling=on"), expected(true, true));
        assert!(shown("file:/a?inherit=on").contains("inherit: true"));
    }

    #[test]
    fn the_error_for_an_invalid_url_does_not_contain_the_url() {
        let bad = [
            "file:",
            "file://",
            "file://host/a",
            "file://user:hunter2@host/a",
            "file:/hunter2%",
            "file:/hunter2%2",
            "file:/hunter2%zz",
            "file:/hunter2#a",
            "file:/hunter2%00",
            "file:?fence=off",
            "file:/a?",
            "file:/a?fence",
            "file:/a?fence=",
            "file:/a?fence=hunter2",
            "file:/a?fences=off",
            "file:/a?fence=off&fence=on",
            "file:/a?fence=off&",
            "redis:/hunter2",
            "hunter2",
        ];
        for url in bad {
            let error = parse(url).expect_err(url);
            assert_eq!(error.kind(), ErrorKind::Config, "{url}: {error}");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{url}: {error}");
        }
    }
}
