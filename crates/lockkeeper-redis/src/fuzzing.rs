//! What must hold for any bytes that a server sends. Property tests call these functions, and the targets in `fuzz/`.

use lockkeeper_core::{Error, Kind, Name};
use redis::Value;

use crate::claim::notifications::Mailboxes;
use crate::claim::record;
use crate::client::cluster;
use crate::client::resp::{self, Frame, FrameScanner, INCOMPLETE, Limits, MAX_DEPTH};
use crate::client::settings::Address;
use crate::error::{translate, unexpected, unwrapped};
use crate::inspect::{Record, Snapshot};
use crate::names::KeyTemplate;

/// Scans and parses frames. The first two bytes are options: the limits and the protocol, and the size of the pieces in
/// which the bytes arrive.
///
/// # Panics
///
/// If the scanner depends on how the bytes are divided, disagrees with the parser about the length of a value, or accepts
/// one that is above a limit, or if the parsed value takes more memory than its bytes justify.
pub fn frames(input: &[u8]) {
    let [options, piece, bytes @ ..] = input else { return };
    let limits = match options % 4 {
        0 | 1 => Limits { bytes: 64, values: 8, line: 8 },
        2 => Limits::HANDSHAKE,
        _ => Limits::READY,
    };
    let (is_subscribed, piece) = (options & 4 > 0, usize::from(*piece).max(1));
    let mut bytes = bytes;
    loop {
        let end = FrameScanner::default().end(bytes, limits);
        assert_eq!(in_pieces(bytes, piece, limits).ok(), end.clone().ok(), "divided and at once");
        let Ok(Some(end)) = end else { return };
        assert!((1..=bytes.len().min(limits.bytes)).contains(&end), "a length of {end}");
        let (value, rest) = bytes.split_at(end);
        match resp::parse(value, is_subscribed) {
            Ok(frame) => {
                check(&frame, value.len(), limits);
                assert!(resp::parse(&value[..end - 1], is_subscribed).is_err(), "it is shorter");
            }
            Err(error) => assert!(!error.to_string().contains(INCOMPLETE), "it is longer"),
        }
        bytes = rest;
    }
}

fn in_pieces(bytes: &[u8], piece: usize, limits: Limits) -> redis::RedisResult<Option<usize>> {
    let mut scanner = FrameScanner::default();
    let ends = (piece..bytes.len()).step_by(piece).chain([bytes.len()]);
    for end in ends {
        if let Some(length) = scanner.end(&bytes[..end], limits)? {
            return Ok(Some(length));
        }
    }
    Ok(None)
}

/// The bytes on the heap per byte of a value. The shortest value has three bytes, and a growing vector is at most half empty.
const EXPANSION: usize = 2 * size_of::<Value>().div_ceil(3);

fn check(frame: &Frame, length: usize, limits: Limits) {
    match frame {
        Frame::Reply(value) => {
            let size = Size::of(value);
            assert!(size.values <= limits.values && size.depth <= MAX_DEPTH + 1, "{size:?}");
            assert!(size.heap <= EXPANSION * length, "{size:?} of {length} bytes");
        }
        Frame::Message { channel, message } => assert!(channel.len() + message.len() < length),
        Frame::Other => {}
    }
}

#[derive(Debug)]
struct Size {
    values: usize,
    depth: usize,
    heap: usize,
}

impl Size {
    fn of(value: &Value) -> Self {
        let own =
            |capacity: usize, each: usize| Self { values: 1, depth: 1, heap: capacity * each };
        match value {
            Value::BulkString(bytes) | Value::BigNumber(bytes) => own(bytes.capacity(), 1),
            Value::SimpleString(text) | Value::VerbatimString { text, .. } => {
                own(text.capacity(), 1)
            }
            Value::Array(items) | Value::Set(items) => {
                items.iter().fold(own(items.capacity(), size_of::<Value>()), Self::with)
            }
            Value::Map(pairs) => {
                let items = pairs.iter().flat_map(|(key, value)| [key, value]);
                items.fold(own(pairs.capacity(), 2 * size_of::<Value>()), Self::with)
            }
            _ => own(0, 0),
        }
    }

    fn with(self, item: &Value) -> Self {
        let item = Self::of(item);
        Self {
            values: self.values + item.values,
            depth: self.depth.max(item.depth + 1),
            heap: self.heap + item.heap,
        }
    }
}

/// Reads text that others may have written: values of holder keys, records, messages, keys, replies and errors.
///
/// # Panics
///
/// If an error has more than one line or does not end.
pub fn records(input: &[u8]) {
    if let Ok(text) = std::str::from_utf8(input) {
        record::owner_of(text);
        if let Some(record) = Record::read(text) {
            record.participant(1, Some(1));
        }
        for template in ["lockkeeper:{{name}}", "{name}:lock"] {
            if let Ok(template) = KeyTemplate::parse(template)
                && let Some(name) = template.name_of(text)
                && let Ok(key) = template.holder(&name)
            {
                assert!(text.starts_with(&key), "{text:?} leads to {name:?}, whose key is {key:?}");
            }
        }
    }
    let mailboxes = Mailboxes::default();
    let owner =
        input.split(|byte| *byte == b' ').nth(1).and_then(|owner| std::str::from_utf8(owner).ok());
    if let Some(owner) = owner.and_then(|owner| owner.parse().ok()) {
        mailboxes.add(owner);
    }
    mailboxes.deliver(b"channel", input);
    for is_subscribed in [false, true] {
        if let Ok(Frame::Reply(value)) = resp::parse(input, is_subscribed) {
            reply(value);
        }
    }
}

fn reply(value: Value) {
    for kind in [Kind::Lock, Kind::Semaphore] {
        if let Some(snapshot) = Snapshot::read(&value) {
            snapshot.into_info(&Name::derived("name".into()), kind);
        }
    }
    cluster::ranges(&value, &Address::tcp("host", 1));
    one_line(&unexpected(&value));
    if let Err(error) = value.extract_error() {
        one_line(&translate(unwrapped(error)));
    }
}

fn one_line(error: &Error) {
    let text = error.to_string();
    assert!(text.len() < 2000 && !text.contains(['\n', '\r']), "{text:?}");
}
