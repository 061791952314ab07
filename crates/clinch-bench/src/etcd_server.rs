//! An etcd server of the bench's own, and what it says about the requests that clients sent it.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::panic::catch_unwind;
use std::time::Duration;

use clinch_testkit::Etcd;

use crate::Result;
use crate::machine::file_system;
use crate::raw_etcd::address;

/// How long the page of metrics may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Starts a server on free ports. It may use the CPUs that the calling thread may use, and ends with its value, or with
/// this process.
pub(crate) fn start() -> Result<Etcd> {
    // The kit panics, as tests like it. Here one scenario is not measured, and the others are.
    let missing = "etcd does not start; stderr says why (Debian: apt-get install etcd-server etcd-client)";
    catch_unwind(Etcd::start).map_err(|_| missing.into())
}

/// Where the server's writes go, without which their times say little.
pub(crate) fn note(server: &Etcd) -> String {
    match file_system(server.dir()).as_str() {
        "tmpfs" => {
            "etcd's log lies in memory here: syncing it costs nothing, and times are too good.".to_owned()
        }
        kind => format!("etcd runs as one member and syncs its log, on {kind}, before it answers a write."),
    }
}

/// What the server has counted, by the name and labels of the metric.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Calls(BTreeMap<String, f64>);

impl Calls {
    /// All since the server started. The page itself is no request that is counted.
    pub(crate) fn look(url: &str) -> Result<Calls> {
        let mut stream = TcpStream::connect(address(url)?)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        write!(stream, "GET /metrics HTTP/1.0\r\nHost: etcd\r\n\r\n")?;
        let mut page = String::new();
        stream.read_to_string(&mut page)?;
        Ok(Calls::parse(&page))
    }

    fn parse(page: &str) -> Calls {
        let counted =
            |line: &&str| line.starts_with(STARTED) || line.starts_with(RECEIVED) || line.starts_with(ROUNDS);
        let one = |line: &str| {
            let (metric, value) = line.rsplit_once(' ')?;
            Some((metric.to_owned(), value.parse().ok()?))
        };
        Calls(page.lines().filter(counted).filter_map(one).collect())
    }

    /// What came after an earlier look.
    pub(crate) fn since(&self, before: &Calls) -> Calls {
        let earlier = |metric: &str| before.0.get(metric).copied().unwrap_or(0.0);
        Calls(self.0.iter().map(|(metric, value)| (metric.clone(), value - earlier(metric))).collect())
    }

    /// Requests. A stream counts once, however much goes over it.
    pub(crate) fn requests(&self) -> f64 {
        self.sum(STARTED, "")
    }

    /// Requests of one method.
    pub(crate) fn requests_of(&self, method: &str) -> f64 {
        self.sum(STARTED, &format!("grpc_method=\"{method}\""))
    }

    /// Messages that clients sent: of a request its one, of a stream all, such as the orders to watch a key.
    pub(crate) fn messages(&self) -> f64 {
        self.sum(RECEIVED, "")
    }

    /// Messages that clients sent for one method.
    pub(crate) fn of(&self, method: &str) -> f64 {
        self.sum(RECEIVED, &format!("grpc_method=\"{method}\""))
    }

    /// Writes that the members agreed on.
    pub(crate) fn rounds(&self) -> f64 {
        self.sum(ROUNDS, "")
    }

    fn sum(&self, metric: &str, label: &str) -> f64 {
        let wanted = |name: &str| name.starts_with(metric) && name.contains(label);
        self.0.iter().filter(|(name, _)| wanted(name)).map(|(_, value)| value).sum()
    }
}

const STARTED: &str = "grpc_server_started_total";
const RECEIVED: &str = "grpc_server_msg_received_total";
const ROUNDS: &str = "etcd_server_proposals_applied_total";

/// What was asked of the server while something ran.
pub(crate) fn counted<T>(url: &str, body: impl FnOnce() -> Result<T>) -> Result<(T, Calls)> {
    let before = Calls::look(url)?;
    let done = body()?;
    Ok((done, Calls::look(url)?.since(&before)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_messages_and_writes_are_counted_apart() {
        let page = |txn: u32, watched: u32| {
            format!(
                "# HELP grpc_server_started_total Total\n\
                 grpc_server_started_total{{grpc_method=\"Txn\",grpc_type=\"unary\"}} {txn}\n\
                 grpc_server_started_total{{grpc_method=\"Watch\",grpc_type=\"bidi_stream\"}} 1\n\
                 grpc_server_msg_received_total{{grpc_method=\"Txn\"}} {txn}\n\
                 grpc_server_msg_received_total{{grpc_method=\"Watch\"}} {watched}\n\
                 etcd_server_proposals_applied_total 1e+02\n\
                 etcd_server_proposals_pending 7\n"
            )
        };
        let before = Calls::parse("grpc_server_started_total{grpc_method=\"Txn\",grpc_type=\"unary\"} 2\n");
        let calls = Calls::parse(&page(12, 40)).since(&before);
        assert_eq!((calls.requests(), calls.messages(), calls.rounds()), (11.0, 52.0, 100.0));
        assert_eq!((calls.of("Watch"), calls.of("Range")), (40.0, 0.0));
        assert_eq!((calls.requests_of("Watch"), calls.requests_of("xn")), (1.0, 0.0));
    }
}
