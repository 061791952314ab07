//! Workers: lock clients of other ecosystems, told line by line what to do with one key of one server, or of several that
//! vote.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use clinch_testkit::{Redis, tools};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::rust;
use super::{PATIENCE, within};

/// A lock client that fleets run.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Foreign {
    /// redis-py's `Lock`.
    RedisPy,
    /// `@sesamecare-oss/redlock` on ioredis.
    Redlock,
    /// rslock, in a task of this process.
    Rslock,
    /// `redis-cli` in a shell script.
    RedisCli,
}

/// One client with one key. Killed when dropped, also by a panic.
///
/// | order | answer |
/// | --- | --- |
/// | `try` | `yes` or `no` |
/// | `lock` | `locked`, after as many tries as it takes |
/// | `extend` | `extended`, from now on for the whole lease, or `lost` |
/// | `release` | `released` or `lost` |
/// | `work NAME TARGET PAUSE_MS` | `done SECTIONS OVERLAPS`, when the counter has its target; see [`Ledger`](super::ledger::Ledger) |
pub(crate) struct Worker {
    body: Body,
    lines: mpsc::UnboundedReceiver<String>,
}

enum Body {
    Process(Child, ChildStdin),
    Task(JoinHandle<()>, mpsc::UnboundedSender<String>),
}

impl Worker {
    /// A client whose locks live for `lease`; it waits between two tries as long as it does by default.
    pub(crate) async fn start(client: Foreign, server: &Redis, key: &str, lease: Duration) -> Worker {
        Worker::polling(client, std::slice::from_ref(server), key, lease, None).await
    }

    /// A client of all these servers that waits about as long as `poll` between two tries; `None`: as it does by default.
    pub(crate) async fn polling(
        client: Foreign,
        servers: &[Redis],
        key: &str,
        lease: Duration,
        poll: Option<Duration>,
    ) -> Worker {
        let (say, lines) = mpsc::unbounded_channel();
        let command = match client {
            Foreign::RedisPy => {
                let mut command = Command::new(tools::python(&["redis==8.1.0"]));
                command.arg(script("redis_py.py"));
                Some(command)
            }
            Foreign::Redlock => {
                let home = tools::npm(&["@sesamecare-oss/redlock@1.4.0", "ioredis@5.11.1"]);
                let mut command = Command::new("node");
                command.arg(script("redlock.js")).env("NODE_PATH", home.join("node_modules"));
                Some(command)
            }
            Foreign::RedisCli => {
                let mut command = Command::new("bash");
                command.arg(script("redis_cli.sh"));
                Some(command)
            }
            Foreign::Rslock => None,
        };
        let body = match command {
            Some(mut command) => {
                let poll = poll.map_or("-".to_owned(), |poll| poll.as_millis().to_string());
                let ports: Vec<String> = servers.iter().map(|server| server.port().to_string()).collect();
                command.args([&ports.join(","), key, &lease.as_millis().to_string(), &poll]);
                process(&mut command, say)
            }
            None => {
                let (orders, told) = mpsc::unbounded_channel();
                let ledger = super::ledger::Ledger::new(servers);
                let client = rust::Client::new(servers, key, lease, poll);
                Body::Task(tokio::spawn(rust::obey(client, ledger, told, say)), orders)
            }
        };
        let mut worker = Worker { body, lines };
        assert_eq!(worker.says().await, "ready");
        worker
    }

    pub(crate) fn tell(&mut self, order: &str) {
        match &mut self.body {
            Body::Process(_, orders) => writeln!(orders, "{order}").expect("the worker listens"),
            Body::Task(_, orders) => orders.send(order.to_owned()).expect("the worker listens"),
        }
    }

    /// The next answer.
    pub(crate) async fn says(&mut self) -> String {
        within(PATIENCE, "a worker answers", self.lines.recv()).await.expect("the worker lives")
    }

    pub(crate) async fn ask(&mut self, order: &str) -> String {
        self.tell(order);
        self.says().await
    }

    /// Whether the last order has no answer yet.
    pub(crate) fn is_silent(&mut self) -> bool {
        self.lines.is_empty()
    }

    /// Ends the client as it stands, without another command to the server.
    pub(crate) fn kill(&mut self) {
        match &mut self.body {
            Body::Process(child, _) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            Body::Task(task, _) => {
                task.abort();
                // Another thread may be in the middle of it.
                while !task.is_finished() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
    }
}

fn script(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign").join(name)
}

fn process(command: &mut Command, say: mpsc::UnboundedSender<String>) -> Body {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let stdout = BufReader::new(child.stdout.take().expect("it is piped"));
    // Ends with the pipe, that is with the process.
    std::thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| say.send(line)));
    let orders = child.stdin.take().expect("it is piped");
    Body::Process(child, orders)
}
