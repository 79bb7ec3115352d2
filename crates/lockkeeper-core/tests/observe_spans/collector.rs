//! A subscriber that remembers the spans and events of each test.
//!
//! One for the whole process, set before the first span: `tracing` remembers for each place in the code whether
//! anybody listens, and a subscriber that comes while another thread is there for the first time may be missed.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
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
    /// Collects what this thread tells up to a level, until it is called again.
    pub(crate) fn here(most: Level) -> Self {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| tracing::subscriber::set_global_default(OfThisThread).unwrap());
        let collector = Self { most, log: Arc::default() };
        HERE.set(Some(collector.clone()));
        collector
    }

    fn hears(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= &self.most
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

thread_local! {
    static HERE: RefCell<Option<Collector>> = const { RefCell::new(None) };
}

/// The collector of the test that runs on a thread.
struct OfThisThread;

fn here() -> Option<Collector> {
    HERE.with_borrow(Clone::clone)
}

impl Subscriber for OfThisThread {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        here().is_some_and(|collector| collector.hears(metadata))
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        here().unwrap().new_span(attributes)
    }

    fn record(&self, id: &Id, values: &Record<'_>) {
        here().unwrap().record(id, values);
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        here().unwrap().event(event);
    }

    fn enter(&self, id: &Id) {
        here().unwrap().log().entered.push(id.clone());
    }

    fn exit(&self, id: &Id) {
        let left = here().unwrap().log().entered.pop();
        assert_eq!(left.as_ref(), Some(id), "left in another order than entered");
    }

    fn clone_span(&self, id: &Id) -> Id {
        here().unwrap().log().spans[index(id)].handles += 1;
        id.clone()
    }

    fn try_close(&self, id: Id) -> bool {
        // A thread's variables may be gone before its last spans.
        let collector = HERE.try_with(|here| here.borrow().clone()).ok().flatten();
        let Some(collector) = collector else { return false };
        let span = &mut collector.log().spans[index(&id)];
        span.handles -= 1;
        span.handles == 0
    }
}

impl Collector {
    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let mut log = self.log();
        let parent =
            if attributes.is_contextual() { log.entered.last() } else { attributes.parent() };
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

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let mut log = self.log();
        let inside = log.entered.last().map(|id| log.spans[index(id)].name);
        log.events.push((fields.0.remove("message").unwrap_or_default(), inside));
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
