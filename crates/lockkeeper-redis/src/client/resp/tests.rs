//! Frames, valid and hostile.

use proptest::prelude::*;

use super::*;
use crate::fuzzing;

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

/// Pieces of frames in any order, with lengths that are wrong, negative, too large or missing.
fn hostile() -> impl Strategy<Value = Vec<u8>> {
    let length = prop_oneof![
        4 => (0..5_i64).prop_map(|length| length.to_string()),
        1 => proptest::sample::select(vec![
            "", "-", "-1", "-0", "+1", " 1", "1 ", "01", "x", "1.5", "?", "16", "256", "257", "1048576", "67108864",
            "9223372036854775807", "-9223372036854775808", "9223372036854775808", "18446744073709551615",
        ]).prop_map(str::to_owned),
    ];
    let head = (proptest::sample::select(b"$*~%|>!=:_+-,#(?".to_vec()), length, any::<bool>());
    let piece = prop_oneof![
        6 => head.prop_map(|(kind, length, complete)| {
            format!("{}{length}{}", char::from(kind), if complete { "\r\n" } else { "" }).into_bytes()
        }),
        2 => encoded(),
        1 => proptest::collection::vec(any::<u8>(), 0..40),
        1 => proptest::sample::select(vec!["\r\n", "\r", "\n", "\r\r\n", "\0", "message", "*1\r\n*1\r\n*1\r\n"])
            .prop_map(|text| text.as_bytes().to_vec()),
    ];
    proptest::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

/// Words of records, messages, keys and errors in any order.
fn text() -> impl Strategy<Value = Vec<u8>> {
    let word = prop_oneof![
        proptest::sample::select(vec![
            "0123456789abcdef0123456789abcdef",
            "x",
            "s",
            "p",
            "-",
            "0",
            "1",
            "18446744073709551615",
            "granted",
            "look",
            "free",
            "(readers)",
            "",
            "lockkeeper:{a}",
            "lockkeeper:{%7D}:q",
            "a:lock",
            "%",
            "é",
            "@user_script:1:",
            "-ERR",
            "-WRONGTYPE",
            "-FENCEAHEAD",
            "\r\n",
        ])
        .prop_map(str::to_owned),
        any::<String>(),
    ];
    proptest::collection::vec(word, 0..14).prop_map(|words| words.join(" ").into_bytes())
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
    fn scanner_and_parser_agree_on_hostile_input(
        options in any::<u8>(), piece in 0..20_u8, bytes in hostile(),
    ) {
        fuzzing::frames(&[&[options, piece], &*bytes].concat());
    }

    #[test]
    fn scanner_and_parser_agree_on_corrupted_values(
        options in any::<u8>(), piece in 0..20_u8, bytes in encoded(),
        at in any::<prop::sample::Index>(), byte in any::<u8>(),
    ) {
        let mut bytes = bytes;
        let at = at.index(bytes.len());
        bytes[at] = byte;
        fuzzing::frames(&[&[options, piece], &*bytes].concat());
    }

    #[test]
    fn hostile_replies_and_messages_are_read_without_a_panic(bytes in prop_oneof![hostile(), text()]) {
        fuzzing::records(&bytes);
    }
}

#[test]
fn a_line_may_be_as_long_as_the_limit_also_if_it_arrives_in_pieces() {
    let line = |length| format!("+{}\r\n", "x".repeat(length)).into_bytes();
    let limit = Limits::HANDSHAKE.line;
    let scan =
        |bytes: &[u8], end: usize| FrameScanner::default().end(&bytes[..end], Limits::HANDSHAKE);
    let longest = line(limit);
    for end in limit - 1..longest.len() {
        assert_eq!(scan(&longest, end).unwrap(), None);
    }
    assert_eq!(scan(&longest, longest.len()).unwrap(), Some(longest.len()));
    let longer = line(limit + 1);
    for end in limit + 2..=longer.len() {
        assert!(scan(&longer, end).unwrap_err().to_string().contains("limit"), "{end}");
    }
}

#[test]
fn nesting_up_to_the_limit_is_parsed_and_the_stack_does_not_grow_with_more() {
    for header in ["*1\r\n", "~1\r\n", "%1\r\n:1\r\n", "|1\r\n:1\r\n:1\r\n"] {
        let nested = |depth: usize| header.repeat(depth) + ":1\r\n";
        for (depth, is_valid) in [(MAX_DEPTH, true), (MAX_DEPTH + 1, false), (100_000, false)] {
            let bytes = nested(depth);
            let end = FrameScanner::default().end(bytes.as_bytes(), Limits::READY).unwrap();
            assert_eq!(end, Some(bytes.len()), "{header:?} {depth}");
            assert_eq!(parse(bytes.as_bytes(), false).is_ok(), is_valid, "{header:?} {depth}");
        }
    }
}

#[test]
fn a_push_within_a_value_is_invalid() {
    for bytes in ["*1\r\n>1\r\n+a\r\n", "|1\r\n+a\r\n+b\r\n>1\r\n+a\r\n", ">1\r\n>1\r\n+a\r\n"] {
        let end = FrameScanner::default().end(bytes.as_bytes(), Limits::READY).unwrap();
        assert_eq!(end, Some(bytes.len()), "{bytes:?}");
        assert!(parse(bytes.as_bytes(), false).is_err(), "{bytes:?}");
    }
}

#[test]
fn a_negative_length_is_a_null_or_invalid_and_never_skips_bytes() {
    for kind in "$*~%|>!=".chars() {
        for length in ["-1", "-2", "-9223372036854775808"] {
            let bytes = format!("{kind}{length}\r\n:1\r\n");
            let end =
                FrameScanner::default().end(bytes.as_bytes(), Limits::READY).unwrap().unwrap();
            // An attribute precedes its value.
            assert_eq!(end, bytes.len() - if kind == '|' { 0 } else { 4 }, "{bytes:?}");
            assert_eq!(
                parse(&bytes.as_bytes()[..end], false).is_err(),
                "!=".contains(kind),
                "{bytes:?}"
            );
        }
    }
}

/// Redis quotes up to 128 bytes of the arguments of an unknown command.
#[test]
fn an_error_that_quotes_half_a_character_is_an_error_reply() {
    let Value::ServerError(error) = reply(b"-ERR unknown command 'ab\xc3'\r\n") else { panic!() };
    assert_eq!(error.details(), Some("unknown command 'ab\u{fffd}'"));
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
        assert!(FrameScanner::default().end(bytes.as_bytes(), Limits::READY).is_err(), "{bytes:?}");
    }
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
