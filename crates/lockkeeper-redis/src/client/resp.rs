//! RESP: frames are scanned and parsed, commands are written. Rare kinds of values are left to the parser of the redis crate.

use redis::{ErrorKind, RedisError, RedisResult, Value};

/// The maximum nesting of values. Replies to the scripts have a nesting of three.
const MAX_DEPTH: usize = 32;
/// The error for a value that is incomplete.
const INCOMPLETE: &str = "an incomplete value";

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
                limits.check(bytes.len(), 0, bytes.len() - self.at)?;
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
            b'+' => simple_string(self.line()?.ok_or(INCOMPLETE)?)?,
            b'-' | b',' | b'#' | b'(' => {
                self.line()?.ok_or(INCOMPLETE)?;
                self.parse_by_crate(start)?
            }
            b'!' | b'=' => {
                self.blob()?;
                self.parse_by_crate(start)?
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

    /// Parses a rare kind of value. The crate's parser clears a buffer of 8 KiB for each value.
    fn parse_by_crate(&self, start: usize) -> Parsed<Value> {
        let value = redis::parse_redis_value(&self.bytes[start..self.at]);
        value.map_err(|_| "an invalid value")
    }
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

fn simple_string(line: &[u8]) -> Parsed<Value> {
    if line == b"OK" {
        return Ok(Value::Okay);
    }
    let text = std::str::from_utf8(line).map_err(|_| "a simple string that is not UTF-8")?;
    Ok(Value::SimpleString(text.to_owned()))
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn reply(bytes: &[u8]) -> Value {
        match parse(bytes, false) {
            Ok(Frame::Reply(value)) => value,
            other => panic!("{other:?}"),
        }
    }

    fn blob(kind: char, text: &[u8]) -> Vec<u8> {
        [format!("{kind}{}\r\n", text.len()).as_bytes(), text, b"\r\n"].concat()
    }

    /// A random value in the encoding of a server.
    fn encoded() -> impl Strategy<Value = Vec<u8>> {
        let line = |kind: &'static str, text: &'static str| {
            text.prop_map(move |text| format!("{kind}{text}\r\n").into_bytes())
        };
        let bytes = || proptest::collection::vec(any::<u8>(), 0..40);
        let leaf = prop_oneof![
            any::<i64>().prop_map(|number| format!(":{number}\r\n").into_bytes()),
            bytes().prop_map(|text| blob('$', &text)),
            line("+", "[A-Za-z0-9 ]{0,12}"),
            line("-", "(NOSCRIPT|ERR|NOPERM|WRONGTYPE|OOM)( [a-z' ]{0,12})?"),
            line("#", "[tf]"),
            line(",", "-?[0-9]{1,3}\\.[0-9]{1,3}"),
            line("(", "[0-9]{1,30}"),
            Just(b"_\r\n".to_vec()),
            Just(b"$-1\r\n".to_vec()),
            Just(b"*-1\r\n".to_vec()),
            "[a-z ]{0,12}".prop_map(|text| blob('=', format!("txt:{text}").as_bytes())),
            "ERR [a-z ]{0,12}".prop_map(|text| blob('!', text.as_bytes())),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            let many = |kind: char, each: usize| {
                move |items: Vec<Vec<u8>>| {
                    let count = items.len() / each;
                    let head = format!("{kind}{count}\r\n").into_bytes();
                    [head, items[..count * each].concat()].concat()
                }
            };
            let items = || proptest::collection::vec(inner.clone(), 0..6);
            prop_oneof![
                items().prop_map(many('*', 1)),
                items().prop_map(many('~', 1)),
                items().prop_map(many('%', 2)),
            ]
        })
    }

    proptest! {
        #[test]
        fn values_equal_those_of_the_redis_crate(bytes in encoded()) {
            prop_assert_eq!(reply(&bytes), redis::parse_redis_value(&bytes).unwrap());
        }

        #[test]
        fn a_value_is_incomplete_until_its_last_byte_and_ends_there(one in encoded(), two in encoded()) {
            // With a scanner that sees the bytes one by one, and with a new one.
            let mut scanner = FrameScanner::default();
            for end in 0..one.len() {
                prop_assert_eq!(scanner.end(&one[..end], Limits::READY).unwrap(), None);
                prop_assert_eq!(FrameScanner::default().end(&one[..end], Limits::READY).unwrap(), None);
            }
            let both = [one.clone(), two].concat();
            prop_assert_eq!(scanner.end(&both, Limits::READY).unwrap(), Some(one.len()));
            prop_assert_eq!(FrameScanner::default().end(&both, Limits::READY).unwrap(), Some(one.len()));
        }

        #[test]
        fn no_input_makes_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            let _ = parse(&bytes, true);
            let _ = FrameScanner::default().end(&bytes, Limits::READY);
        }

        #[test]
        fn no_corrupted_value_makes_the_parser_panic(
            bytes in encoded(), at in any::<prop::sample::Index>(), byte in any::<u8>(),
        ) {
            let mut bytes = bytes;
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = parse(&bytes, true);
            let _ = FrameScanner::default().end(&bytes, Limits::READY);
        }
    }

    #[test]
    fn a_large_count_reserves_no_memory_before_its_content_arrives() {
        for bytes in ["*1000000\r\n", "%500000\r\n:1\r\n", "$60000000\r\n"] {
            assert_eq!(FrameScanner::default().end(bytes.as_bytes(), Limits::READY).unwrap(), None);
            assert!(parse(bytes.as_bytes(), false).is_err());
        }
        for bytes in ["*2000000000\r\n", "%1000000000\r\n:1\r\n", "$9000000000000000000\r\n"] {
            let error = FrameScanner::default().end(bytes.as_bytes(), Limits::READY).unwrap_err();
            assert!(error.to_string().contains("limit"), "{bytes}: {error}");
        }
    }

    #[test]
    fn invalid_input_is_an_error() {
        let deep = "*1\r\n".repeat(40);
        for bytes in ["HTTP/1.1 400\r\n", "$2\r\nabc\r\n", ":x\r\n", ":1\n", "*x\r\n", &deep] {
            let error = parse(bytes.as_bytes(), false).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Parse, "{bytes:?}");
        }
        for bytes in ["HTTP/1.1 400\r\n", "$x\r\n", ":1\n", "*x\r\n", "*1\r\n?\r\n"] {
            assert!(
                FrameScanner::default().end(bytes.as_bytes(), Limits::READY).is_err(),
                "{bytes:?}"
            );
        }
    }

    #[test]
    fn simple_strings_equal_those_of_the_redis_crate() {
        for bytes in ["+OK\r\n", "+PONG\r\n", "+\r\n", "+ok\r\n", "+QUEUED\r\n", "+é\r\n"] {
            let parsed = redis::parse_redis_value(bytes.as_bytes()).unwrap();
            assert_eq!(reply(bytes.as_bytes()), parsed);
        }
        assert!(parse(b"+\xff\r\n", false).is_err());
        assert!(redis::parse_redis_value(b"+\xff\r\n").is_err());
    }

    #[test]
    fn attributes_are_ignored() {
        let bytes = b"|1\r\n+a\r\n:1\r\n:2\r\n";
        assert_eq!(reply(bytes), Value::Int(2));
        assert_eq!(FrameScanner::default().end(bytes, Limits::READY).unwrap(), Some(bytes.len()));
    }

    #[test]
    fn messages_are_distinguished_from_replies() {
        let frame = |text: &str, subscribed| parse(text.as_bytes(), subscribed).unwrap();
        let message = "3\r\n$7\r\nmessage\r\n$1\r\na\r\n$2\r\nhi\r\n";
        let expected = Frame::Message { channel: b"a".into(), message: b"hi".into() };
        assert_eq!(frame(&format!(">{message}"), false), expected);
        assert_eq!(frame(&format!("*{message}"), true), expected);
        assert!(matches!(frame(&format!("*{message}"), false), Frame::Reply(Value::Array(_))));
        let subscribed = "3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:1\r\n";
        assert!(matches!(frame(&format!(">{subscribed}"), false), Frame::Reply(_)));
        assert!(matches!(frame(&format!("*{subscribed}"), true), Frame::Reply(_)));
        assert_eq!(frame(">2\r\n$10\r\ninvalidate\r\n*0\r\n", false), Frame::Other);
    }

    #[test]
    fn commands_are_written_as_the_redis_crate_writes_them() {
        let mut pipeline = Pipeline::default();
        pipeline.command(|set| {
            set.word("SET").joined(&[b"a ", b"", b"key"]).word(b"\xff\r\n").number(u64::MAX);
        });
        pipeline.command(|time| {
            time.word("TIME");
        });
        let mut set = redis::cmd("SET");
        let set = set.arg("a key").arg(b"\xff\r\n").arg(u64::MAX).get_packed_command();
        let time = redis::cmd("TIME").get_packed_command();
        assert_eq!(pipeline.bytes(), [set, time].concat());
        assert_eq!(pipeline.count(), 2);
    }
}
