//! The options of `#[locked(…)]`.

use std::time::Duration;

use proc_macro2::{Span, TokenStream};
use syn::parse::{ParseStream, Parser};
use syn::{Error, Expr, Ident, LitInt, LitStr, Result, Token};

const OPTIONS: &str =
    "the options are `key`, `keeper`, `mode`, `permits`, `wait`, `ttl` and `reentrant`";

/// The validated options. Checks that need the function's signature are in `expand`.
pub(crate) struct Options {
    pub(crate) key: LitStr,
    pub(crate) keeper: Option<Expr>,
    pub(crate) kind: Kind,
    pub(crate) wait: Option<Duration>,
    pub(crate) ttl: Option<Duration>,
    pub(crate) reentrant: bool,
}

/// The kind of lock.
pub(crate) enum Kind {
    Exclusive,
    Shared,
    Permits(u32),
}

/// The options as written, with their spans.
#[derive(Default)]
struct RawOptions {
    key: Option<LitStr>,
    keeper: Option<Expr>,
    mode: Option<LitStr>,
    permits: Option<LitInt>,
    wait: Option<LitStr>,
    ttl: Option<LitStr>,
    reentrant: Option<Ident>,
}

impl Options {
    pub(crate) fn parse(tokens: TokenStream) -> Result<Self> {
        let raw = (|input: ParseStream<'_>| RawOptions::parse(input)).parse2(tokens)?;
        let Some(key) = raw.key else {
            let message =
                "`#[locked]` requires a key, such as `#[locked(key = \"order:{order_id}\")]`";
            return Err(Error::new(Span::call_site(), message));
        };
        let kind = match (&raw.mode, &raw.permits) {
            (Some(mode), Some(_)) => {
                let message = "`mode` is for a lock and `permits` for a semaphore: use only one";
                return Err(Error::new(mode.span(), message));
            }
            (Some(mode), None) => match mode.value().as_str() {
                "exclusive" => Kind::Exclusive,
                "shared" => Kind::Shared,
                _ => {
                    let message = "`mode` must be \"exclusive\" or \"shared\"";
                    return Err(Error::new(mode.span(), message));
                }
            },
            (None, Some(permits)) => match permits.base10_parse() {
                Ok(0) | Err(_) => {
                    let message = "`permits` must be a number from 1 to 4294967295";
                    return Err(Error::new(permits.span(), message));
                }
                Ok(permits) => Kind::Permits(permits),
            },
            (None, None) => Kind::Exclusive,
        };
        let wait = raw.wait.as_ref().map(duration).transpose()?;
        let ttl = raw.ttl.as_ref().map(ttl).transpose()?;
        let reentrant = raw.reentrant.is_some();
        Ok(Self { key, keeper: raw.keeper, kind, wait, ttl, reentrant })
    }
}

impl RawOptions {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let mut raw = Self::default();
        while !input.is_empty() {
            let name: Ident = input.parse()?;
            match name.to_string().as_str() {
                "key" => once(&mut raw.key, &name, text(input, &name)?)?,
                "keeper" => once(&mut raw.keeper, &name, expression(input, &name)?)?,
                "mode" => once(&mut raw.mode, &name, text(input, &name)?)?,
                "permits" => {
                    input.parse::<Token![=]>()?;
                    let number = input.parse().map_err(|error| {
                        Error::new(
                            error.span(),
                            "`permits` must be a number, such as `permits = 4`",
                        )
                    })?;
                    once(&mut raw.permits, &name, number)?;
                }
                "wait" => once(&mut raw.wait, &name, text(input, &name)?)?,
                "ttl" => once(&mut raw.ttl, &name, text(input, &name)?)?,
                "reentrant" => once(&mut raw.reentrant, &name, name.clone())?,
                other => {
                    let message = format!("unknown option `{other}`: {OPTIONS}");
                    return Err(Error::new(name.span(), message));
                }
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(raw)
    }
}

fn once<T>(place: &mut Option<T>, name: &Ident, value: T) -> Result<()> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(Error::new(name.span(), format!("`{name}` is given twice"))),
    }
}

/// Parses `= "…"`.
fn text(input: ParseStream<'_>, name: &Ident) -> Result<LitStr> {
    input.parse::<Token![=]>()?;
    let text = input.parse::<LitStr>();
    text.map_err(|error| {
        Error::new(error.span(), format!("`{name}` must be a string: `{name} = \"…\"`"))
    })
}

/// Parses `= "…"` with an expression inside.
fn expression(input: ParseStream<'_>, name: &Ident) -> Result<Expr> {
    let text = text(input, name)?;
    text.parse().map_err(|error| {
        let message = format!("`{name}` must be an expression, such as \"self.keeper\": {error}");
        Error::new(text.span(), message)
    })
}

fn duration(text: &LitStr) -> Result<Duration> {
    lockkeeper_syntax::duration::parse(&text.value())
        .map_err(|error| Error::new(text.span(), error))
}

/// Parses a TTL, within the limits that a keeper accepts at run time.
fn ttl(text: &LitStr) -> Result<Duration> {
    let ttl = duration(text)?;
    let max = Duration::from_secs(1000 * 366 * 24 * 60 * 60);
    let message = if ttl < Duration::from_millis(10) {
        "`ttl` must be at least 10ms"
    } else if ttl > max {
        "`ttl` must be at most 366000d"
    } else {
        return Ok(ttl);
    };
    Err(Error::new(text.span(), message))
}

#[cfg(test)]
mod tests {
    use quote::quote;

    use super::*;

    fn error_of(tokens: TokenStream) -> String {
        let shown = tokens.to_string();
        let error = Options::parse(tokens).err();
        error.unwrap_or_else(|| panic!("{shown} was accepted")).to_string()
    }

    #[test]
    fn options_are_accepted_in_any_order() {
        let options = Options::parse(quote! {
            reentrant, ttl = "15s", permits = 4, wait = "0s", keeper = "self.keeper", key = "a",
        });
        let options = options.unwrap();
        assert_eq!(options.key.value(), "a");
        assert!(options.keeper.is_some() && options.reentrant);
        assert!(matches!(options.kind, Kind::Permits(4)));
        assert_eq!(
            (options.wait, options.ttl),
            (Some(Duration::ZERO), Some(Duration::from_secs(15)))
        );

        let plain = Options::parse(quote!(key = "a")).unwrap();
        assert!(plain.keeper.is_none() && plain.wait.is_none() && plain.ttl.is_none());
        assert!(matches!(plain.kind, Kind::Exclusive) && !plain.reentrant);
        let shared = Options::parse(quote!(key = "a", mode = "shared")).unwrap();
        assert!(matches!(shared.kind, Kind::Shared));
    }

    #[test]
    fn an_invalid_option_is_an_error_that_names_the_cause() {
        let invalid = [
            (quote!(), "requires a key"),
            (quote!(ttl = "1s"), "requires a key"),
            (quote!(key = 5), "`key` must be a string"),
            (quote!(key = "a", name = "b"), "unknown option `name`"),
            (quote!(key = "a", key = "b"), "`key` is given twice"),
            (quote!(key = "a", mode = "both"), "\"exclusive\" or \"shared\""),
            (quote!(key = "a", mode = "shared", permits = 2), "use only one"),
            (quote!(key = "a", permits = 0), "from 1 to"),
            (quote!(key = "a", permits = 4294967296), "from 1 to"),
            (quote!(key = "a", permits = "2"), "`permits` must be a number"),
            (quote!(key = "a", wait = 0), "`wait` must be a string"),
            (quote!(key = "a", wait = "soon"), "write a duration as"),
            (quote!(key = "a", ttl = "9ms"), "at least 10ms"),
            (quote!(key = "a", ttl = "400000d"), "at most 366000d"),
            (quote!(key = "a", keeper = "1 +"), "`keeper` must be an expression"),
        ];
        for (tokens, expected) in invalid {
            let error = error_of(tokens);
            assert!(error.contains(expected), "{error}");
        }
    }
}
