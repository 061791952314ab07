//! A Redis server of the bench's own, and what it says about the commands that clients sent it.

use std::collections::BTreeMap;
use std::panic::catch_unwind;

use clinch_testkit::Redis;

use crate::Result;
use crate::raw_redis::Raw;

/// Starts a server without persistence, on a free port. It may use the CPUs that the calling thread may use, and ends with
/// its value, or with this process.
pub(crate) fn start() -> Result<Redis> {
    // The kit panics, as tests like it. Here one scenario is not measured, and the others are.
    catch_unwind(Redis::start).map_err(|_| NO_START.into())
}

/// Starts a server that writes what it does to a file before it answers.
pub(crate) fn start_logging() -> Result<Redis> {
    let start = || Redis::builder().arg("--appendonly", "yes").arg("--appendfsync", "always").start();
    catch_unwind(start).map_err(|_| NO_START.into())
}

const NO_START: &str = "redis-server does not start; stderr says why";

/// How often each command ran.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Calls(BTreeMap<String, u64>);

impl Calls {
    /// All calls since the server started.
    pub(crate) fn look(raw: &mut Raw) -> Result<Calls> {
        Ok(Calls::parse(&raw.call(&["INFO", "commandstats"])?.text()?))
    }

    fn parse(info: &str) -> Calls {
        let one = |line: &str| {
            let (command, figures) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            Some((command.to_ascii_lowercase(), figures.split(',').next()?.parse().ok()?))
        };
        Calls(info.lines().filter_map(one).collect())
    }

    /// What came after an earlier look, that look itself not counted.
    pub(crate) fn since(&self, before: &Calls) -> Calls {
        let mut after = self.clone();
        for (command, calls) in &mut after.0 {
            *calls = calls.saturating_sub(before.of(command) + u64::from(command == "info"));
        }
        after
    }

    /// The calls on several servers.
    pub(crate) fn sum(all: impl IntoIterator<Item = Calls>) -> Calls {
        let mut sum = BTreeMap::new();
        for (command, calls) in all.into_iter().flat_map(|calls| calls.0) {
            *sum.entry(command).or_default() += calls;
        }
        Calls(sum)
    }

    pub(crate) fn of(&self, command: &str) -> u64 {
        self.0.get(command).copied().unwrap_or(0)
    }

    /// The commands that clients sent.
    ///
    /// The server counts what scripts call like what clients send. Scripts call nothing but commands on data and
    /// PUBLISH, so everything else was sent: scripts themselves, what sets up a connection, subscriptions, looks at the
    /// server. Of the commands on data those in `direct` are counted too, which the client in question sends itself and
    /// its scripts do not call; BLPOP and its like cannot be called by scripts.
    pub(crate) fn sent(&self, direct: &[&str]) -> u64 {
        let sent = |command: &str| {
            let name = command.split('|').next().unwrap_or_default();
            NOT_ON_DATA.contains(&name) || direct.contains(&name)
        };
        self.0.iter().filter(|(command, _)| sent(command)).map(|(_, calls)| calls).sum()
    }
}

/// The commands that clients sent while something ran, by name: exact, and too slow for what is timed.
pub(crate) fn monitored(url: &str, body: impl FnOnce() -> Result<()>) -> Result<BTreeMap<String, u64>> {
    let monitor = Monitor::start(url)?;
    body()?;
    let mut sent = BTreeMap::new();
    for command in monitor.end()?.iter().filter_map(|line| sent_command(line)) {
        *sent.entry(command).or_default() += 1;
    }
    Ok(sent)
}

/// Sees every command of a server, those of scripts included.
#[derive(Debug)]
pub(crate) struct Monitor {
    raw: Raw,
    url: String,
}

impl Monitor {
    pub(crate) fn start(url: &str) -> Result<Monitor> {
        let mut raw = Raw::connect(url)?;
        raw.call(&["MONITOR"])?;
        Ok(Monitor { raw, url: url.to_owned() })
    }

    /// What was seen until now, line by line.
    pub(crate) fn end(mut self) -> Result<Vec<String>> {
        const END: &str = "end of watch";
        Raw::connect(&self.url)?.call(&["ECHO", END])?;
        let mut lines = Vec::new();
        loop {
            let line = self.raw.line()?;
            if line.contains(END) {
                return Ok(lines);
            }
            lines.push(line);
        }
    }
}

/// The command in a line of MONITOR, such as `+1339518083.1 [0 127.0.0.1:60866] "SET" "k" "v"`, unless a script called it.
pub(crate) fn sent_command(line: &str) -> Option<String> {
    let (source, command) = line.split_once("] \"")?;
    let command = command.split('"').next()?.to_ascii_uppercase();
    (!source.ends_with(" lua")).then_some(command)
}

/// Commands that no script of a lock calls.
const NOT_ON_DATA: [&str; 26] = [
    "auth",
    "blmove",
    "blpop",
    "brpop",
    "client",
    "cluster",
    "command",
    "config",
    "echo",
    "eval",
    "eval_ro",
    "evalsha",
    "evalsha_ro",
    "fcall",
    "function",
    "hello",
    "info",
    "ping",
    "psubscribe",
    "script",
    "select",
    "ssubscribe",
    "subscribe",
    "sunsubscribe",
    "unsubscribe",
    "wait",
];

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "# Commandstats\r\ncmdstat_set:calls=5,usec=9,usec_per_call=1.80\r\n\
        cmdstat_info:calls=2,usec=50\r\ncmdstat_client|setname:calls=1,usec=3\r\n";
    const AFTER: &str = "cmdstat_set:calls=105,usec=9\r\ncmdstat_evalsha:calls=50,usec=9\r\n\
        cmdstat_info:calls=4,usec=90\r\ncmdstat_client|setname:calls=3,usec=3\r\ncmdstat_publish:calls=9,usec=1\r\n";

    #[test]
    fn what_scripts_call_is_not_counted_as_sent() {
        let calls = Calls::parse(AFTER).since(&Calls::parse(BEFORE));
        assert_eq!((calls.of("set"), calls.of("evalsha"), calls.of("client|setname")), (100, 50, 2));
        assert_eq!(calls.of("info"), 1, "the first look is not counted");
        assert_eq!(calls.sent(&[]), 53, "EVALSHA, CLIENT SETNAME, INFO");
        assert_eq!(calls.sent(&["set"]), 153);
    }

    #[test]
    fn a_line_of_monitor_tells_what_was_sent() {
        let sent = |line: &str| sent_command(line);
        assert_eq!(sent("+1.5 [0 127.0.0.1:6] \"evalsha\" \"f00\"").as_deref(), Some("EVALSHA"));
        assert_eq!(sent("+1.5 [0 lua] \"SET\" \"k\""), None);
        assert_eq!(sent("+OK"), None);
    }
}
