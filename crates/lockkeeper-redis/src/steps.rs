//! Asks and releases. Those of one process that come at the same time share calls.

use std::collections::VecDeque;
use std::future::{Future as _, poll_fn};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use lockkeeper_core::{BoxFuture, Error, Kind, Label, Mode, Owner, Result};
use redis::{Cmd, ServerErrorKind, Value};
use tokio::sync::{Notify, oneshot};

use crate::connection::{Connection, is_unknown_script};
use crate::error::{ErrorClass, classify, translate, unavailable, unwrapped};
use crate::key::Keys;
use crate::link::Link;
use crate::mailbox::Secret;
use crate::renewals::millis;
use crate::scripts::STEPS;

/// The most that share a call: a script that runs for long holds up everybody else.
const MOST_STEPS: usize = 64;
/// With so many calls under way, what comes waits for more to share the next one with, until one of them is
/// answered or there is enough for a call. With fewer, nothing waits.
const ENOUGH_CALLS: usize = 4;
/// So many steps are sent by those who take them, if there is no courier; from then on, sharing pays.
const ENOUGH_ALONE: usize = 8;

/// An ask or a release.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub(crate) keys: Keys,
    pub(crate) owner: Owner,
    pub(crate) what: What,
}

#[derive(Debug, Clone)]
pub(crate) enum What {
    Ask {
        mode: Mode,
        queue: bool,
        ttl: Duration,
        floor: u64,
        /// Proves the grant that answers this ask later, if it is pushed.
        secret: Secret,
        label: Label,
    },
    GiveBack {
        kind: Kind,
        /// Whether others may listen without a place in the queue.
        tells: bool,
    },
}

impl Step {
    fn word(&self) -> &'static str {
        match &self.what {
            What::Ask { mode: Mode::Exclusive, queue: true, .. } => "xq",
            What::Ask { mode: Mode::Exclusive, queue: false, .. } => "x",
            What::Ask { mode: Mode::Shared, queue: true, .. } => "sq",
            What::Ask { mode: Mode::Shared, queue: false, .. } => "s",
            What::Ask { mode: Mode::Permits { .. }, queue: true, .. } => "pq",
            What::Ask { mode: Mode::Permits { .. }, queue: false, .. } => "p",
            What::GiveBack { kind: Kind::Lock, tells: true } => "lt",
            What::GiveBack { kind: Kind::Lock, tells: false } => "l",
            What::GiveBack { kind: Kind::Semaphore, tells: true } => "mt",
            What::GiveBack { kind: Kind::Semaphore, tells: false } => "m",
        }
    }

    fn add_arguments(&self, command: &mut Cmd, connection: &Connection) {
        command.arg(self.word()).arg(self.owner.to_string());
        if let What::Ask { mode, ttl, floor, secret, label, .. } = &self.what {
            let (mode, take, of) = match *mode {
                Mode::Exclusive => ('x', 1, 1),
                Mode::Shared => ('s', 1, 1),
                Mode::Permits { take, of } => ('p', take, of),
            };
            let (ttl, channel, label) = (millis(*ttl), connection.channel(), label.as_str());
            command.arg(ttl).arg(floor);
            command
                .arg(format!(" {mode} {take} {of} {ttl} "))
                .arg(format!(" {} {channel} {label}", secret.reveal()));
        }
    }
}

/// Adds the keys and arguments of some steps to a command.
pub(crate) fn add_to<'a>(
    command: &mut Cmd,
    connection: &Connection,
    steps: impl ExactSizeIterator<Item = &'a Step> + Clone,
) {
    command.arg(steps.len() * Keys::COUNT);
    for step in steps.clone() {
        step.keys.add_all_to(command);
    }
    for step in steps {
        step.add_arguments(command, connection);
    }
}

/// The answer to a step, and the connection that it came on.
pub(crate) type Taken = (Arc<Connection>, Value);

/// The steps of one link that are to be taken.
///
/// One that finds hardly anything under way is sent right there, by whoever takes it. Others are carried by a task
/// of their own, the *courier*: whoever takes a step may not poll it for a while, and nobody else should have to
/// wait for that.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    state: Mutex<State>,
    added: Notify,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Waiting>,
    has_courier: bool,
    /// How many are under way by themselves.
    alone: usize,
}

#[derive(Debug)]
struct Waiting {
    step: Step,
    answer: oneshot::Sender<Result<Taken>>,
}

impl Waiting {
    /// One that nobody awaits any more must not be sent: what its claim does next may be under way already.
    fn is_awaited(&self) -> bool {
        !self.answer.is_closed()
    }
}

/// Who sends a step.
enum Added {
    /// Whoever takes it.
    Alone(Step),
    /// A courier that is needed for it.
    New(oneshot::Receiver<Result<Taken>>),
    /// The courier.
    Waiting(oneshot::Receiver<Result<Taken>>),
}

impl Steps {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, step: Step) -> Added {
        let mut state = self.state();
        // Not while there is a courier: what it has taken and not sent yet may be of the same claim, and come first.
        if !state.has_courier && state.alone < ENOUGH_ALONE {
            state.alone += 1;
            return Added::Alone(step);
        }
        let (answer, answered) = oneshot::channel();
        state.waiting.push_back(Waiting { step, answer });
        if std::mem::replace(&mut state.has_courier, true) {
            Added::Waiting(answered)
        } else {
            Added::New(answered)
        }
    }

    /// What shares the courier's next call, with so many of them under way.
    fn next(&self, under_way: usize) -> Vec<Waiting> {
        let mut state = self.state();
        loop {
            if under_way >= ENOUGH_CALLS && state.waiting.len() < MOST_STEPS {
                return Vec::new();
            }
            let count = state.waiting.len().min(MOST_STEPS);
            let mut batch: Vec<Waiting> = state.waiting.drain(..count).collect();
            batch.retain(Waiting::is_awaited);
            if !batch.is_empty() || count == 0 {
                return batch;
            }
        }
    }

    /// Lets the courier go if there is nothing to do.
    fn dismiss(&self) -> bool {
        let mut state = self.state();
        state.has_courier = !state.waiting.is_empty();
        !state.has_courier
    }
}

/// Takes a step. Dropped before it was sent, it never is; dropped after that, its answer is lost.
pub(crate) async fn take(link: &Arc<Link>, step: Step) -> Result<Taken> {
    let answered = match link.steps.add(step) {
        Added::Alone(step) => return Alone(link).take(&step).await,
        Added::New(answered) => {
            // Made before anything else: whatever fails from here on, there is no courier then.
            let courier = Courier { link: link.clone(), has_work: true };
            link.runtime().spawn(courier.carry());
            answered
        }
        Added::Waiting(answered) => {
            link.steps.added.notify_one();
            answered
        }
    };
    answered.await.unwrap_or_else(|_| Err(unavailable("the connection is lost")))
}

/// A step that is sent by whoever takes it.
struct Alone<'a>(&'a Arc<Link>);

impl Alone<'_> {
    async fn take(&self, step: &Step) -> Result<Taken> {
        let connection = self.0.connection().await?;
        let add = |command: &mut Cmd| add_to(command, &connection, std::iter::once(step));
        let answer = connection.run(&STEPS, add).await.map_err(translate)?;
        Ok((connection, only(answer)))
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.0.steps.state().alone -= 1;
    }
}

/// The answer of a call with one step.
pub(crate) fn only(answer: Value) -> Value {
    match answer {
        Value::Array(mut answers) if answers.len() == 1 => answers.remove(0),
        other => other,
    }
}

/// Whoever sends what shares calls.
struct Courier {
    link: Arc<Link>,
    /// False when it was dismissed.
    has_work: bool,
}

impl Courier {
    async fn carry(mut self) {
        let mut calls = FuturesUnordered::new();
        loop {
            // Whoever was just answered, or began at the same time, may have the next step ready in a moment.
            tokio::task::yield_now().await;
            loop {
                let mut batch = self.link.steps.next(calls.len());
                if batch.is_empty() {
                    break;
                }
                match self.link.connection().await {
                    Ok(connection) => {
                        // That may have taken a while.
                        batch.retain(Waiting::is_awaited);
                        if batch.is_empty() {
                            continue;
                        }
                        let mut call = Box::pin(call(connection, batch));
                        // Sent before the next one: steps of one claim reach the server in order.
                        if poll_fn(|context| Poll::Ready(call.as_mut().poll(context)))
                            .await
                            .is_pending()
                        {
                            calls.push(call);
                        }
                    }
                    Err(error) => fail(batch, &error),
                }
            }
            if calls.is_empty() && self.link.steps.dismiss() {
                self.has_work = false;
                return;
            }
            tokio::select! {
                Some(()) = calls.next() => {}
                () = self.link.steps.added.notified() => {}
            }
        }
    }
}

impl Drop for Courier {
    /// If its runtime ends on the way: whoever waits is told, by the end of its channel.
    fn drop(&mut self) {
        if self.has_work {
            let mut state = self.link.steps.state();
            state.has_courier = false;
            let waiting = std::mem::take(&mut state.waiting);
            drop(state);
            // Which wakes them: they may come back at once.
            drop(waiting);
        }
    }
}

async fn call(connection: Arc<Connection>, mut batch: Vec<Waiting>) {
    let add = |command: &mut Cmd, batch: &[Waiting]| {
        add_to(command, &connection, batch.iter().map(|waiting| &waiting.step));
    };
    let mut answer = connection.run_known(&STEPS, |command| add(command, &batch)).await;
    if is_unknown_script(&answer) {
        batch.retain(Waiting::is_awaited);
        if batch.is_empty() {
            return;
        }
        answer = connection.run_anew(&STEPS, |command| add(command, &batch)).await;
    }
    let answers = match answer {
        Ok(Value::Array(answers)) if answers.len() == batch.len() => answers,
        Ok(other) => {
            return fail(batch, &unavailable(format!("an answer that makes no sense: {other:?}")));
        }
        Err(error) if error.kind() == ServerErrorKind::NoPerm.into() && batch.len() > 1 => {
            return call_each(connection, batch).await;
        }
        Err(error) => return fail(batch, &translate(error)),
    };
    for (waiting, answer) in batch.into_iter().zip(answers) {
        let answer = match answer.extract_error() {
            Ok(answer) => Ok((connection.clone(), answer)),
            Err(error) => {
                let error = unwrapped(error);
                if classify(&error) == ErrorClass::Broken {
                    connection.gone().cancel();
                }
                Err(translate(error))
            }
        };
        let _ = waiting.answer.send(answer);
    }
}

/// Takes each step by itself: a key that the user may not use fails all that share its call. If some have been
/// taken already, twice is once.
fn call_each(connection: Arc<Connection>, mut batch: Vec<Waiting>) -> BoxFuture<'static, ()> {
    // Boxed, because it comes back to where it was called.
    Box::pin(async move {
        batch.retain(Waiting::is_awaited);
        // All are sent in the first poll.
        join_all(batch.into_iter().map(|waiting| call(connection.clone(), vec![waiting]))).await;
    })
}

fn fail(batch: Vec<Waiting>, error: &Error) {
    for waiting in batch {
        let _ = waiting.answer.send(Err(error.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Address, Config};
    use crate::link::Target;

    fn link() -> Arc<Link> {
        let config = Config::from_url("redis://127.0.0.1:1/").unwrap();
        Link::new(Arc::new(config), Target::Fixed(Address { host: "127.0.0.1".into(), port: 1 }))
    }

    fn step() -> Step {
        let what = What::GiveBack { kind: Kind::Lock, tells: false };
        Step { keys: Keys::new("lockkeeper", Kind::Lock, "a"), owner: Owner::random(), what }
    }

    #[test]
    fn a_step_that_finds_few_others_under_way_needs_no_courier() {
        let link = link();
        for _ in 0..3 {
            for _ in 0..ENOUGH_ALONE {
                assert!(matches!(link.steps.add(step()), Added::Alone(_)));
            }
            (0..ENOUGH_ALONE).for_each(|_| drop(Alone(&link)));
        }
    }

    #[test]
    fn with_enough_calls_under_way_steps_wait_for_more_or_for_an_answer() {
        let link = link();
        let steps = &link.steps;
        let mut answers = Vec::new();
        let mut add = || match steps.add(step()) {
            Added::Alone(_) => {}
            Added::New(answered) | Added::Waiting(answered) => answers.push(answered),
        };
        (0..ENOUGH_ALONE + MOST_STEPS - 1).for_each(|_| add());
        assert!(steps.next(ENOUGH_CALLS).is_empty());
        add();
        assert_eq!(steps.next(ENOUGH_CALLS).len(), MOST_STEPS);
        add();
        assert_eq!(steps.next(ENOUGH_CALLS - 1).len(), 1);
    }

    /// The attempt of a claim may be with the courier, which waits for a connection, when its release comes.
    #[test]
    fn no_step_overtakes_what_a_courier_has_taken_and_not_sent() {
        let link = link();
        let steps = &link.steps;
        for _ in 0..ENOUGH_ALONE {
            assert!(matches!(steps.add(step()), Added::Alone(_)));
        }
        let Added::New(_attempt) = steps.add(step()) else { panic!("it needs a courier") };
        assert_eq!(steps.next(0).len(), 1);
        (0..ENOUGH_ALONE).for_each(|_| drop(Alone(&link)));
        let Added::Waiting(_release) = steps.add(step()) else { panic!("it goes its own way") };
    }

    /// One that comes when the courier has looked for the last time, and has not yet gone.
    #[test]
    fn a_courier_is_not_dismissed_while_a_step_waits() {
        let link = link();
        let steps = &link.steps;
        for _ in 0..ENOUGH_ALONE {
            assert!(matches!(steps.add(step()), Added::Alone(_)));
        }
        let Added::New(_first) = steps.add(step()) else { panic!("it needs a courier") };
        assert_eq!(steps.next(0).len(), 1);
        assert!(steps.next(0).is_empty());
        let Added::Waiting(_second) = steps.add(step()) else { panic!("there is a courier") };
        assert!(!steps.dismiss());
        assert_eq!(steps.next(0).len(), 1);
        assert!(steps.dismiss());
        let Added::New(_third) = steps.add(step()) else { panic!("it has gone") };
    }
}
