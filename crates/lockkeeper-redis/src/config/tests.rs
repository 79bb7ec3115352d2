use super::*;

fn address(host: &str, port: u16) -> Address {
    Address::tcp(host, port)
}

#[test]
fn a_url_sets_all_options() {
    let config = Config::from_url(
        "redis://ann:p%40ss%2F%3F@db.example:7000/3?prefix=shop&min_replicas=2&\
         connect_timeout=500ms&command_timeout=2s&protocol=resp2",
    );
    let config = config.unwrap();
    assert_eq!(config.servers, Servers::One(address("db.example", 7000)));
    assert_eq!(config.client.username.as_deref(), Some("ann"));
    assert_eq!(config.client.password.as_deref(), Some("p@ss/?"));
    assert_eq!((config.client.database, config.min_replicas), (3, 2));
    assert_eq!(config.template(), KeyTemplate::of_prefix("shop"));
    assert_eq!(config.client.connect_timeout, Duration::from_millis(500));
    assert_eq!(config.client.command_timeout, Duration::from_secs(2));
    assert_eq!(config.client.protocol, Protocol::Resp2);
}

#[test]
fn defaults_are_those_of_redis() {
    for url in ["redis://host", "redis://host/", "redis://host?prefix=lockkeeper"] {
        let config = Config::from_url(url).unwrap();
        assert_eq!(config.servers, Servers::One(address("host", 6379)));
        assert_eq!(
            (config.client.username, config.client.password, config.client.database),
            (None, None, 0)
        );
    }
    let config = Config::from_url("redis://secret@[::1]:7000").unwrap();
    assert_eq!(config.servers, Servers::One(address("::1", 7000)));
    assert_eq!(config.client.password.as_deref(), Some("secret"));
    assert_eq!(Config::from_url("redis://:pw@h").unwrap().client.password.as_deref(), Some("pw"));
}

#[test]
fn sentinels_clusters_and_redlock_take_several_hosts() {
    let config = Config::from_url("redis+sentinel://:pw@a,b:1,[::2]/mymaster/4").unwrap();
    let sentinels = vec![address("a", 26379), address("b", 1), address("::2", 26379)];
    let master = "mymaster".to_owned();
    assert_eq!(config.servers, Servers::Sentinel { sentinels, master });
    assert_eq!(config.client.database, 4);
    let config = Config::from_url("redis+cluster://a:1,b/").unwrap();
    assert_eq!(config.servers, Servers::Cluster(vec![address("a", 1), address("b", 6379)]));
    let nodes = Config::redlock_from_url("redlock://u:pw@a,b:1,c?prefix=x").unwrap();
    let servers: Vec<_> = nodes.iter().map(|node| node.servers.clone()).collect();
    let expected = [address("a", 6379), address("b", 1), address("c", 6379)];
    assert_eq!(servers, expected.map(Servers::One));
    assert!(nodes.iter().all(|node| node.client.password.as_deref() == Some("pw")));
}

#[test]
fn the_error_for_an_invalid_url_is_one_line_without_secrets() {
    let bad = [
        "redis:hunter2",
        "redis://",
        "redis://:hunter2@",
        "redis://:hunter2@/0",
        "redis://u:hunter2@host:port",
        "redis://u:hunter2@host:",
        "redis://u:hunter2@host:0",
        "redis://u:hunter2@host:99999",
        "redis://u:hunter2@host/hunter2",
        "redis://u:hunter2@host/-1",
        "redis://u:hunter2@host/0/1",
        "redis://u:hun/ter2hunter2@host",
        "redis://u:hun?hunter2@host",
        "redis://u:hun#hunter2@host",
        "redis://u:hunter2@a,b",
        "redis://u:hunter2@host?nosuch=hunter2",
        "redis://u:hunter2@host?prefix",
        "redis://u:hunter2@host?prefix=",
        "redis://u:hunter2@host?prefix=a%7Bb",
        "redis://u:hunter2@host?prefix=a%20b",
        "redis://u:hunter2@host?prefix={",
        "redis://u:hunter2@host?key_template=hunter2",
        "redis://u:hunter2@host?key_template={name}",
        "redis://u:hunter2@host?key_template=lock:{name}&prefix=a",
        "redis://u:hunter2@host?prefix=a&key_template=lock:{name}",
        "redis+cluster://u:hunter2@host?key_template=lock:{name}",
        "redis://%zzhunter2@host",
        "redis://u:hunter2%@host",
        "redis://u:hunter2%4@host",
        "redis://u:hunter2@ho%GGst",
        "redis://u:hunter2@host?prefix=%zz",
        "redis://u:hunter2@host?ca_file=/hunter2",
        "redlock://:hunter2@a,b,c/0/hunter2",
        "redis://u:hunter2@host?prefix=a&prefix=b",
        "redis://u:hunter2@host?min_replicas=hunter2",
        "redis://u:hunter2@host?connect_timeout=0s",
        "redis://u:hunter2@host?connect_timeout=3",
        "redis://u:hunter2@host?connect_timeout=99999999999s",
        "redis://u:hunter2@host?protocol=4",
        "redis://u:hunter2@host?sentinel_password=hunter2",
        "redis://u:hunter2%FF@host",
        "redis://u:hunter2@[::1",
        "redis+sentinel://:hunter2@a,b",
        "redis+sentinel://:hunter2@a,b/",
        "redis+sentinel://:hunter2@a,,b/m",
        "redis+cluster://:hunter2@a/1",
        "redlock://:hunter2@a,b,c/hunter2",
        "redis+unix://",
        "redis+unix:///",
        "redis+unix://u:hunter2@/",
        "redis+unix:///run/",
        "redis+unix:///run/a%00b",
        "redis+unix:///run/a%zz",
        "redis+unix://hunter2/run/redis.sock",
        "redis+unix://u:hun/hunter2@/run/redis.sock",
        "redis+unix://:hunter2@/run/redis.sock?db=-1",
        "redis+unix://:hunter2@/run/redis.sock?db=hunter2",
        "redis+unix://:hunter2@/run/redis.sock?tls=true",
        "redis+unix://:hunter2@/run/redis.sock?sentinel_password=hunter2",
        "rediss+unix:///run/redis.sock",
        "redis://:hunter2@host?db=1",
        "redlock://:hunter2@a,b,c?db=1",
        "http://:hunter2@host",
    ];
    for url in bad {
        let made = if url.starts_with("redlock") {
            Config::redlock_from_url(url).map(|_| ())
        } else {
            Config::from_url(url).map(|_| ())
        };
        let error = made.expect_err(url);
        let shown = format!("{error} {error:?}");
        assert!(!shown.contains("hunter2") && !shown.contains('\n'), "{url}: {shown}");
        assert_eq!(error.kind(), ErrorKind::Config, "{url}");
    }
}

#[test]
fn debug_output_contains_no_user_name_and_no_password() {
    let config = Config::from_url("redis+sentinel://ann:hunter2@h/m?sentinel_password=hunter3");
    let shown = format!("{:?} {:#?}", config.clone().unwrap(), config.unwrap());
    assert!(!shown.contains("hunter") && !shown.contains("ann"), "{shown}");
}

#[test]
fn from_client_copies_address_user_and_database() {
    let client = redis::Client::open("redis://ann:pw@host:7000/2").unwrap();
    let config = Config::from_client(&client).unwrap();
    assert_eq!(config.servers, Servers::One(address("host", 7000)));
    assert_eq!(config.client.username.as_deref(), Some("ann"));
    assert_eq!(config.client.database, 2);
}

#[test]
fn a_url_sets_the_key_template() {
    let expected = KeyTemplate::parse("lock:{{name}}").unwrap();
    for url in [
        "redis://host?key_template=lock:{{name}}",
        "redis://host?key_template=lock%3A%7B%7Bname%7D%7D",
        "redis+cluster://host?key_template=lock:{{name}}",
        "redis+sentinel://host/m?key_template=lock:{{name}}",
    ] {
        assert_eq!(Config::from_url(url).unwrap().template(), expected, "{url}");
    }
    // Only a cluster needs the hash tag.
    let nodes = Config::redlock_from_url("redlock://a,b,c?key_template=lock:{name}").unwrap();
    let expected = KeyTemplate::parse("lock:{name}").unwrap();
    assert!(nodes.iter().all(|node| node.template() == expected));
}

#[test]
fn prefix_and_key_template_exclude_each_other() {
    let config = Config::from_url("redis://host").unwrap();
    let template = config.clone().key_template("lock:{name}").unwrap();
    assert_eq!(template.prefix("shop").unwrap_err().kind(), ErrorKind::InvalidOption);
    let prefix = config.prefix("shop").unwrap();
    assert_eq!(prefix.key_template("lock:{name}").unwrap_err().kind(), ErrorKind::InvalidOption);
}

#[cfg(unix)]
#[test]
fn a_url_names_a_unix_socket() {
    for (url, path, database) in [
        ("redis+unix:///run/redis.sock", "/run/redis.sock", 0),
        ("Redis+Unix:///run/redis.sock?db=2&prefix=shop", "/run/redis.sock", 2),
        ("redis+unix:///run/a%20b%3F%2Fc?db=0", "/run/a b?/c", 0),
        ("redis+unix:///run//a:@,b.sock", "/run//a:@,b.sock", 0),
    ] {
        let config = Config::from_url(url).unwrap();
        assert_eq!(config.servers, Servers::One(Address::Unix(path.into())), "{url}");
        assert_eq!(config.client.database, database, "{url}");
        assert_eq!((config.client.username, config.client.password), (None, None), "{url}");
    }
    let config = Config::from_url("redis+unix://ann:p%2Fw@/run/redis.sock").unwrap();
    assert_eq!(config.servers, Servers::One(Address::Unix("/run/redis.sock".into())));
    assert_eq!(config.client.username.as_deref(), Some("ann"));
    assert_eq!(config.client.password.as_deref(), Some("p/w"));
}

#[cfg(not(unix))]
#[test]
fn a_unix_socket_is_refused_on_other_platforms() {
    let error = Config::from_url("redis+unix:///run/redis.sock").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
}
