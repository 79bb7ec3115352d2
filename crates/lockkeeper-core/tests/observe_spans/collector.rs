//! A subscriber that collects the spans and events of each test.
//!
//! There is one for the whole process, set before the first span: `tracing` caches for each callsite whether a subscriber
//! is interested. A subscriber that is installed while another thread registers a callsite may be missed.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};

/// A collected span.
#[derive(Debug, Clone)]
pub(crate) struct Span {
    pub(crate) name: &'static str,
    pub(crate) parent: Option<&'static str>,
    pub(crate) fields: BTreeMap<&'static str, String>,
    /// The number of handles; zero means closed.
    pub(crate) handles: usize,
}

/// The message of an event, and the span that contains it.
pub(crate) type Message = (String, Option<&'static str>);

#[derive(Debug, Clone)]
pub(crate) struct Collector {
    max_level: Level,
    log: Arc<Mutex<Log>>,
}

#[derive(Debug, Default)]
struct Log {
    spans: Vec<Span>,
    entered: Vec<Id>,
    events: Vec<Message>,
}

impl Collector {
    /// Collects spans and events of this thread up to a level, until it is called again.
    pub(crate) fn for_this_thread(max_level: Level) -> Self {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| tracing::subscriber::set_global_default(PerThread).unwrap());
        let collector = Self { max_level, log: Arc::default() };
        COLLECTOR.set(Some(collector.clone()));
        collector
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn spans(&self, name: &str) -> Vec<Span> {
        self.log().spans.iter().filter(|span| span.name == name).cloned().collect()
    }

    pub(crate) fn events(&self) -> Vec<Message> {
        self.log().events.clone()
    }
}

impl Span {
    pub(crate) fn field(&self, name: &str) -> &str {
        self.fields.get(name).map_or("", String::as_str)
    }
}

fn index(id: &Id) -> usize {
    usize::try_from(id.into_u64()).unwrap() - 1
}

thread_local! {
    static COLLECTOR: RefCell<Option<Collector>> = const { RefCell::new(None) };
}

/// Forwards to the collector of the current thread.
struct PerThread;

fn collector() -> Option<Collector> {
    COLLECTOR.with_borrow(Clone::clone)
}

impl Subscriber for PerThread {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        collector().is_some_and(|collector| metadata.level() <= &collector.max_level)
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        collector().unwrap().new_span(attributes)
    }

    fn record(&self, id: &Id, values: &Record<'_>) {
        collector().unwrap().record(id, values);
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        collector().unwrap().event(event);
    }

    fn enter(&self, id: &Id) {
        collector().unwrap().log().entered.push(id.clone());
    }

    fn exit(&self, id: &Id) {
        let left = collector().unwrap().log().entered.pop();
        assert_eq!(left.as_ref(), Some(id), "spans are not exited in reverse order");
    }

    fn clone_span(&self, id: &Id) -> Id {
        collector().unwrap().log().spans[index(id)].handles += 1;
        id.clone()
    }

    fn try_close(&self, id: Id) -> bool {
        // The thread-local may be destroyed before the last spans of the thread.
        let collector = COLLECTOR.try_with(|collector| collector.borrow().clone()).ok().flatten();
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
        log.spans.push(Span { name, parent, fields: fields.0, handles: 1 });
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
