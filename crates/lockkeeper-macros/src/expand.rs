//! The expansion of `#[locked]`.

use std::time::Duration;

use lockkeeper_syntax::template::Piece;
use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::visit::Visit;
use syn::visit_mut::VisitMut;
use syn::{
    AttrStyle, Attribute, Error, FnArg, Ident, ItemFn, LitStr, Member, PatIdent, Result,
    ReturnType, Safety, Signature, Type,
};

use crate::options::{Kind, Options};
use crate::template::{self, Argument};

/// Returns the function with its body under a lock. On error it returns the error and the original function,
/// so that no further errors follow from its absence.
pub(crate) fn locked(options: TokenStream, item: &TokenStream) -> TokenStream {
    let options = Options::parse(options);
    let function = syn::parse2::<ItemFn>(item.clone()).map_err(|error| {
        let message = "`#[locked]` applies only to functions and methods with a body";
        Error::new(error.span(), message)
    });
    let expanded = match (options, function) {
        (Ok(options), Ok(function)) => expand(&options, function),
        (Err(mut error), Err(other)) => {
            error.combine(other);
            Err(error)
        }
        (Err(error), _) | (_, Err(error)) => Err(error),
    };
    expanded.unwrap_or_else(|error| {
        let error = error.into_compile_error();
        quote!(#error #item)
    })
}

fn expand(options: &Options, function: ItemFn) -> Result<TokenStream> {
    let ItemFn { attrs, vis, modifiers: _, sig, block } = function;
    let output = check(&sig)?;
    let key = key(&options.key, &sig)?;
    let lock = wanted(options, &key);
    let wanted = Ident::new("wanted", Span::mixed_site());
    let (inner, outer): (Vec<Attribute>, Vec<Attribute>) =
        attrs.into_iter().partition(|attr| matches!(attr.style, AttrStyle::Inner(_)));

    let runner = match (sig.asyncness.is_some(), options.reentrant) {
        (true, false) => "run",
        (true, true) => "run_reentrant",
        (false, false) => "run_blocking",
        (false, true) => "run_blocking_reentrant",
    };
    // Compiler errors about the return type point to it.
    let runner_span = output.span().resolved_at(Span::mixed_site());
    let runner = Ident::new(runner, runner_span);
    let runner = quote_spanned!(runner_span=> ::lockkeeper::__private::#runner);
    let awaited = quote_spanned!(runner_span=> .await);
    let (body, output) = (Ident::new("body", runner_span), nameable(output));
    let body = if sig.asyncness.is_some() {
        // Statements, not the block: a block around a one-line body would trigger `unused_braces`.
        let statements = &block.stmts;
        quote! {
            let #body = ::core::pin::pin!(::core::option::Option::Some(async move {
                // Fixes the output type of the async block, for `?` in the body.
                #[allow(
                    unknown_lints,
                    unreachable_code,
                    clippy::diverging_sub_expression,
                    clippy::empty_loop,
                    clippy::let_unit_value,
                    clippy::let_with_type_underscore,
                    clippy::needless_return,
                    clippy::unreachable
                )]
                if false {
                    let returned: #output = loop {};
                    return returned;
                }
                #(#statements)*
            }));
            #runner(#wanted, #body) #awaited
        }
    } else {
        quote!(#runner(#wanted, move || -> #output #block))
    };
    Ok(quote! {
        #(#outer)*
        #vis #sig {
            #(#inner)*
            // A separate statement: temporaries that borrow the arguments are dropped before the body.
            let #wanted = #lock;
            #body
        }
    })
}

/// Returns the function's return type, or an error if the function cannot be `#[locked]`.
fn check(sig: &Signature) -> Result<&Type> {
    if let Some(constness) = &sig.constness {
        let message = "a `const fn` cannot be `#[locked]`: a lock is acquired at run time";
        return Err(Error::new(constness.span(), message));
    }
    if !matches!(sig.safety, Safety::Default) {
        let message = "an `unsafe fn` cannot be `#[locked]`: put the attribute on a safe function that calls it";
        return Err(Error::new(sig.safety.span(), message));
    }
    let result = "a `#[locked]` function must return a `Result` whose error implements \
                  `From<lockkeeper::Error>`: the acquire may fail, or the lock may be lost";
    match &sig.output {
        ReturnType::Default => Err(Error::new(sig.ident.span(), result)),
        ReturnType::Type(_, output) if is_future(output) => {
            let message = "a `#[locked]` function cannot return a future: make it an `async fn` \
                           (with `#[async_trait]`: put `#[locked]` on an `async fn` that the method calls)";
            Err(Error::new(output.span(), message))
        }
        ReturnType::Type(_, output) => match &**output {
            Type::Tuple(_) | Type::Never(_) | Type::Reference(_) | Type::ImplTrait(_) => {
                Err(Error::new(output.span(), result))
            }
            _ => Ok(output),
        },
    }
}

/// Returns whether a type looks like a future: `impl Future` or a boxed one.
fn is_future(output: &Type) -> bool {
    match output {
        Type::ImplTrait(_) => output.to_token_stream().to_string().contains("Future"),
        Type::Path(path) => {
            let last = path.path.segments.last();
            last.is_some_and(|last| last.ident == "Pin" || last.ident == "BoxFuture")
        }
        _ => false,
    }
}

/// Replaces each `impl Trait` by `_`, because a function body cannot name it.
fn nameable(output: &Type) -> Type {
    struct Infer;
    impl VisitMut for Infer {
        fn visit_type_mut(&mut self, place: &mut Type) {
            if matches!(place, Type::ImplTrait(_)) {
                *place = syn::parse_quote!(_);
            } else {
                syn::visit_mut::visit_type_mut(self, place);
            }
        }
    }
    let mut output = output.clone();
    Infer.visit_type_mut(&mut output);
    output
}

/// Returns an expression that creates the `Wanted` lock.
fn wanted(options: &Options, key: &TokenStream) -> TokenStream {
    let kind = match options.kind {
        Kind::Exclusive => None,
        Kind::Shared => Some(quote!(.shared())),
        Kind::Permits(permits) => Some(quote!(.permits(#permits))),
    };
    // Hygiene keeps this name apart from the function's arguments.
    let found = Ident::new("keeper", Span::mixed_site());
    let parts = |duration: Duration| (duration.as_secs(), duration.subsec_nanos());
    let wait = options.wait.map(parts).map(|(secs, nanos)| quote!(.wait(#secs, #nanos)));
    let ttl = options.ttl.map(parts).map(|(secs, nanos)| quote!(.ttl(#secs, #nanos)));
    let of = |keeper: TokenStream| quote!(::lockkeeper::__private::Wanted::new(#keeper, #key) #kind #wait #ttl);
    let Some(keeper) = &options.keeper else {
        let wanted = of(quote!(#found));
        return quote!(::lockkeeper::__private::installed().map(|#found| #wanted));
    };
    // The reference coerces from a keeper, a reference to one, or a smart pointer to one.
    let wanted = of(quote_spanned!(keeper.span()=> &(#keeper)));
    quote!(::core::result::Result::Ok(#wanted))
}

/// Returns an expression for the name of the lock.
fn key(key: &LitStr, sig: &Signature) -> Result<TokenStream> {
    let wrong = |message: String| Error::new(key.span(), message);
    let pieces = template::parse(&key.value()).map_err(wrong)?;
    if let [Piece::Text(text)] = &pieces[..] {
        return Ok(quote!(#text));
    }
    let arguments = Arguments::of(sig);
    let (mut format, mut values) = (String::new(), Vec::new());
    for piece in pieces {
        match piece {
            Piece::Text(text) => format.push_str(&text.replace('{', "{{").replace('}', "}}")),
            Piece::Placeholder(Argument { name, field }) => {
                let argument =
                    arguments.find(&name).ok_or_else(|| wrong(arguments.unknown(&name)))?;
                // Errors point to the key, while the name resolves to the argument.
                let mut argument = argument.clone();
                argument.set_span(key.span().resolved_at(argument.span()));
                let field = field.map(|field| member(&field, key.span())).transpose()?;
                let field = field.map(|field| quote_spanned!(key.span()=> .#field));
                values.push(quote!(#argument #field));
                format.push_str("{}");
            }
        }
    }
    let format = LitStr::new(&format, key.span());
    Ok(quote_spanned!(key.span()=> ::std::format!(#format #(, #values)*)))
}

/// Parses a field's name or index.
fn member(field: &str, span: Span) -> Result<Member> {
    let plain = syn::parse_str(field);
    let mut member: Member =
        plain.or_else(|_| syn::parse_str(&format!("r#{field}"))).map_err(|_| {
            Error::new(span, format!("`{field}` in the key is not the name of a field"))
        })?;
    match &mut member {
        Member::Named(name) => name.set_span(span),
        Member::Unnamed(index) => index.span = span,
    }
    Ok(member)
}

/// The names of a function's arguments.
struct Arguments(Vec<Ident>);

impl Arguments {
    fn of(sig: &Signature) -> Self {
        struct Names(Vec<Ident>);
        impl<'ast> Visit<'ast> for Names {
            fn visit_pat_ident(&mut self, pat: &'ast PatIdent) {
                self.0.push(pat.ident.clone());
                syn::visit::visit_pat_ident(self, pat);
            }
        }
        let mut names = Names(Vec::new());
        for input in &sig.inputs {
            match input {
                FnArg::Receiver(receiver) => {
                    names.0.push(Ident::new("self", receiver.self_token.span));
                }
                FnArg::Typed(argument) => names.visit_pat(&argument.pat),
            }
        }
        Self(names.0)
    }

    fn find(&self, name: &str) -> Option<&Ident> {
        self.0.iter().find(|argument| argument.unraw() == name)
    }

    /// Returns the error message for an unknown argument.
    fn unknown(&self, name: &str) -> String {
        let known = match &self.0[..] {
            [] => "the function has no arguments".to_owned(),
            arguments => {
                let names = arguments.iter().map(|argument| format!("`{}`", argument.unraw()));
                format!("the arguments are {}", names.collect::<Vec<_>>().join(", "))
            }
        };
        format!("unknown argument `{name}` in the key: {known}")
    }
}
