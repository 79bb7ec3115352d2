//! Keys with placeholders in them: `order:{order_id}`.

/// A part of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece<P> {
    /// Text, as it is.
    Text(String),
    /// What stood between braces.
    Placeholder(P),
}

/// Parses a template. Braces that stand for themselves are doubled, as in `format!`. `placeholder` reads what stands
/// between braces.
///
/// # Errors
///
/// What is wrong with it, in words: it is empty, has a NUL, or its braces do not match. Or the error of `placeholder`.
///
/// # Examples
///
/// ```
/// use lockkeeper_syntax::template::{Piece, parse};
///
/// let pieces = parse("order:{id}", |name| Ok(name.to_owned()));
/// let expected = [Piece::Text("order:".to_owned()), Piece::Placeholder("id".to_owned())];
/// assert_eq!(pieces.as_deref(), Ok(&expected[..]));
/// ```
pub fn parse<P>(
    text: &str,
    mut placeholder: impl FnMut(&str) -> Result<P, String>,
) -> Result<Vec<Piece<P>>, String> {
    if text.is_empty() {
        return Err("a key must not be empty".to_owned());
    }
    if text.contains('\0') {
        return Err("a key must not contain NUL".to_owned());
    }
    let (mut pieces, mut plain) = (Vec::new(), String::new());
    let mut rest = text;
    while let Some(at) = rest.find(['{', '}']) {
        plain.push_str(&rest[..at]);
        let (brace, after) = rest[at..].split_at(1);
        if after.starts_with(brace) {
            plain.push_str(brace);
            rest = &after[1..];
            continue;
        }
        if brace == "}" {
            return Err("a `}` without a `{`: write `}}` for a brace in the key".to_owned());
        }
        let Some((inside, after)) =
            after.split_once('}').filter(|(inside, _)| !inside.contains('{'))
        else {
            return Err("a `{` without a `}`: write `{{` for a brace in the key".to_owned());
        };
        if !plain.is_empty() {
            pieces.push(Piece::Text(std::mem::take(&mut plain)));
        }
        pieces.push(Piece::Placeholder(placeholder(inside)?));
        rest = after;
    }
    plain.push_str(rest);
    if !plain.is_empty() {
        pieces.push(Piece::Text(plain));
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(template: &str) -> Result<Vec<Piece<String>>, String> {
        parse(template, |inside| match inside {
            "refused" => Err("refused by the caller".to_owned()),
            inside => Ok(inside.to_owned()),
        })
    }

    fn text(text: &str) -> Piece<String> {
        Piece::Text(text.to_owned())
    }

    fn of(name: &str) -> Piece<String> {
        Piece::Placeholder(name.to_owned())
    }

    #[test]
    fn a_template_is_text_with_placeholders_in_braces() {
        let cases = [
            ("orders", vec![text("orders")]),
            ("order:{id}", vec![text("order:"), of("id")]),
            ("{a}{b.c}", vec![of("a"), of("b.c")]),
            ("{größe}/🔒", vec![of("größe"), text("/🔒")]),
            ("{}", vec![of("")]),
        ];
        for (template, pieces) in cases {
            assert_eq!(read(template), Ok(pieces), "{template}");
        }
    }

    #[test]
    fn doubled_braces_are_braces() {
        assert_eq!(read("a{{b}}c"), Ok(vec![text("a{b}c")]));
        assert_eq!(read("{{{a}}}"), Ok(vec![text("{"), of("a"), text("}")]));
    }

    #[test]
    fn what_is_no_template_is_refused() {
        for bad in ["", "a\0b", "{", "}", "a{b", "a}b", "{a{b}}", "{a}}", "{{a}", "{refused}"] {
            assert!(read(bad).is_err(), "{bad:?} was taken for {:?}", read(bad));
        }
        assert_eq!(read("a{refused}b"), Err("refused by the caller".to_owned()));
    }
}
