//! Four processes on one lock, and everything that can happen to them.

use std::time::Duration;

use lockkeeper_testkit::history::{History, Hold};
use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::soon;
use rustix::process::Signal;
use tokio::sync::mpsc;

use crate::common::{Process, close, keeper, lock, millis, secs, until_empty};

const TTL: Duration = Duration::from_secs(1);

/// What is done to a worker.
#[derive(Debug)]
enum Harm {
    /// Stopped for so long.
    Stop(Duration),
    Kill,
}

/// Keeps a process at it, through all its lives, until the harm ends.
async fn worker(url: String, history: History, mut harm: mpsc::UnboundedReceiver<Harm>) {
    loop {
        let mut process = Process::start(&url, "a", TTL, &["hammer", "1000000"]);
        loop {
            tokio::select! {
                line = process.next_line() => match line.as_deref().map(|line| line.strip_prefix("hold ")) {
                    Some(Some(hold)) => history.add(hold.parse::<Hold>().unwrap()),
                    Some(None) => panic!("the helper said {line:?}"),
                    // It could not reach the server.
                    None => break,
                },
                harm = harm.recv() => match harm {
                    Some(Harm::Stop(time)) => {
                        process.signal(Signal::STOP);
                        tokio::time::sleep(time).await;
                        process.signal(Signal::CONT);
                    }
                    Some(Harm::Kill) => {
                        process.kill9().await;
                    }
                    None => return,
                },
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_two_of_four_processes_hold_at_once_under_any_fault() {
    let server = RedisServer::start_or_panic();
    let history = History::new();
    let mut random = fastrand::Rng::with_seed(42);
    let mut cables = Vec::new();
    let mut harms = Vec::new();
    let mut workers = Vec::new();
    for _ in 0..4 {
        let proxy = Proxy::start(server.addr()).await.unwrap();
        let url = format!("redis://{}/?command_timeout=300ms&connect_timeout=1s", proxy.addr());
        let (sender, receiver) = mpsc::unbounded_channel();
        workers.push(tokio::spawn(worker(url, history.clone(), receiver)));
        cables.push(proxy);
        harms.push(sender);
    }
    for _ in 0..60 {
        let i = random.usize(..4);
        match random.u8(..8) {
            0..=2 => {
                cables[i].cut();
                cables[i].heal();
            }
            3 => {
                cables[i].freeze();
                tokio::time::sleep(millis(random.u64(50..600))).await;
                cables[i].heal();
            }
            4 => cables[i].delay(millis(random.u64(..30))),
            5 => cables[i].delay(Duration::ZERO),
            // Shorter and longer than the ttl.
            6 => harms[i].send(Harm::Stop(millis(random.u64(200..1500)))).unwrap(),
            _ => harms[i].send(Harm::Kill).unwrap(),
        }
        tokio::time::sleep(millis(random.u64(10..150))).await;
    }
    drop(harms);
    for worker in workers {
        soon("a worker", worker).await.unwrap();
    }
    let summary = history.assert_clean();
    eprintln!("{} holds", summary.holds);
    assert!(summary.holds >= 20, "they hardly came to it: {summary:?}");
    let keeper = keeper(&server.url()).await.ttl(secs(1));
    soon("what is left ends", lock(&keeper.mutex("a"))).await.release().await.unwrap();
    close(&keeper).await;
    until_empty(&server).await;
}
