//! TLS, with certificates that the test creates.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::time::Duration;

use lockkeeper_core::{ErrorKind, Keeper};
use lockkeeper_postgres::Postgres;
use lockkeeper_testkit::server::PostgresServer;

use crate::common::{client_at, eventually};

/// Starts a server with a certificate for `localhost`, and returns it with the path of the certificate.
async fn server() -> (PostgresServer, String) {
    let server = PostgresServer::start_or_panic();
    let data = server.dir().join("data");
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let owner = fs::metadata(&data).unwrap();
    for (file, text) in
        [("tls.crt", made.cert.pem()), ("tls.key", made.signing_key.serialize_pem())]
    {
        let path = data.join(file);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        chown(&path, Some(owner.uid()), Some(owner.gid())).unwrap();
    }
    let client = client_at(&server.url()).await;
    for sql in [
        "ALTER SYSTEM SET ssl_cert_file = 'tls.crt'",
        "ALTER SYSTEM SET ssl_key_file = 'tls.key'",
        "ALTER SYSTEM SET ssl = on",
        "SELECT pg_reload_conf()",
    ] {
        client.batch_execute(sql).await.unwrap();
    }
    let certificate = data.join("tls.crt").to_str().unwrap().to_owned();
    (server, certificate)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_work_over_tls_with_a_trusted_certificate() {
    let (server, certificate) = server().await;
    let at = |host: &str, parameters: &str| {
        format!("postgres://postgres@{host}:{}/postgres?{parameters}", server.port())
    };
    let trusted = at("localhost", &format!("sslmode=verify-full&sslrootcert={certificate}"));
    // The server reads its settings asynchronously.
    let ready = async || Postgres::connect(&trusted).await.is_ok();
    eventually("the server has TLS", ready).await;
    let keeper = Keeper::new(Postgres::connect(&trusted).await.unwrap());
    let mutex = keeper.mutex("a");
    let guard = mutex.lock().await.unwrap();
    let client = client_at(&at("127.0.0.1", "")).await;
    let sql = "SELECT count(*) FROM pg_stat_ssl s JOIN pg_locks l USING (pid) \
               WHERE s.ssl AND l.locktype = 'advisory' AND l.granted AND l.mode = 'ExclusiveLock'";
    assert_eq!(client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0), 1);
    // The cancel request is sent over TLS, too.
    assert!(mutex.try_lock_for(Duration::from_secs(2)).await.unwrap().is_none());
    keeper.close().await;
    let sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
    assert_eq!(client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0), 0);
    drop(guard);

    let error = Postgres::connect(&at("localhost", "sslmode=require")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(
        error.to_string().contains("set sslrootcert to the certificate of the authority"),
        "{error}"
    );
    let other_name = at("127.0.0.1", &format!("sslmode=require&sslrootcert={certificate}"));
    assert!(Postgres::connect(&other_name).await.is_err(), "a certificate for another name");
    let plain = Postgres::connect(&at("127.0.0.1", "sslmode=disable")).await;
    plain.expect("connects without TLS");
    let missing = at("localhost", "sslrootcert=/nosuch.pem");
    assert_eq!(Postgres::connect(&missing).await.unwrap_err().kind(), ErrorKind::Config);
}
