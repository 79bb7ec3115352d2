//! Sends requests to a Redis server in a loop, to count the instructions of the client:
//!
//! ```sh
//! cargo build --release -p lockkeeper-bench --example client_cost
//! valgrind --tool=callgrind target/release/examples/client_cost claim 64 10000
//! ```
//!
//! Arguments: `claim` (a lock and its release, by the store without the engine, whose clock does not run in Valgrind),
//! `pings` (two PINGs by Lockkeeper's client) or `redis-rs` (two PINGs by the redis crate), the number of tasks, each on
//! its own key, and the number of rounds of all tasks together. The difference between two numbers of rounds has no cost of
//! the start. The server is another process, which is not counted.

use std::time::Duration;

use lockkeeper_core::{Attempt, Backend as _, Background, ClaimSpec, Name};
use lockkeeper_redis::{Config, Redis};
use lockkeeper_testkit::server::RedisServer;

type Failure = Box<dyn std::error::Error + Send + Sync>;

#[derive(Clone)]
enum Client {
    Claim(Redis),
    Pings(Redis),
    RedisRs(redis::aio::MultiplexedConnection),
}

impl Client {
    async fn open(what: &str, url: &str) -> Result<Self, Failure> {
        let store = async || Redis::connect(Config::from_url(url)?).await;
        Ok(match what {
            "claim" => Self::Claim(store().await?),
            "pings" => Self::Pings(store().await?),
            "redis-rs" => {
                let client = redis::Client::open(format!("{url}?protocol=resp3"))?;
                let config = redis::AsyncConnectionConfig::new().set_response_timeout(None);
                Self::RedisRs(client.get_multiplexed_async_connection_with_config(&config).await?)
            }
            _ => return Err("claim, pings or redis-rs".into()),
        })
    }

    async fn run(mut self, task: usize, rounds: usize) -> Result<(), Failure> {
        let background = Background::new(tokio::runtime::Handle::current());
        let key = format!("cost-{task}");
        for _ in 0..rounds {
            match &mut self {
                Self::Claim(store) => {
                    let name = Name::new(key.as_str())?;
                    let spec = ClaimSpec::new(name, Duration::from_secs(30), background.clone());
                    let mut claim = store.claim(spec)?;
                    let Attempt::Granted(_) = claim.attempt(None).await? else {
                        return Err("contended".into());
                    };
                    claim.release().await?;
                }
                Self::Pings(store) => {
                    store.ping().await?;
                    store.ping().await?;
                }
                Self::RedisRs(connection) => {
                    connection.send_packed_command(&redis::cmd("PING")).await?;
                    connection.send_packed_command(&redis::cmd("PING")).await?;
                }
            }
        }
        Ok(())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [what, tasks, rounds] = arguments.as_slice() else {
        return Err("usage: client_cost claim|pings|redis-rs TASKS ROUNDS".into());
    };
    let (tasks, rounds) = (tasks.parse::<usize>()?, rounds.parse::<usize>()?);
    let server = RedisServer::start()?;
    let client = Client::open(what, &server.url()).await?;
    let mut running = tokio::task::JoinSet::new();
    for task in 0..tasks {
        running.spawn(client.clone().run(task, rounds / tasks));
    }
    while let Some(done) = running.join_next().await {
        done??;
    }
    Ok(())
}
