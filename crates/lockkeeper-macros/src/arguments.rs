//! What stands in the parentheses of `#[locked(…)]`.

use std::time::Duration;

use lockkeeper_syntax::duration;
use proc_macro2::{Span, TokenStream};
use syn::parse::{ParseStream, Parser};
use syn::{Error, Expr, Ident, LitInt, LitStr, Result, Token};

const OPTIONS: &str =
    "the options are `key`, `keeper`, `mode`, `permits`, `wait`, `ttl` and `reentrant`";

/// The options, checked as far as can be without the function.
pub(crate) struct Options {
    pub(crate) key: LitStr,
    pub(crate) keeper: Option<Expr>,
    pub(crate) kind: Kind,
    pub(crate) wait: Option<Duration>,
    pub(crate) ttl: Option<Duration>,
    pub(crate) reentrant: bool,
}

/// What kind of lock.
pub(crate) enum Kind {
    Exclusive,
    Shared,
    Permits(u32),
}

/// The options as they stand there: each with where it stands.
#[derive(Default)]
struct Given {
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
        let given = (|input: ParseStream<'_>| Given::parse(input)).parse2(tokens)?;
        let Some(key) = given.key else {
            let message =
                "a `#[locked]` function needs a key: `#[locked(key = \"order:{order_id}\")]`";
            return Err(Error::new(Span::call_site(), message));
        };
        let kind = match (&given.mode, &given.permits) {
            (Some(mode), Some(_)) => {
                let message = "a lock has a `mode` and a semaphore has `permits`: give one of them";
                return Err(Error::new(mode.span(), message));
            }
            (Some(mode), None) => match mode.value().as_str() {
                "exclusive" => Kind::Exclusive,
                "shared" => Kind::Shared,
                _ => {
                    let message = "the mode is \"exclusive\" or \"shared\"";
                    return Err(Error::new(mode.span(), message));
                }
            },
            (None, Some(permits)) => match permits.base10_parse() {
                Ok(0) | Err(_) => {
                    let message = "permits are a number from 1 to 4294967295";
                    return Err(Error::new(permits.span(), message));
                }
                Ok(permits) => Kind::Permits(permits),
            },
            (None, None) => Kind::Exclusive,
        };
        let wait = given.wait.as_ref().map(length).transpose()?;
        let ttl = given.ttl.as_ref().map(lease).transpose()?;
        let reentrant = given.reentrant.is_some();
        Ok(Self { key, keeper: given.keeper, kind, wait, ttl, reentrant })
    }
}

impl Given {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let mut given = Self::default();
        while !input.is_empty() {
            let name: Ident = input.parse()?;
            match name.to_string().as_str() {
                "key" => once(&mut given.key, &name, text(input, &name)?)?,
                "keeper" => once(&mut given.keeper, &name, expression(input, &name)?)?,
                "mode" => once(&mut given.mode, &name, text(input, &name)?)?,
                "permits" => {
                    input.parse::<Token![=]>()?;
                    let number = input.parse().map_err(|error| {
                        Error::new(error.span(), "permits are a number: `permits = 4`")
                    })?;
                    once(&mut given.permits, &name, number)?;
                }
                "wait" => once(&mut given.wait, &name, text(input, &name)?)?,
                "ttl" => once(&mut given.ttl, &name, text(input, &name)?)?,
                "reentrant" => once(&mut given.reentrant, &name, name.clone())?,
                other => {
                    let message = format!("no option `{other}`: {OPTIONS}");
                    return Err(Error::new(name.span(), message));
                }
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(given)
    }
}

fn once<T>(place: &mut Option<T>, name: &Ident, value: T) -> Result<()> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(Error::new(name.span(), format!("`{name}` is given twice"))),
    }
}

/// `= "…"`
fn text(input: ParseStream<'_>, name: &Ident) -> Result<LitStr> {
    input.parse::<Token![=]>()?;
    let text = input.parse::<LitStr>();
    text.map_err(|error| {
        Error::new(error.span(), format!("`{name}` is a string: `{name} = \"…\"`"))
    })
}

/// `= "…"`, with an expression inside.
fn expression(input: ParseStream<'_>, name: &Ident) -> Result<Expr> {
    let text = text(input, name)?;
    text.parse().map_err(|error| {
        let message = format!("`{name}` is an expression, as in \"self.keeper\": {error}");
        Error::new(text.span(), message)
    })
}

fn length(text: &LitStr) -> Result<Duration> {
    duration::parse(&text.value()).map_err(|error| Error::new(text.span(), error))
}

/// A ttl: what a keeper refuses is refused here.
fn lease(text: &LitStr) -> Result<Duration> {
    let ttl = length(text)?;
    let years = Duration::from_secs(1000 * 366 * 24 * 60 * 60);
    let fault = if ttl < Duration::from_millis(10) {
        "a ttl is at least 10ms"
    } else if ttl > years {
        "a ttl of more than a thousand years is too long"
    } else {
        return Ok(ttl);
    };
    Err(Error::new(text.span(), fault))
}

#[cfg(test)]
mod tests {
    use quote::quote;

    use super::*;

    fn complaint(tokens: TokenStream) -> String {
        let shown = tokens.to_string();
        let error = Options::parse(tokens).err();
        error.unwrap_or_else(|| panic!("{shown} was taken")).to_string()
    }

    #[test]
    fn options_are_read_in_any_order() {
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
    fn what_is_wrong_with_an_option_is_said() {
        let wrong = [
            (quote!(), "needs a key"),
            (quote!(ttl = "1s"), "needs a key"),
            (quote!(key = 5), "`key` is a string"),
            (quote!(key = "a", name = "b"), "no option `name`"),
            (quote!(key = "a", key = "b"), "`key` is given twice"),
            (quote!(key = "a", mode = "both"), "\"exclusive\" or \"shared\""),
            (quote!(key = "a", mode = "shared", permits = 2), "give one of them"),
            (quote!(key = "a", permits = 0), "from 1 to"),
            (quote!(key = "a", permits = 4294967296), "from 1 to"),
            (quote!(key = "a", permits = "2"), "permits are a number"),
            (quote!(key = "a", wait = 0), "`wait` is a string"),
            (quote!(key = "a", wait = "soon"), "write a duration as"),
            (quote!(key = "a", ttl = "9ms"), "at least 10ms"),
            (quote!(key = "a", ttl = "400000d"), "too long"),
            (quote!(key = "a", keeper = "1 +"), "`keeper` is an expression"),
        ];
        for (tokens, says) in wrong {
            let complaint = complaint(tokens);
            assert!(complaint.contains(says), "{complaint}");
        }
    }
}
