//! Four processes contend for one lock under random faults.

use std::time::Duration;

use lockkeeper_testkit::history::{History, Hold};
use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::soon;
use rustix::process::Signal;
use tokio::sync::mpsc;

use crate::common::{Process, close, keeper, lock, millis, secs, until_empty};

const TTL: Duration = Duration::from_secs(1);

/// A fault of a worker process.
#[derive(Debug)]
enum ProcessFault {
    /// Stops the process for this long.
    Stop(Duration),
    Kill,
}

/// Runs a worker process under faults, and restarts it when it exits, until the channel is closed.
async fn worker(url: String, history: History, mut faults: mpsc::UnboundedReceiver<ProcessFault>) {
    loop {
        let mut process = Process::start(&url, "a", TTL, &["hammer", "1000000"]);
        loop {
            tokio::select! {
                line = process.next_line() => match line.as_deref().map(|line| line.strip_prefix("hold ")) {
                    Some(Some(hold)) => history.add(hold.parse::<Hold>().unwrap()),
                    Some(None) => panic!("the helper printed {line:?}"),
                    // It was killed, or could not reach the server.
                    None => break,
                },
                fault = faults.recv() => match fault {
                    Some(ProcessFault::Stop(time)) => {
                        process.signal(Signal::STOP);
                        tokio::time::sleep(time).await;
                        process.signal(Signal::CONT);
                    }
                    Some(ProcessFault::Kill) => {
                        process.kill9().await;
                    }
                    None => return,
                },
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holds_of_four_processes_do_not_overlap_under_random_faults() {
    let server = RedisServer::start_or_panic();
    let history = History::new();
    let mut random = fastrand::Rng::with_seed(42);
    let mut proxies = Vec::new();
    let mut faults = Vec::new();
    let mut workers = Vec::new();
    for _ in 0..4 {
        let proxy = Proxy::start(server.addr()).await.unwrap();
        let url = format!("redis://{}/?command_timeout=300ms&connect_timeout=1s", proxy.addr());
        let (sender, receiver) = mpsc::unbounded_channel();
        workers.push(tokio::spawn(worker(url, history.clone(), receiver)));
        proxies.push(proxy);
        faults.push(sender);
    }
    for _ in 0..60 {
        let i = random.usize(..4);
        match random.u8(..8) {
            0..=2 => {
                proxies[i].cut();
                proxies[i].heal();
            }
            3 => {
                proxies[i].freeze();
                tokio::time::sleep(millis(random.u64(50..600))).await;
                proxies[i].heal();
            }
            4 => proxies[i].delay(millis(random.u64(..30))),
            5 => proxies[i].delay(Duration::ZERO),
            // Shorter and longer than the TTL.
            6 => faults[i].send(ProcessFault::Stop(millis(random.u64(200..1500)))).unwrap(),
            _ => faults[i].send(ProcessFault::Kill).unwrap(),
        }
        tokio::time::sleep(millis(random.u64(10..150))).await;
    }
    drop(faults);
    for worker in workers {
        soon("a worker", worker).await.unwrap();
    }
    let summary = history.assert_clean();
    eprintln!("{} holds", summary.holds);
    assert!(summary.holds >= 20, "too few holds: {summary:?}");
    let keeper = keeper(&server.url()).await.ttl(secs(1));
    soon("the end of the last lease", lock(&keeper.mutex("a"))).await.release().await.unwrap();
    close(&keeper).await;
    until_empty(&server).await;
}
