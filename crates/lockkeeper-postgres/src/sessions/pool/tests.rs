use lockkeeper_testkit::server::PostgresServer;

use super::opening::with_keepalives;
use super::*;
use crate::config::Settings;

fn pool(url: &str) -> Arc<SessionPool> {
    let Settings { driver, options, .. } = Settings::parse(url).unwrap();
    let tls = Tls::new(None, driver.get_ssl_mode()).unwrap();
    Arc::new(SessionPool::new(Source::Server { config: Box::new(driver), tls }, options))
}

/// Returns the settings as the session itself sees them. Those of its socket come from the operating system.
async fn settings(session: &Arc<Session>) -> Vec<String> {
    let sql = "SELECT setting FROM pg_settings WHERE name IN ('idle_session_timeout', \
               'tcp_user_timeout', 'tcp_keepalives_idle', 'tcp_keepalives_interval', \
               'tcp_keepalives_count', 'client_connection_check_interval', 'application_name') \
               ORDER BY name";
    let permit = QueryPermit::acquire(session, Duration::MAX).unwrap();
    let rows = permit.query(sql, Vec::new()).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

#[tokio::test]
async fn a_session_has_the_timeouts_of_the_longest_lease_and_the_last_label() {
    let server = PostgresServer::start_or_panic();
    let pool = pool(&format!("{}?sslmode=disable", server.url()));
    let key = AdvisoryKey::from_i64(1);
    let request = SessionRequest { key, ttl: Duration::from_secs(60), label: "me", fencing: None };
    let slot = pool.shared_slot(request).await.unwrap().unwrap();
    let connection = &slot.session.connection;
    let expected = ["me", "1000", "60000", "3", "30", "10", "60000"];
    assert_eq!(settings(&slot.session).await, expected);
    // A longer lease extends the idle timeout, and a shorter one does not shorten it.
    for ttl in [120, 70] {
        connection.extend_idle_timeout(Duration::from_secs(ttl)).await.unwrap();
        let expected = ["me", "1000", "120000", "3", "60", "20", "120000"];
        assert_eq!(settings(&slot.session).await, expected);
    }
    connection.configure(Duration::from_secs(70), "another").await.unwrap();
    let expected = ["another", "1000", "120000", "3", "60", "20", "120000"];
    assert_eq!(settings(&slot.session).await, expected);
    slot.end_unused();
}

#[tokio::test]
async fn concurrent_queries_with_a_limit_keep_it() {
    let server = PostgresServer::start_or_panic();
    let pool = pool(&format!("{}?sslmode=disable", server.url()));
    let key = AdvisoryKey::from_i64(1);
    let request = SessionRequest { key, ttl: Duration::from_secs(60), label: "me", fencing: None };
    let slot = pool.shared_slot(request).await.unwrap().unwrap();
    let permit = QueryPermit::acquire(&slot.session, Duration::MAX).unwrap();
    let sql = "SELECT current_setting('lock_timeout')";
    let clients = (0..8).map(|client| {
        let permit = permit.clone();
        tokio::spawn(async move {
            for _ in 0..20 {
                // So that queries start while others are about to end.
                tokio::time::sleep(Duration::from_millis(client)).await;
                let (limit, sql) = (Duration::from_millis(100), format!("{sql}, pg_sleep(0.002)"));
                let rows = permit.query_within(limit, sql).await.unwrap();
                assert_eq!(rows[0].get::<_, &str>(0), "100ms");
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    let rows = permit.query(sql, Vec::new()).await.unwrap();
    assert_eq!(rows[0].get::<_, &str>(0), "0");
    slot.end_unused();
}

#[test]
fn a_connection_probes_its_server_as_often_as_the_server_probes_it() {
    let config: Config = "postgres://me@host/db".parse().unwrap();
    let probing = with_keepalives(&config, Duration::from_secs(60));
    assert_eq!(probing.get_keepalives_idle(), Duration::from_secs(30));
    assert_eq!(probing.get_keepalives_interval(), Some(Duration::from_secs(10)));
    assert_eq!(probing.get_keepalives_retries(), Some(3));
    assert_eq!(probing.get_tcp_user_timeout(), Some(&Duration::from_secs(60)));
    let own = "postgres://me@host/db?keepalives_idle=7&keepalives_interval=8&tcp_user_timeout=9";
    let probing = with_keepalives(&own.parse().unwrap(), Duration::from_secs(60));
    assert_eq!(probing.get_keepalives_idle(), Duration::from_secs(7));
    assert_eq!(probing.get_keepalives_interval(), Some(Duration::from_secs(8)));
    assert_eq!(probing.get_tcp_user_timeout(), Some(&Duration::from_secs(9)));
}
