//! A store whose responses pass through a task of the runtime that created it, like those of a store with a connection.

use std::time::Duration;

use lockkeeper_core::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Fence, Inspector, Memory,
    Release, Renewal, Result,
};
use tokio::sync::{mpsc, oneshot};

#[derive(Debug)]
pub struct Remote {
    memory: Memory,
    connection: Connection,
}

/// A channel to the task.
#[derive(Debug, Clone)]
struct Connection(mpsc::UnboundedSender<oneshot::Sender<()>>);

impl Connection {
    async fn round_trip(&self) {
        let (answer, answered) = oneshot::channel();
        self.0.send(answer).unwrap();
        answered.await.unwrap();
    }
}

impl Remote {
    pub fn new(memory: Memory) -> Self {
        let (connection, mut requests) = mpsc::unbounded_channel::<oneshot::Sender<()>>();
        tokio::spawn(async move {
            while let Some(answer) = requests.recv().await {
                let _ = answer.send(());
            }
        });
        Self { memory, connection: Connection(connection) }
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
        let claim = self.memory.claim(spec)?;
        Ok(Box::new(RemoteClaim { claim, connection: self.connection.clone() }))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.memory.inspector()
    }
}

struct RemoteClaim {
    claim: Box<dyn Claim>,
    connection: Connection,
}

impl Claim for RemoteClaim {
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        Box::pin(async move {
            self.connection.round_trip().await;
            self.claim.attempt(floor).await
        })
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        self.claim.changed()
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        Box::pin(async move {
            self.connection.round_trip().await;
            self.claim.renew(ttl).await
        })
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        Box::pin(async move {
            self.connection.round_trip().await;
            self.claim.downgrade(ttl).await
        })
    }

    fn set_fence(&mut self, fence: Fence) {
        self.claim.set_fence(fence);
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        Box::pin(async move {
            self.connection.round_trip().await;
            self.claim.release().await
        })
    }
}
