//! A subscriber that remembers spans and events.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::DefaultGuard;
use tracing::{Event, Level, Metadata, Subscriber};

/// A span, as it was seen.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) name: &'static str,
    pub(crate) parent: Option<&'static str>,
    pub(crate) fields: BTreeMap<&'static str, String>,
    /// How many handles there are; none is a span that is closed.
    pub(crate) handles: usize,
}

/// An event: its message, and the span it was in.
pub(crate) type Told = (String, Option<&'static str>);

#[derive(Debug, Clone)]
pub(crate) struct Collector {
    most: Level,
    log: Arc<Mutex<Log>>,
}

#[derive(Debug, Default)]
struct Log {
    spans: Vec<Seen>,
    entered: Vec<Id>,
    events: Vec<Told>,
}

impl Collector {
    /// Collects what this thread tells up to a level, for as long as the guard lives.
    pub(crate) fn here(most: Level) -> (Self, DefaultGuard) {
        let collector = Self { most, log: Arc::default() };
        let guard = tracing::subscriber::set_default(collector.clone());
        (collector, guard)
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn spans(&self, name: &str) -> Vec<Seen> {
        self.log().spans.iter().filter(|span| span.name == name).cloned().collect()
    }

    pub(crate) fn events(&self) -> Vec<Told> {
        self.log().events.clone()
    }
}

impl Seen {
    pub(crate) fn field(&self, name: &str) -> &str {
        self.fields.get(name).map_or("", String::as_str)
    }
}

fn index(id: &Id) -> usize {
    usize::try_from(id.into_u64()).unwrap() - 1
}

impl Subscriber for Collector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= &self.most
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let mut log = self.log();
        let parent = match attributes.is_contextual() {
            true => log.entered.last(),
            false => attributes.parent(),
        };
        let parent = parent.map(|id| log.spans[index(id)].name);
        let name = attributes.metadata().name();
        if name.starts_with("lockkeeper") {
            assert_eq!(attributes.metadata().target(), "lockkeeper");
        }
        log.spans.push(Seen { name, parent, fields: fields.0, handles: 1 });
        Id::from_u64(log.spans.len() as u64)
    }

    fn record(&self, id: &Id, values: &Record<'_>) {
        let mut fields = Fields::default();
        values.record(&mut fields);
        self.log().spans[index(id)].fields.extend(fields.0);
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let mut log = self.log();
        let inside = log.entered.last().map(|id| log.spans[index(id)].name);
        log.events.push((fields.0.remove("message").unwrap_or_default(), inside));
    }

    fn enter(&self, id: &Id) {
        self.log().entered.push(id.clone());
    }

    fn exit(&self, id: &Id) {
        let left = self.log().entered.pop();
        assert_eq!(left.as_ref(), Some(id), "left in another order than entered");
    }

    fn clone_span(&self, id: &Id) -> Id {
        self.log().spans[index(id)].handles += 1;
        id.clone()
    }

    fn try_close(&self, id: Id) -> bool {
        let span = &mut self.log().spans[index(&id)];
        span.handles -= 1;
        span.handles == 0
    }
}

#[derive(Default)]
struct Fields(BTreeMap<&'static str, String>);

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}
