//! The requests that a layer applies to, and the lock name of each.

use std::fmt;
use std::sync::Arc;

use axum::extract::rejection::RawPathParamsRejection;
use axum::extract::{FromRequestParts, RawPathParams};
use axum::http::Method;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use lockkeeper_core::BoxFuture;
use lockkeeper_syntax::template::{self, Piece};

use crate::problem::{Reason, Rejection};

/// The state of a layer without a key. It becomes a [`Layer`](tower_layer::Layer) when a key is set.
#[derive(Debug, Clone, Copy)]
pub struct NoKey;

/// The key of a layer: a function of extractors or of the request, or a template over path parameters.
#[derive(Clone)]
pub struct Key(Source);

#[derive(Clone)]
enum Source {
    Extractor(Arc<Extract>),
    Template(Arc<Template>),
    Function(Arc<Function>),
}

/// Returns the name, or the response of the extractor that rejects the request.
type Extract =
    dyn for<'a> Fn(&'a mut Parts) -> BoxFuture<'a, Result<String, Response>> + Send + Sync;
type Function = dyn Fn(&Parts) -> Option<String> + Send + Sync;

#[derive(Debug)]
struct Template {
    /// The source text, for error messages.
    text: String,
    pieces: Vec<Piece<String>>,
}

impl Key {
    /// # Panics
    ///
    /// If the text is not a template.
    #[track_caller]
    pub(crate) fn template(text: &str) -> Self {
        match parse(text) {
            Ok(pieces) => {
                Self(Source::Template(Arc::new(Template { text: text.to_owned(), pieces })))
            }
            Err(fault) => panic!("the key {text:?} is not a template: {fault}"),
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

    /// Returns the lock name for a request; `None` if the layer does not apply to it.
    async fn name(&self, parts: &mut Parts) -> Result<Option<String>, Response> {
        match &self.0 {
            Source::Extractor(extract) => extract(parts).await.map(Some),
            Source::Function(function) => Ok(function(parts)),
            Source::Template(template) => match template.fill_in(parts).await {
                Ok(name) => Ok(Some(name)),
                Err(rejection) => Err(rejection.into_response()),
            },
        }
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Source::Template(template) => fmt::Debug::fmt(&template.text, f),
            Source::Extractor(_) => f.write_str("function of extractors"),
            Source::Function(_) => f.write_str("function of the request"),
        }
    }
}

/// Returns the pieces of a template, or an error message.
fn parse(text: &str) -> Result<Vec<Piece<String>>, String> {
    template::parse(text, |name| {
        // The star of a wildcard route parameter, as in `{*rest}`, is not part of its name.
        if name.is_empty() || name.starts_with('*') || name.trim() != name {
            let fault = "write the name of a path parameter, and nothing else, between braces";
            return Err(fault.to_owned());
        }
        Ok(name.to_owned())
    })
}

const MISSING: &str =
    "the route lacks this path parameter: add the layer to routes that have it, with route_layer";
/// A nested route and its parent may have parameters of the same name. The layer cannot know which one the handler
/// uses.
const TWICE: &str = "the route has this path parameter twice: give them different names";

impl Template {
    async fn fill_in(&self, parts: &mut Parts) -> Result<String, Rejection> {
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
                            return Err(self.misconfigured(parameter, parts, MISSING));
                        }
                        (Some(_), Some(_)) => {
                            return Err(self.misconfigured(parameter, parts, TWICE));
                        }
                    }
                }
            }
        }
        Ok(name)
    }

    fn misconfigured(&self, parameter: &str, parts: &Parts, why: &str) -> Rejection {
        tracing::error!(key = self.text, parameter, path = parts.uri.path(), "{why}");
        Rejection::new(Reason::Internal, None)
    }
}

async fn path_parameters(parts: &mut Parts, key: &str) -> Result<Vec<(String, String)>, Rejection> {
    match RawPathParams::from_request_parts(parts, &()).await {
        Ok(parameters) => {
            let owned = parameters.iter().map(|(name, value)| (name.to_owned(), value.to_owned()));
            Ok(owned.collect())
        }
        Err(RawPathParamsRejection::InvalidUtf8InPathParam(_)) => {
            Err(Rejection::new(Reason::BadName, None))
        }
        Err(_) => {
            tracing::error!(
                key,
                path = parts.uri.path(),
                "no path parameters, because no route was matched before this layer: add the layer \
                 with route_layer, or use key_fn outside of axum"
            );
            Err(Rejection::new(Reason::Internal, None))
        }
    }
}

/// The methods that a layer applies to.
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
            // axum serves HEAD with the handler of GET.
            Self::Only(methods) if method == Method::HEAD => {
                methods.iter().any(|one| one == Method::HEAD || one == Method::GET)
            }
            Self::Only(methods) => methods.contains(method),
        }
    }
}

/// The requests that a layer applies to, and the key that names their locks.
#[derive(Debug, Clone)]
pub(crate) struct Target<K> {
    pub(crate) key: K,
    pub(crate) methods: Methods,
}

impl Target<Key> {
    /// Returns the lock name for a request; `None` if the layer does not apply to it. The error is the response.
    pub(crate) async fn name(&self, parts: &mut Parts) -> Result<Option<String>, Response> {
        if self.methods.include(&parts.method) { self.key.name(parts).await } else { Ok(None) }
    }
}

/// Defines the setters that both layers have.
macro_rules! target_setters {
    ($layer:ident) => {
        /// Sets the key, from the same extractor that the handler uses:
        /// `key_from(|Path(id): Path<u64>| format!("order:{id}"))`.
        ///
        /// Prefer this form with axum. The key is made from the *parsed* value, so all spellings of a resource share
        /// one key: with `Path<u64>`, `/orders/42`, `/orders/042` and `/orders/+42` are all `order:42`. Use the type
        /// that the handler uses, and include every part that identifies the resource. A `Path<String>` is not
        /// normalized: `ABC` and `abc` are two keys.
        ///
        /// Any extractor that does not need the body works ([`FromRequestParts`](axum::extract::FromRequestParts)), and
        /// so does a tuple of them. It runs once for the layer and once for the handler. If it rejects the request, its
        /// rejection is the response, and the service is not called. With `Path`, add the layer with `route_layer`.
        pub fn key_from<E, F>(self, key: F) -> $layer<crate::Key>
        where
            E: axum::extract::FromRequestParts<()> + 'static,
            F: Fn(E) -> String + Send + Sync + 'static,
        {
            self.with_key(crate::Key::extractor((), key))
        }

        /// Sets the key like [`key_from`](Self::key_from), from an extractor that needs the router's state.
        ///
        /// Pass the state here as well: a layer has no access to the state passed to `with_state`.
        pub fn key_from_with_state<S, E, F>(self, state: S, key: F) -> $layer<crate::Key>
        where
            S: Send + Sync + 'static,
            E: axum::extract::FromRequestParts<S> + 'static,
            F: Fn(E) -> String + Send + Sync + 'static,
        {
            self.with_key(crate::Key::extractor(state, key))
        }

        /// Sets the key, from the text of the route's path parameters: `"order:{order_id}"`.
        ///
        /// # One resource, several spellings
        ///
        /// **The text is compared, not the value that the handler parses from it.** With a handler that uses
        /// `Path<u64>`, `/orders/42`, `/orders/042` and `/orders/+42` are one order and *three* keys: three requests
        /// can work on it at the same time, each with its own lock. Use [`key_from`](Self::key_from) unless the handler
        /// uses the parameter as text.
        ///
        /// # Template syntax
        ///
        /// Parameters are percent-decoded, so `/orders/4%32` and `/orders/42` have the same key. Double a literal
        /// brace. Keys are compared after substitution: use `"{a}/{b}"` only if the values cannot contain `/`.
        ///
        /// A request is rejected with 500, and the reason is logged, if its route lacks the parameter, or has two of
        /// that name (one of them from the parent of a nested route). This applies to the fallback of a router, too;
        /// `route_layer` does not cover the fallback.
        ///
        /// # Panics
        ///
        /// If the template is empty or has unbalanced braces.
        #[track_caller]
        pub fn key(self, template: &str) -> $layer<crate::Key> {
            self.with_key(crate::Key::template(template))
        }

        /// Sets the key, from a function of the request: for services outside of axum, and for keys that are not in the
        /// path. The layer does not apply to requests for which the function returns `None`.
        pub fn key_fn(
            self,
            key: impl Fn(&axum::http::request::Parts) -> Option<String> + Send + Sync + 'static,
        ) -> $layer<crate::Key> {
            self.with_key(crate::Key::function(key))
        }

        /// Sets the methods that the layer applies to. `GET` includes `HEAD`, which axum serves with the same handler.
        ///
        /// The default is all methods except `OPTIONS`, which does not change a resource: browsers fail a cross-origin
        /// request if its preflight is rejected.
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
    fn an_invalid_template_panics_when_the_layer_is_created() {
        for bad in ["", "{", "}", "a{b", "a}b", "{}", "{a{b}}", "{ a}", "{*rest}", "{a}}", "{{a}"] {
            assert!(parse(bad).is_err(), "{bad}");
            assert!(std::panic::catch_unwind(|| Key::template(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn get_includes_head_and_options_is_exempt_unless_listed() {
        let all = Methods::default();
        assert!(all.include(&Method::GET) && all.include(&Method::HEAD));
        assert!(!all.include(&Method::OPTIONS));
        let some = Methods::Only(vec![Method::GET, Method::OPTIONS]);
        assert!(some.include(&Method::HEAD) && some.include(&Method::OPTIONS));
        assert!(!some.include(&Method::POST));
        assert!(!Methods::Only(vec![Method::POST]).include(&Method::HEAD));
    }
}
