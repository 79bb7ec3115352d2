//! A store that answers by a task of the runtime in which it was created, as one with a connection does.

use std::time::Duration;

use lockkeeper_core::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Fence, Inspector, Memory,
    Release, Renewal, Result,
};
use tokio::sync::{mpsc, oneshot};

#[derive(Debug)]
pub struct Remote {
    memory: Memory,
    line: Line,
}

/// The way to the task.
#[derive(Debug, Clone)]
struct Line(mpsc::UnboundedSender<oneshot::Sender<()>>);

impl Line {
    async fn round_trip(&self) {
        let (answer, answered) = oneshot::channel();
        self.0.send(answer).unwrap();
        answered.await.unwrap();
    }
}

impl Remote {
    pub fn new(memory: Memory) -> Self {
        let (line, mut requests) = mpsc::unbounded_channel::<oneshot::Sender<()>>();
        tokio::spawn(async move {
            while let Some(answer) = requests.recv().await {
                let _ = answer.send(());
            }
        });
        Self { memory, line: Line(line) }
    }
}

impl Backend for Remote {
    fn name(&self) -> &'static str {
        "remote"
    }

    fn capabilities(&self) -> Capabilities {
        self.memory.capabilities()
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        Ok(Box::new(RemoteClaim { claim: self.memory.claim(spec)?, line: self.line.clone() }))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.memory.inspector()
    }
}

struct RemoteClaim {
    claim: Box<dyn Claim>,
    line: Line,
}

impl Claim for RemoteClaim {
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        Box::pin(async move {
            self.line.round_trip().await;
            self.claim.attempt(floor).await
        })
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        self.claim.changed()
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        Box::pin(async move {
            self.line.round_trip().await;
            self.claim.renew(ttl).await
        })
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        Box::pin(async move {
            self.line.round_trip().await;
            self.claim.downgrade(ttl).await
        })
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        Box::pin(async move {
            self.line.round_trip().await;
            self.claim.release().await
        })
    }
}
