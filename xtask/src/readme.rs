//! The README is true: every command in it runs, as it stands there, in a fresh home.

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crate::shell::{Result, root, run as sh, target};

/// The command that runs these tests; it is not run by itself.
const THIS: &str = "cargo xtask";

/// The server of the examples. One that runs for them alone stands in for it.
const EXAMPLE: &str = "redis://localhost";

/// The servers of the example of a quorum.
const EXAMPLES: &str = "redlock://r1,r2,r3";

/// How long a server may take to start.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn run() -> Result {
    let readme =
        std::fs::read_to_string(root().join("README.md")).map_err(|error| format!("README.md: {error}"))?;
    let lines = readme.lines().count();
    if lines > 200 {
        return Err(format!("README.md has {lines} lines; 200 are the most"));
    }
    let commands = commands(&readme);
    if commands.is_empty() {
        return Err("README.md has no commands".to_owned());
    }
    let home = root().join("target/readme-home");
    let _ = std::fs::remove_dir_all(&home);
    std::fs::create_dir_all(&home).map_err(|error| format!("{}: {error}", home.display()))?;
    let servers = (0..3).map(|_| Redis::start(&home)).collect::<Result<Vec<_>>>()?;
    let hosts: Vec<String> = servers.iter().map(|server| format!("127.0.0.1:{}", server.port)).collect();
    let one = hosts.first().ok_or("no server was started")?;
    let target = target();
    for block in commands.iter().filter(|block| !block.contains(THIS)) {
        let block = block.replace(EXAMPLE, &format!("redis://{one}"));
        let block = block.replace(EXAMPLES, &format!("redlock://{}", hosts.join(",")));
        let mut shell = Command::new("bash");
        // The default directory of locks is root's own; the README's commands shall not meet real locks.
        let url = format!("file://{}/locks", home.display());
        let path = format!("{}/release:{}", target.display(), std::env::var("PATH").unwrap_or_default());
        shell.args(["-euo", "pipefail", "-c", &block]).current_dir(root());
        shell.env("CLINCH_URL", url).env("PATH", path);
        // What it installs lies in that home, too; cargo's own is where it was.
        shell
            .env("CARGO_HOME", of_cargo(".cargo", "CARGO_HOME"))
            .env("RUSTUP_HOME", of_cargo(".rustup", "RUSTUP_HOME"));
        shell.env("CARGO_INSTALL_ROOT", home.join(".cargo")).env("HOME", &home);
        sh(&mut shell)?;
    }
    Ok(())
}

/// Where the toolchain keeps its files: in the home of who runs this, unless a variable says otherwise.
fn of_cargo(name: &str, variable: &str) -> PathBuf {
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(name);
    std::env::var_os(variable).map_or_else(home, PathBuf::from)
}

/// A server on a free port of this host, until dropped.
struct Redis {
    server: Child,
    port: u16,
}

impl Redis {
    fn start(home: &Path) -> Result<Redis> {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr());
        let port = free.map_err(|error| format!("no free port: {error}"))?.port();
        let server = Command::new("redis-server")
            .args([
                "--bind",
                "127.0.0.1",
                "--port",
                &port.to_string(),
                "--save",
                "",
                "--logfile",
                "redis.log",
            ])
            .current_dir(home)
            .spawn()
            .map_err(|error| format!("redis-server: {error}"))?;
        let redis = Redis { server, port };
        let start = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            if start.elapsed() > PATIENCE {
                return Err(format!("redis-server did not start; see {}", home.join("redis.log").display()));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(redis)
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// The blocks between "```sh" and "```".
fn commands(readme: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut block: Option<Vec<&str>> = None;
    for line in readme.lines() {
        match (&mut block, line) {
            (None, "```sh") => block = Some(Vec::new()),
            (Some(lines), "```") => {
                blocks.push(lines.join("\n"));
                block = None;
            }
            (Some(lines), line) => lines.push(line),
            (None, _) => {}
        }
    }
    blocks
}
