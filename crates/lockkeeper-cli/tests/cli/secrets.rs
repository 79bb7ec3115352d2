//! A password in the URL of the store is shown nowhere.

use std::fs;

use lockkeeper_testkit::server::RedisServer;

use crate::common::{Sandbox, children};

const PASSWORD: &str = "hunter2hunter2";

#[test]
fn a_password_is_not_in_the_output_nor_in_the_command_line_or_environment_of_the_children() {
    let server = RedisServer::builder().user("op", PASSWORD).start_or_panic();
    assert!(server.url().contains(PASSWORD));
    let sandbox = Sandbox::on(&server.url());
    let mut run = sandbox.spawn(&["run", "a", "--json", "--", "sh", "-c", "env; echo in; read x"]);
    run.wait_out("in");
    let all = children(run.pid(), "");
    assert_eq!(all.len(), 2, "the command and its guardian");
    for pid in all {
        for file in ["cmdline", "environ"] {
            let text = fs::read(format!("/proc/{}/{file}", pid.as_raw_pid())).unwrap();
            assert!(!String::from_utf8_lossy(&text).contains(PASSWORD), "{file}");
        }
    }
    run.tell("go\n");
    let mut said = vec![run.end(), sandbox.say(&["ls"]), sandbox.say(&["doctor"])];
    let wrong = server.url().replace("op:", "nobody:");
    said.push(sandbox.say(&["run", "a", "--store", &wrong, "true"]));
    assert_eq!(said.last().unwrap().code, Some(69), "{said:?}");
    said.push(sandbox.say(&["doctor", "--store", &wrong]));
    assert_eq!(said.last().unwrap().code, Some(2), "{said:?}");
    for said in said {
        assert!(!format!("{said:?}").contains(PASSWORD), "{said:?}");
    }
}

#[test]
fn a_url_in_the_wrong_place_is_not_repeated() {
    let sandbox = Sandbox::new();
    let url = format!("redis://op:{PASSWORD}@127.0.0.1:1/");
    let wrong: [&[&str]; 7] = [
        &[&url],
        &["ls", "x", &url],
        &["run", "--stor", &url],
        &["run", "a", &format!("--stor={url}"), "true"],
        &["run", "a", "--wait", &url, "true"],
        &["run", "a", "--permits", &url, "true"],
        &["completions", &url],
    ];
    for args in wrong {
        let said = sandbox.say(args);
        assert_eq!(said.code, Some(64), "{args:?}: {said:?}");
        assert!(!format!("{said:?}").contains(PASSWORD), "{said:?}");
    }
    let unreachable = sandbox.say(&["run", "a", "--store", &url, "true"]);
    assert_eq!(unreachable.code, Some(69));
    assert!(!format!("{unreachable:?}").contains(PASSWORD), "{unreachable:?}");
}
