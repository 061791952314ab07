//! Go's `concurrency.Mutex`, etcd's own lock, as a worker of the bench: its program, and how that is called.

use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::process::Command;

use clinch_testkit::tools;

use crate::Result;
use crate::raw_etcd::{address, lock_key, parameter};

/// Where Debian's package puts the library.
const LIBRARY: &str = "/usr/share/gocode/src/go.etcd.io/etcd/clientv3/concurrency";

/// The library's own default, in seconds.
const TTL: &str = "60";

/// The command that contends, holds or waits, with so many waiters, for the lock of a URL. The first call compiles it.
pub(crate) fn command(role: &str, url: &str, waiters: usize) -> Result<Command> {
    let mut command = Command::new(program()?);
    let ttl = parameter(url, "ttl").and_then(|ttl| ttl.strip_suffix('s')).unwrap_or(TTL);
    command.args([role, address(url)?, &lock_key(url), ttl, &waiters.to_string()]);
    Ok(command)
}

/// Whether it can be had, or what is to be installed for that.
pub(crate) fn program() -> Result<PathBuf> {
    let compiler = Command::new("go").arg("version").output().is_ok_and(|output| output.status.success());
    if !compiler || !Path::new(LIBRARY).is_dir() {
        let what = "Go's concurrency.Mutex is measured beside and needs Go and etcd's library for it";
        return Err(format!("{what} (Debian: apt-get install golang-go golang-etcd-server-dev)").into());
    }
    let compile = || tools::go("bench-etcd-mutex", include_str!("foreign/go_mutex.go"));
    catch_unwind(compile).map_err(|_| "Go's concurrency.Mutex does not compile; stderr says why".into())
}
