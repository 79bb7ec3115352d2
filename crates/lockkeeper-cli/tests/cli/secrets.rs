//! A password in the URL of the store is never shown.

use std::fs;

use lockkeeper_testkit::server::RedisServer;

use crate::common::{Sandbox, children};

const PASSWORD: &str = "hunter2hunter2";

#[test]
fn a_password_is_not_in_the_output_or_in_the_command_line_or_environment_of_the_children() {
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
    run.write_stdin("go\n");
    let mut output = vec![run.end(), sandbox.run(&["ls"]), sandbox.run(&["doctor"])];
    let wrong = server.url().replace("op:", "unknown:");
    output.push(sandbox.run(&["run", "a", "--store", &wrong, "true"]));
    assert_eq!(output.last().unwrap().code, Some(69), "{output:?}");
    output.push(sandbox.run(&["doctor", "--store", &wrong]));
    assert_eq!(output.last().unwrap().code, Some(2), "{output:?}");
    for output in output {
        assert!(!format!("{output:?}").contains(PASSWORD), "{output:?}");
    }
}

#[test]
fn a_url_in_the_wrong_argument_is_not_repeated() {
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
        let output = sandbox.run(args);
        assert_eq!(output.code, Some(64), "{args:?}: {output:?}");
        assert!(!format!("{output:?}").contains(PASSWORD), "{output:?}");
    }
    let unreachable = sandbox.run(&["run", "a", "--store", &url, "true"]);
    assert_eq!(unreachable.code, Some(69));
    assert!(!format!("{unreachable:?}").contains(PASSWORD), "{unreachable:?}");
}
