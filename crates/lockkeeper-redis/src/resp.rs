//! What a server says, from bytes to values. The redis crate's own parser is given whole values only where they are
//! rare: to the answers of a lock it took longer than everything else that happens to them here.

use redis::{ErrorKind, RedisError, RedisResult, Value};

/// The deepest that values are nested. Ours are by three.
const DEEPEST: usize = 32;
/// A value that is not all there.
const SHORT: &str = "a value without its end";

/// Something that a server has said.
#[derive(Debug, PartialEq)]
pub(crate) enum Said {
    /// The answer to the oldest request that has none yet.
    Answer(Value),
    /// A message on a channel.
    Message { channel: Vec<u8>, message: Vec<u8> },
    /// Something that nobody has asked for.
    Other,
}

type Parsed<T> = Result<T, &'static str>;

fn garbage(what: &'static str) -> RedisError {
    RedisError::from((ErrorKind::Parse, what))
}

/// How large a value may be, with all that it contains. A larger one ends the connection.
///
/// A server, or what answers in its place, must not be able to fill this process's memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) bytes: usize,
    pub(crate) values: usize,
    /// The longest line: a simple string, an error, a number.
    pub(crate) line: usize,
}

impl Limits {
    /// Until the handshake is done. Its longest answers are those to `HELLO`, which lists modules, to
    /// `INFO server` and to `ROLE`, which lists replicas: some 3 KiB.
    pub(crate) const HANDSHAKE: Self = Self { bytes: 16 << 10, values: 1 << 10, line: 4 << 10 };
    /// After the handshake. Inspection of a lock with 100,000 waiters takes some 20 MiB in 300,000 values.
    pub(crate) const READY: Self = Self { bytes: 64 << 20, values: 1 << 20, line: 64 << 10 };

    fn check(self, bytes: usize, values: usize, line: usize) -> RedisResult<()> {
        let what = if bytes > self.bytes {
            "the answer exceeds the size limit"
        } else if values > self.values {
            "the answer exceeds the limit of values"
        } else if line > self.line {
            "a line of the answer exceeds the size limit"
        } else {
            return Ok(());
        };
        Err(garbage(what))
    }
}

/// Finds where a value ends. It goes on where it was when there were fewer bytes, so a long one that comes in many
/// pieces is not looked through once for each of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Skim {
    at: usize,
    /// How many values are still to come.
    open: usize,
    /// How many values have begun.
    begun: usize,
}

impl Default for Skim {
    fn default() -> Self {
        Self { at: 0, open: 1, begun: 0 }
    }
}

impl Skim {
    /// How long the value is that the bytes begin with; `None` if its end is still to come.
    ///
    /// Lengths and counts are checked when they are announced, before any of what they announce is there.
    pub(crate) fn end(&mut self, bytes: &[u8], limits: Limits) -> RedisResult<Option<usize>> {
        while self.open > 0 {
            let Some(kind) = bytes.get(self.at) else { return Ok(None) };
            let mut reader = Reader { bytes, at: self.at + 1 };
            let Some(line) = reader.line().map_err(garbage)? else {
                limits.check(bytes.len(), 0, bytes.len() - self.at)?;
                return Ok(None);
            };
            let count = || number(line).map(usize::try_from).map_err(garbage);
            let (more, skip) = match kind {
                b'$' | b'!' | b'=' => (0, count()?.map_or(0, |length| length.saturating_add(2))),
                b'*' | b'~' | b'>' => (count()?.unwrap_or(0), 0),
                b'%' | b'|' => (count()?.unwrap_or(0).saturating_mul(2), 0),
                b':' | b'_' | b'+' | b'-' | b',' | b'#' | b'(' => (0, 0),
                _ => return Err(garbage("no value begins like that")),
            };
            // Attributes come before the value that they are of.
            self.open = self.open.saturating_add(more) - usize::from(*kind != b'|');
            self.at = reader.at.saturating_add(skip);
            self.begun += 1;
            limits.check(self.at, self.open.saturating_add(self.begun), line.len())?;
        }
        Ok(Some(self.at).filter(|end| *end <= bytes.len()))
    }
}

/// What is said in some bytes, which are those of one value from the first to the last. With RESP2, messages are
/// arrays like others: `listens` says that they are to be expected.
pub(crate) fn parse(bytes: &[u8], listens: bool) -> RedisResult<Said> {
    Reader { bytes, at: 0 }.said(listens).map_err(garbage)
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn said(&mut self, listens: bool) -> Parsed<Said> {
        if self.bytes.first() == Some(&b'>') {
            self.at = 1;
            let items = self.items(1, 0)?.unwrap_or_default();
            return Ok(match items.first() {
                Some(Value::BulkString(kind)) if kind == b"message" => message(items),
                // In RESP3 that is how these are answered.
                Some(Value::BulkString(kind)) if kind == b"subscribe" || kind == b"unsubscribe" => {
                    Said::Answer(Value::Array(items))
                }
                _ => Said::Other,
            });
        }
        let value = self.value(0)?;
        Ok(match value {
            Value::Array(items)
                if listens
                    && matches!(items.first(), Some(Value::BulkString(kind)) if kind == b"message") =>
            {
                message(items)
            }
            value => Said::Answer(value),
        })
    }

    fn value(&mut self, depth: usize) -> Parsed<Value> {
        if depth > DEEPEST {
            return Err("values nested too deeply");
        }
        let start = self.at;
        let kind = *self.bytes.get(start).ok_or(SHORT)?;
        self.at += 1;
        Ok(match kind {
            b':' => Value::Int(number(self.line()?.ok_or(SHORT)?)?),
            b'$' => self.blob()?.map_or(Value::Nil, |bytes| Value::BulkString(bytes.to_vec())),
            b'*' => self.items(1, depth)?.map_or(Value::Nil, Value::Array),
            b'~' => self.items(1, depth)?.map_or(Value::Nil, Value::Set),
            b'%' => Value::Map(pairs(self.items(2, depth)?.unwrap_or_default())),
            b'_' => {
                self.line()?.ok_or(SHORT)?;
                Value::Nil
            }
            // Attributes are beside the answer, and nobody here wants them.
            b'|' => {
                self.items(2, depth)?;
                self.value(depth + 1)?
            }
            b'+' | b'-' | b',' | b'#' | b'(' => {
                self.line()?.ok_or(SHORT)?;
                self.by_the_crate(start)?
            }
            b'!' | b'=' => {
                self.blob()?;
                self.by_the_crate(start)?
            }
            _ => return Err("no value begins like that"),
        })
    }

    /// What stands between here and the end of the line; `None` if that is still to come.
    fn line(&mut self) -> Parsed<Option<&'a [u8]>> {
        let rest = &self.bytes[self.at..];
        let Some(end) = rest.iter().position(|byte| *byte == b'\n') else { return Ok(None) };
        self.at += end + 1;
        rest[..end].strip_suffix(b"\r").map(Some).ok_or("a line that ends too early")
    }

    /// So many bytes, with their number before them; `None` if that is less than none.
    fn blob(&mut self) -> Parsed<Option<&'a [u8]>> {
        let Ok(length) = usize::try_from(number(self.line()?.ok_or(SHORT)?)?) else {
            return Ok(None);
        };
        let rest = &self.bytes[self.at..];
        let end = length.saturating_add(2);
        self.at = self.at.saturating_add(end);
        let text = rest.get(..end).ok_or(SHORT)?.strip_suffix(b"\r\n");
        text.map(Some).ok_or("a text that goes on after its end")
    }

    /// So many times `each` values, with their number before them; `None` if that is less than none.
    fn items(&mut self, each: usize, depth: usize) -> Parsed<Option<Vec<Value>>> {
        let Ok(count) = usize::try_from(number(self.line()?.ok_or(SHORT)?)?) else {
            return Ok(None);
        };
        let count = count.checked_mul(each).ok_or("too many values")?;
        // Each takes some bytes: what is announced need not come.
        let mut items = Vec::with_capacity(count.min((self.bytes.len() - self.at) / 3));
        for _ in 0..count {
            items.push(self.value(depth + 1)?);
        }
        Ok(Some(items))
    }

    fn by_the_crate(&self, start: usize) -> Parsed<Value> {
        let value = redis::parse_redis_value(&self.bytes[start..self.at]);
        value.map_err(|_| "a value that makes no sense")
    }
}

fn message(items: Vec<Value>) -> Said {
    let mut items = items.into_iter().skip(1);
    match (items.next(), items.next()) {
        (Some(Value::BulkString(channel)), Some(Value::BulkString(message))) => {
            Said::Message { channel, message }
        }
        _ => Said::Other,
    }
}

fn pairs(items: Vec<Value>) -> Vec<(Value, Value)> {
    let mut items = items.into_iter();
    std::iter::from_fn(|| items.next().zip(items.next())).collect()
}

fn number(line: &[u8]) -> Parsed<i64> {
    let number = std::str::from_utf8(line).ok().and_then(|line| line.parse().ok());
    number.ok_or("a number that is none")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn answer(bytes: &[u8]) -> Value {
        match parse(bytes, false) {
            Ok(Said::Answer(value)) => value,
            other => panic!("{other:?}"),
        }
    }

    fn blob(kind: char, text: &[u8]) -> Vec<u8> {
        [format!("{kind}{}\r\n", text.len()).as_bytes(), text, b"\r\n"].concat()
    }

    /// A value as a server writes it.
    fn written() -> impl Strategy<Value = Vec<u8>> {
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
        fn values_are_what_the_crate_says_they_are(bytes in written()) {
            prop_assert_eq!(answer(&bytes), redis::parse_redis_value(&bytes).unwrap());
        }

        #[test]
        fn a_value_is_unfinished_until_its_last_byte_and_ends_there(one in written(), two in written()) {
            // With all bytes before it seen one by one, and with none.
            let mut skim = Skim::default();
            for end in 0..one.len() {
                prop_assert_eq!(skim.end(&one[..end], Limits::READY).unwrap(), None);
                prop_assert_eq!(Skim::default().end(&one[..end], Limits::READY).unwrap(), None);
            }
            let both = [one.clone(), two].concat();
            prop_assert_eq!(skim.end(&both, Limits::READY).unwrap(), Some(one.len()));
            prop_assert_eq!(Skim::default().end(&both, Limits::READY).unwrap(), Some(one.len()));
        }

        #[test]
        fn nothing_that_is_said_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            let _ = parse(&bytes, true);
            let _ = Skim::default().end(&bytes, Limits::READY);
        }

        #[test]
        fn nothing_that_is_nearly_right_makes_it_panic(
            bytes in written(), at in any::<prop::sample::Index>(), byte in any::<u8>(),
        ) {
            let mut bytes = bytes;
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = parse(&bytes, true);
            let _ = Skim::default().end(&bytes, Limits::READY);
        }
    }

    #[test]
    fn what_is_announced_takes_no_room_before_it_comes() {
        for bytes in ["*1000000\r\n", "%500000\r\n:1\r\n", "$60000000\r\n"] {
            assert_eq!(Skim::default().end(bytes.as_bytes(), Limits::READY).unwrap(), None);
            assert!(parse(bytes.as_bytes(), false).is_err());
        }
        for bytes in ["*2000000000\r\n", "%1000000000\r\n:1\r\n", "$9000000000000000000\r\n"] {
            let error = Skim::default().end(bytes.as_bytes(), Limits::READY).unwrap_err();
            assert!(error.to_string().contains("limit"), "{bytes}: {error}");
        }
    }

    #[test]
    fn garbage_is_an_error() {
        let deep = "*1\r\n".repeat(40);
        for bytes in ["HTTP/1.1 400\r\n", "$2\r\nabc\r\n", ":x\r\n", ":1\n", "*x\r\n", &deep] {
            let error = parse(bytes.as_bytes(), false).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Parse, "{bytes:?}");
        }
        for bytes in ["HTTP/1.1 400\r\n", "$x\r\n", ":1\n", "*x\r\n", "*1\r\n?\r\n"] {
            assert!(Skim::default().end(bytes.as_bytes(), Limits::READY).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn attributes_are_left_out() {
        let bytes = b"|1\r\n+a\r\n:1\r\n:2\r\n";
        assert_eq!(answer(bytes), Value::Int(2));
        assert_eq!(Skim::default().end(bytes, Limits::READY).unwrap(), Some(bytes.len()));
    }

    #[test]
    fn messages_are_told_from_answers() {
        let said = |text: &str, listens| parse(text.as_bytes(), listens).unwrap();
        let message = "3\r\n$7\r\nmessage\r\n$1\r\na\r\n$2\r\nhi\r\n";
        let heard = Said::Message { channel: b"a".into(), message: b"hi".into() };
        assert_eq!(said(&format!(">{message}"), false), heard);
        assert_eq!(said(&format!("*{message}"), true), heard);
        assert!(matches!(said(&format!("*{message}"), false), Said::Answer(Value::Array(_))));
        let subscribed = "3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:1\r\n";
        assert!(matches!(said(&format!(">{subscribed}"), false), Said::Answer(_)));
        assert!(matches!(said(&format!("*{subscribed}"), true), Said::Answer(_)));
        assert_eq!(said(">2\r\n$10\r\ninvalidate\r\n*0\r\n", false), Said::Other);
    }
}
