//! What other ecosystems bring is there and works.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "test code")]

use std::process::Command;

use clinch_testkit::{Redis, tools};

fn stdout(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn python_has_the_package_that_was_asked_for() {
    let redis = Redis::start();
    let python = || tools::python(&["redis==8.1.0"]);
    let other = std::thread::spawn(python);
    let script = "import redis, sys
client = redis.Redis(port=int(sys.argv[1]))
print(redis.__version__, client.incr('n'))";
    let port = redis.port().to_string();
    assert_eq!(stdout(Command::new(python()).args(["-c", script, &port])), "8.1.0 1\n");
    assert_eq!(other.join().unwrap(), python());
}

#[test]
fn node_has_the_packages_that_were_asked_for() {
    let redis = Redis::start();
    let dir = tools::npm(&["@sesamecare-oss/redlock@1.4.0", "ioredis@5.8.2"]);
    let script = "const { Redis } = require('ioredis');
const { Redlock } = require('@sesamecare-oss/redlock');
const client = new Redis(Number(process.argv[1]));
new Redlock([client]).acquire(['a'], 1000).then(lock => lock.release())
    .then(() => { console.log('released'); client.disconnect(); });";
    let port = redis.port().to_string();
    let printed = stdout(Command::new("node").current_dir(dir).args(["-e", script, &port]));
    assert_eq!(printed, "released\n");
}

#[test]
fn other_servers_start() {
    for (binary, name, version) in
        [(tools::valkey(), "valkey_version", "9.1."), (tools::redis_8(), "redis_version", "8.2.")]
    {
        let server = Redis::builder().binary(binary).start();
        let info = server.client().info("server");
        assert!(info.get(name).is_some_and(|said| said.starts_with(version)), "{info:?}");
        server.restart();
    }
}
