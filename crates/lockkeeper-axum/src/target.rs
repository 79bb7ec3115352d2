//! Which requests a layer is for, and what name each of them is about.

use std::fmt;
use std::sync::Arc;

use axum::extract::rejection::RawPathParamsRejection;
use axum::extract::{FromRequestParts, RawPathParams};
use axum::http::Method;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use lockkeeper_core::BoxFuture;
use lockkeeper_syntax::template::{self, Piece};

use crate::problem::{Reason, Refusal};

/// A layer that does not know yet what to lock: give it a key, and it is one.
#[derive(Debug, Clone, Copy)]
pub struct NoKey;

/// What a layer locks: a function of the handler's extractors or of the request, or a template over path parameters.
#[derive(Clone)]
pub struct Key(Source);

#[derive(Clone)]
enum Source {
    Extractor(Arc<Extract>),
    Template(Arc<Template>),
    Function(Arc<Function>),
}

/// Returns the name, or the extractor's rejection.
type Extract =
    dyn for<'a> Fn(&'a mut Parts) -> BoxFuture<'a, Result<String, Response>> + Send + Sync;
type Function = dyn Fn(&Parts) -> Option<String> + Send + Sync;

#[derive(Debug)]
struct Template {
    /// As it was written, to be told about.
    text: String,
    pieces: Vec<Piece<String>>,
}

impl Key {
    /// # Panics
    ///
    /// If it is no template.
    #[track_caller]
    pub(crate) fn template(text: &str) -> Self {
        match parse(text) {
            Ok(pieces) => {
                Self(Source::Template(Arc::new(Template { text: text.to_owned(), pieces })))
            }
            Err(fault) => panic!("the key {text:?} is no template: {fault}"),
        }
    }

    pub(crate) fn function(
        function: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        Self(Source::Function(Arc::new(function)))
    }

    pub(crate) fn extractor<E, S>(
        state: S,
        key: impl Fn(E) -> String + Send + Sync + 'static,
    ) -> Self
    where
        E: FromRequestParts<S> + 'static,
        S: Send + Sync + 'static,
    {
        let shared = Arc::new((state, key));
        Self(Source::Extractor(Arc::new(move |parts: &mut Parts| {
            let shared = shared.clone();
            Box::pin(async move {
                let (state, key) = &*shared;
                let extracted = E::from_request_parts(parts, state).await;
                extracted.map(key).map_err(IntoResponse::into_response)
            })
        })))
    }

    /// The name that a request is about; `None` if it is about none.
    async fn name(&self, parts: &mut Parts) -> Result<Option<String>, Response> {
        match &self.0 {
            Source::Extractor(extract) => extract(parts).await.map(Some),
            Source::Function(function) => Ok(function(parts)),
            Source::Template(template) => match template.fill_in(parts).await {
                Ok(name) => Ok(Some(name)),
                Err(refusal) => Err(refusal.into_response()),
            },
        }
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Source::Template(template) => fmt::Debug::fmt(&template.text, f),
            Source::Extractor(_) => f.write_str("a function of extractors"),
            Source::Function(_) => f.write_str("a function"),
        }
    }
}

/// Returns the pieces of a template, or what is wrong with it.
fn parse(text: &str) -> Result<Vec<Piece<String>>, String> {
    template::parse(text, |name| {
        // In a route, a parameter for the rest of the path is written with a star, which is not part of its name.
        if name.is_empty() || name.starts_with('*') || name.trim() != name {
            let fault = "between braces stands the name of a path parameter, and nothing else";
            return Err(fault.to_owned());
        }
        Ok(name.to_owned())
    })
}

const MISSING: &str =
    "the route has no such path parameter: put the layer on routes that have it, with route_layer";
/// It can be nested in another route that has it, too. Which of the two the handler takes is not known here.
const TWICE: &str = "the route has that path parameter twice: give them different names";

impl Template {
    async fn fill_in(&self, parts: &mut Parts) -> Result<String, Refusal> {
        let mut name = String::with_capacity(self.text.len() + 16);
        let mut parameters = None;
        for piece in &self.pieces {
            match piece {
                Piece::Text(text) => name.push_str(text),
                Piece::Placeholder(parameter) => {
                    if parameters.is_none() {
                        parameters = Some(path_parameters(parts, &self.text).await?);
                    }
                    let all = parameters.iter().flatten();
                    let mut values = all.filter(|(name, _)| name == parameter);
                    match (values.next(), values.next()) {
                        (Some((_, value)), None) => name.push_str(value),
                        (None, _) => {
                            return Err(self.broken(parameter, parts, MISSING));
                        }
                        (Some(_), Some(_)) => {
                            return Err(self.broken(parameter, parts, TWICE));
                        }
                    }
                }
            }
        }
        Ok(name)
    }

    fn broken(&self, parameter: &str, parts: &Parts, why: &str) -> Refusal {
        tracing::error!(key = self.text, parameter, path = parts.uri.path(), "{why}");
        Refusal::new(Reason::Broken, None)
    }
}

async fn path_parameters(parts: &mut Parts, key: &str) -> Result<Vec<(String, String)>, Refusal> {
    match RawPathParams::from_request_parts(parts, &()).await {
        Ok(parameters) => {
            let owned = parameters.iter().map(|(name, value)| (name.to_owned(), value.to_owned()));
            Ok(owned.collect())
        }
        Err(RawPathParamsRejection::InvalidUtf8InPathParam(_)) => {
            Err(Refusal::new(Reason::BadName, None))
        }
        Err(_) => {
            tracing::error!(
                key,
                path = parts.uri.path(),
                "no path parameters: no route was matched before this layer; put it on routes, with \
                 route_layer, or use key_fn outside of axum"
            );
            Err(Refusal::new(Reason::Broken, None))
        }
    }
}

/// Which methods a layer is for.
#[derive(Debug, Clone, Default)]
pub(crate) enum Methods {
    #[default]
    AllButOptions,
    Only(Vec<Method>),
}

impl Methods {
    fn include(&self, method: &Method) -> bool {
        match self {
            Self::AllButOptions => method != Method::OPTIONS,
            // axum answers HEAD with the handler of GET.
            Self::Only(methods) if method == Method::HEAD => {
                methods.iter().any(|one| one == Method::HEAD || one == Method::GET)
            }
            Self::Only(methods) => methods.contains(method),
        }
    }
}

/// Which requests, and the name of each.
#[derive(Debug, Clone)]
pub(crate) struct Target<K> {
    pub(crate) key: K,
    pub(crate) methods: Methods,
}

impl Target<Key> {
    /// The name that a request is about; `None` if the layer is not for it. The error is the answer to the request.
    pub(crate) async fn name(&self, parts: &mut Parts) -> Result<Option<String>, Response> {
        if self.methods.include(&parts.method) { self.key.name(parts).await } else { Ok(None) }
    }
}

/// The setters that both layers have.
macro_rules! target_setters {
    ($layer:ident) => {
        /// Sets what the requests are about, from the same extractor that the handler takes:
        /// `key_from(|Path(id): Path<u64>| format!("order:{id}"))`.
        ///
        /// This is the form to use with axum. The key is made of the *parsed* value, so every spelling that the
        /// handler takes for one resource has one key: with `Path<u64>`, `/orders/42`, `/orders/042` and
        /// `/orders/+42` are all `order:42`. Take the same type as the handler, and format all of the value that
        /// the handler uses to find the resource. A `Path<String>` is not normalized: `ABC` and `abc` are two keys.
        ///
        /// Any extractor works that needs no body ([`FromRequestParts`](axum::extract::FromRequestParts)), and so does
        /// a tuple of them. It runs once here and once for the handler. If it rejects the request, its own
        /// rejection is the answer, and the service is not called. With `Path`, put the layer on routes, with
        /// `route_layer`.
        pub fn key_from<E, F>(self, key: F) -> $layer<crate::Key>
        where
            E: axum::extract::FromRequestParts<()> + 'static,
            F: Fn(E) -> String + Send + Sync + 'static,
        {
            self.with_key(crate::Key::extractor((), key))
        }

        /// Does what [`key_from`](Self::key_from) does, with an extractor that needs the router's state.
        ///
        /// A layer does not see what is given to `with_state`, so it is given here as well.
        pub fn key_from_with_state<S, E, F>(self, state: S, key: F) -> $layer<crate::Key>
        where
            S: Send + Sync + 'static,
            E: axum::extract::FromRequestParts<S> + 'static,
            F: Fn(E) -> String + Send + Sync + 'static,
        {
            self.with_key(crate::Key::extractor(state, key))
        }

        /// Sets what the requests are about, from the text of the route's path parameters: `"order:{order_id}"`.
        ///
        /// # One resource, several spellings
        ///
        /// **The text is compared, not what the handler makes of it.** With a handler that takes `Path<u64>`,
        /// `/orders/42`, `/orders/042` and `/orders/+42` are one order and *three* keys: three requests work on it at
        /// the same time, each with a lock of its own. Use [`key_from`](Self::key_from) unless the
        /// handler takes the parameter as the same text.
        ///
        /// # The template
        ///
        /// Parameters are percent-decoded, so `/orders/4%32` and `/orders/42` are about the same. Braces
        /// that stand for themselves are doubled. Two requests with the same text are about the same,
        /// whatever it was made of: write `"{a}/{b}"` only where no `/` can be in the values.
        ///
        /// A request to a route without such a parameter, or with two of that name (one of them of the route
        /// that it is nested in), is answered with 500, and the log says what is wrong. That goes for a router's fallback, too: use `route_layer`, which leaves it alone.
        ///
        /// # Panics
        ///
        /// If it is no template: empty, or with braces that do not match.
        #[track_caller]
        pub fn key(self, template: &str) -> $layer<crate::Key> {
            self.with_key(crate::Key::template(template))
        }

        /// Sets what the requests are about, by a function of the request: for services that are not
        /// axum's, and for what is not in the path. Requests for which it says `None` are let through.
        pub fn key_fn(
            self,
            key: impl Fn(&axum::http::request::Parts) -> Option<String> + Send + Sync + 'static,
        ) -> $layer<crate::Key> {
            self.with_key(crate::Key::function(key))
        }

        /// Sets which methods it is for; all others are let through. `GET` includes `HEAD`, which axum
        /// answers with the same handler.
        ///
        /// If not set, it is for all but `OPTIONS`: that asks about a resource and does nothing to it,
        /// and browsers give up if it is refused.
        pub fn methods(mut self, methods: impl IntoIterator<Item = axum::http::Method>) -> Self {
            self.target.methods = crate::target::Methods::Only(methods.into_iter().collect());
            self
        }
    };
}
pub(crate) use target_setters;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_template_is_refused_when_the_layer_is_made() {
        for bad in ["", "{", "}", "a{b", "a}b", "{}", "{a{b}}", "{ a}", "{*rest}", "{a}}", "{{a}"] {
            assert!(parse(bad).is_err(), "{bad}");
            assert!(std::panic::catch_unwind(|| Key::template(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_filter_on_get_is_one_on_head_and_options_is_let_through_unless_named() {
        let all = Methods::default();
        assert!(all.include(&Method::GET) && all.include(&Method::HEAD));
        assert!(!all.include(&Method::OPTIONS));
        let some = Methods::Only(vec![Method::GET, Method::OPTIONS]);
        assert!(some.include(&Method::HEAD) && some.include(&Method::OPTIONS));
        assert!(!some.include(&Method::POST));
        assert!(!Methods::Only(vec![Method::POST]).include(&Method::HEAD));
    }
}
