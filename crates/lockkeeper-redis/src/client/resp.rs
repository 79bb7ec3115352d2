//! RESP: frames are scanned and parsed, commands are written. Rare kinds of values are left to the parser of the redis crate.

use redis::{ErrorKind, RedisError, RedisResult, Value};

/// The maximum nesting of values. Replies to the scripts have a nesting of three.
pub(crate) const MAX_DEPTH: usize = 32;
/// The error for a value that is incomplete.
pub(crate) const INCOMPLETE: &str = "an incomplete value";

/// A complete value that a server sent.
#[derive(Debug, PartialEq)]
pub(crate) enum Frame {
    /// The reply to the oldest pending command.
    Reply(Value),
    /// A message on a channel.
    Message { channel: Vec<u8>, message: Vec<u8> },
    /// A push of another kind.
    Other,
}

type Parsed<T> = Result<T, &'static str>;

fn invalid(what: &'static str) -> RedisError {
    RedisError::from((ErrorKind::Parse, what))
}

/// The maximum size of a value, including nested values. A larger one closes the connection.
///
/// Limits protect the memory of this process from a broken or malicious server.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) bytes: usize,
    pub(crate) values: usize,
    /// The maximum length of a line: a simple string, an error, a number.
    pub(crate) line: usize,
}

impl Limits {
    /// The limits during the handshake. Its longest replies are those to `HELLO`, which lists modules, to
    /// `INFO server`, and to `ROLE`, which lists replicas: about 3 KiB.
    pub(crate) const HANDSHAKE: Self = Self { bytes: 16 << 10, values: 1 << 10, line: 4 << 10 };
    /// The limits after the handshake. Inspection of a lock with 100,000 waiters returns about 20 MiB in 300,000 values.
    pub(crate) const READY: Self = Self { bytes: 64 << 20, values: 1 << 20, line: 64 << 10 };

    fn check(self, bytes: usize, values: usize, line: usize) -> RedisResult<()> {
        let what = if bytes > self.bytes {
            "the reply exceeds the size limit"
        } else if values > self.values {
            "the reply exceeds the limit on the number of values"
        } else if line > self.line {
            "a line of the reply exceeds the size limit"
        } else {
            return Ok(());
        };
        Err(invalid(what))
    }
}

/// Finds the end of a value. Each call resumes where the last one stopped, so that a value that arrives in pieces is
/// scanned once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FrameScanner {
    at: usize,
    /// The number of values that are still expected.
    open: usize,
    /// The number of values that have been scanned.
    scanned: usize,
}

impl Default for FrameScanner {
    fn default() -> Self {
        Self { at: 0, open: 1, scanned: 0 }
    }
}

impl FrameScanner {
    /// Returns the length of the value at the start of the bytes, or `None` if it is incomplete.
    ///
    /// Lengths and counts are checked against the limits as soon as they are read, before their content arrives.
    pub(crate) fn end(&mut self, bytes: &[u8], limits: Limits) -> RedisResult<Option<usize>> {
        while self.open > 0 {
            let Some(kind) = bytes.get(self.at) else { return Ok(None) };
            let mut reader = Reader { bytes, at: self.at + 1 };
            let Some(line) = reader.line().map_err(invalid)? else {
                // Without a carriage return that may be part of its end, as the length of a complete line.
                let line = &bytes[self.at + 1..];
                let line = line.strip_suffix(b"\r").unwrap_or(line);
                limits.check(bytes.len(), 0, line.len())?;
                return Ok(None);
            };
            let count = || number(line).map(usize::try_from).map_err(invalid);
            let (more, skip) = match kind {
                b'$' | b'!' | b'=' => (0, count()?.map_or(0, |length| length.saturating_add(2))),
                b'*' | b'~' | b'>' => (count()?.unwrap_or(0), 0),
                b'%' | b'|' => (count()?.unwrap_or(0).saturating_mul(2), 0),
                b':' | b'_' | b'+' | b'-' | b',' | b'#' | b'(' => (0, 0),
                _ => return Err(invalid("an unknown type of value")),
            };
            // Attributes precede the value that they belong to.
            self.open = self.open.saturating_add(more) - usize::from(*kind != b'|');
            self.at = reader.at.saturating_add(skip);
            self.scanned += 1;
            limits.check(self.at, self.open.saturating_add(self.scanned), line.len())?;
        }
        Ok(Some(self.at).filter(|end| *end <= bytes.len()))
    }
}

/// Parses the bytes of one complete value. If `is_subscribed`, an array may be a message, as with RESP2.
pub(crate) fn parse(bytes: &[u8], is_subscribed: bool) -> RedisResult<Frame> {
    Reader { bytes, at: 0 }.frame(is_subscribed).map_err(invalid)
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn frame(&mut self, is_subscribed: bool) -> Parsed<Frame> {
        if self.bytes.first() == Some(&b'>') {
            self.at = 1;
            let items = self.items(1, 0)?.unwrap_or_default();
            return Ok(match items.first() {
                Some(Value::BulkString(kind)) if kind == b"message" => message(items),
                // RESP3 replies to these commands with pushes.
                Some(Value::BulkString(kind)) if kind == b"subscribe" || kind == b"unsubscribe" => {
                    Frame::Reply(Value::Array(items))
                }
                _ => Frame::Other,
            });
        }
        let value = self.value(0)?;
        Ok(match value {
            Value::Array(items)
                if is_subscribed
                    && matches!(items.first(), Some(Value::BulkString(kind)) if kind == b"message") =>
            {
                message(items)
            }
            value => Frame::Reply(value),
        })
    }

    fn value(&mut self, depth: usize) -> Parsed<Value> {
        if depth > MAX_DEPTH {
            return Err("the nesting of values exceeds the limit");
        }
        let start = self.at;
        let kind = *self.bytes.get(start).ok_or(INCOMPLETE)?;
        self.at += 1;
        Ok(match kind {
            b':' => Value::Int(number(self.line()?.ok_or(INCOMPLETE)?)?),
            b'$' => self.blob()?.map_or(Value::Nil, |bytes| Value::BulkString(bytes.to_vec())),
            b'*' => self.items(1, depth)?.map_or(Value::Nil, Value::Array),
            b'~' => self.items(1, depth)?.map_or(Value::Nil, Value::Set),
            b'%' => Value::Map(pairs(self.items(2, depth)?.unwrap_or_default())),
            b'_' => {
                self.line()?.ok_or(INCOMPLETE)?;
                Value::Nil
            }
            // Attributes of a reply are ignored.
            b'|' => {
                self.items(2, depth)?;
                self.value(depth + 1)?
            }
            b'-' => {
                // A server cuts the arguments that it quotes, also within a character.
                let line = String::from_utf8_lossy(self.line()?.ok_or(INCOMPLETE)?);
                parse_by_crate(format!("-{line}\r\n").as_bytes())?
            }
            // Not by the crate, whose parser clears a buffer of 8 KiB for each value: `SET` replies with this.
            b'+' => match std::str::from_utf8(self.line()?.ok_or(INCOMPLETE)?) {
                Ok("OK") => Value::Okay,
                Ok(text) => Value::SimpleString(text.to_owned()),
                Err(_) => return Err("an invalid value"),
            },
            b',' | b'#' | b'(' => {
                self.line()?.ok_or(INCOMPLETE)?;
                parse_by_crate(&self.bytes[start..self.at])?
            }
            b'!' | b'=' => {
                self.blob()?;
                parse_by_crate(&self.bytes[start..self.at])?
            }
            _ => return Err("an unknown type of value"),
        })
    }

    /// Reads the rest of the line. Returns `None` if it is incomplete.
    fn line(&mut self) -> Parsed<Option<&'a [u8]>> {
        let rest = &self.bytes[self.at..];
        let Some(end) = rest.iter().position(|byte| *byte == b'\n') else { return Ok(None) };
        self.at += end + 1;
        rest[..end].strip_suffix(b"\r").map(Some).ok_or("a line without a carriage return")
    }

    /// Reads bytes that are preceded by their length. Returns `None` if the length is negative (null).
    fn blob(&mut self) -> Parsed<Option<&'a [u8]>> {
        let Ok(length) = usize::try_from(number(self.line()?.ok_or(INCOMPLETE)?)?) else {
            return Ok(None);
        };
        let rest = &self.bytes[self.at..];
        let end = length.saturating_add(2);
        self.at = self.at.saturating_add(end);
        let text = rest.get(..end).ok_or(INCOMPLETE)?.strip_suffix(b"\r\n");
        text.map(Some).ok_or("a bulk string that is longer than its length")
    }

    /// Reads a count and `each` values per count. Returns `None` if the count is negative (null).
    fn items(&mut self, each: usize, depth: usize) -> Parsed<Option<Vec<Value>>> {
        let Ok(count) = usize::try_from(number(self.line()?.ok_or(INCOMPLETE)?)?) else {
            return Ok(None);
        };
        let count = count.checked_mul(each).ok_or("too many values")?;
        // Each value takes at least three bytes. The count alone must not reserve memory.
        let mut items = Vec::with_capacity(count.min((self.bytes.len() - self.at) / 3));
        for _ in 0..count {
            items.push(self.value(depth + 1)?);
        }
        Ok(Some(items))
    }
}

fn parse_by_crate(bytes: &[u8]) -> Parsed<Value> {
    redis::parse_redis_value(bytes).map_err(|_| "an invalid value")
}

fn message(items: Vec<Value>) -> Frame {
    let mut items = items.into_iter().skip(1);
    match (items.next(), items.next()) {
        (Some(Value::BulkString(channel)), Some(Value::BulkString(message))) => {
            Frame::Message { channel, message }
        }
        _ => Frame::Other,
    }
}

fn pairs(items: Vec<Value>) -> Vec<(Value, Value)> {
    let mut items = items.into_iter();
    std::iter::from_fn(|| items.next().zip(items.next())).collect()
}

fn number(line: &[u8]) -> Parsed<i64> {
    let number = std::str::from_utf8(line).ok().and_then(|line| line.parse().ok());
    number.ok_or("an invalid number")
}

/// Several commands in one write. Their replies arrive in the same order.
#[derive(Debug, Default)]
pub(crate) struct Pipeline {
    bytes: Vec<u8>,
    count: usize,
    /// The words of the command that is being added.
    words: Words,
}

impl Pipeline {
    /// Adds the command whose words `add` adds.
    pub(crate) fn command(&mut self, add: impl FnOnce(&mut Words)) {
        add(&mut self.words);
        length(&mut self.bytes, b'*', std::mem::take(&mut self.words.count));
        self.bytes.append(&mut self.words.bytes);
        self.count += 1;
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the number of replies to expect.
    pub(super) fn count(&self) -> usize {
        self.count
    }
}

/// The words of a command.
#[derive(Debug, Default)]
pub(crate) struct Words {
    bytes: Vec<u8>,
    count: usize,
}

impl Words {
    pub(crate) fn word(&mut self, word: impl AsRef<[u8]>) -> &mut Self {
        self.joined(&[word.as_ref()])
    }

    /// Adds one word that consists of these parts.
    pub(crate) fn joined(&mut self, parts: &[&[u8]]) -> &mut Self {
        self.count += 1;
        length(&mut self.bytes, b'$', parts.iter().map(|part| part.len()).sum());
        for part in parts {
            self.bytes.extend_from_slice(part);
        }
        self.bytes.extend_from_slice(b"\r\n");
        self
    }

    pub(crate) fn number(&mut self, number: impl itoa::Integer) -> &mut Self {
        self.word(itoa::Buffer::new().format(number))
    }
}

fn length(bytes: &mut Vec<u8>, kind: u8, length: usize) {
    bytes.push(kind);
    bytes.extend_from_slice(itoa::Buffer::new().format(length).as_bytes());
    bytes.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests;
