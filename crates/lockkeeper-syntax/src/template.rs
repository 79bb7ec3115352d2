//! Keys with placeholders, such as `order:{order_id}`.

/// A part of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece<P> {
    /// Literal text.
    Text(String),
    /// The parsed text between two braces.
    Placeholder(P),
}

/// Parses a template. Literal braces are doubled, as in `format!`. `placeholder` parses the text between two
/// braces.
///
/// # Errors
///
/// Returns a message for the user if the template is empty, contains NUL or has unmatched braces. Returns the error
/// of `placeholder` if that fails.
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
            return Err("unmatched `}`: write `}}` for a literal brace in the key".to_owned());
        }
        let Some((inside, after)) =
            after.split_once('}').filter(|(inside, _)| !inside.contains('{'))
        else {
            return Err("unmatched `{`: write `{{` for a literal brace in the key".to_owned());
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

    fn parsed(template: &str) -> Result<Vec<Piece<String>>, String> {
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
            assert_eq!(parsed(template), Ok(pieces), "{template}");
        }
    }

    #[test]
    fn doubled_braces_are_literal_braces() {
        assert_eq!(parsed("a{{b}}c"), Ok(vec![text("a{b}c")]));
        assert_eq!(parsed("{{{a}}}"), Ok(vec![text("{"), of("a"), text("}")]));
    }

    #[test]
    fn invalid_templates_are_rejected() {
        for bad in ["", "a\0b", "{", "}", "a{b", "a}b", "{a{b}}", "{a}}", "{{a}", "{refused}"] {
            assert!(parsed(bad).is_err(), "{bad:?} was parsed as {:?}", parsed(bad));
        }
        assert_eq!(parsed("a{refused}b"), Err("refused by the caller".to_owned()));
    }
}
