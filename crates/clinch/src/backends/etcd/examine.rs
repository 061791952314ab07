//! What the promises of the members of a URL rest on, each looked at on a connection of its own, step by step, so that it is known which
//! step fails.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use super::failure::Failure;
use super::link::{self, Link, Next};
use super::settings::{Address, Settings};
use super::store::Store;
use super::wire::{self, StatusRequest, StatusResponse};
use crate::backends::approach::unreached;
use crate::check::{Check, Verdict};
use crate::error::ErrorKind;

/// How long a member may take to say how it is.
const PATIENCE: Duration = Duration::from_secs(2);

/// From what part of its quota on a database is called nearly full, in percent.
const NEARLY_FULL: i64 = 80;

/// The oldest version that is supported.
const OLDEST: (u32, u32, u32) = (3, 4, 0);

/// What was seen of a member.
struct Seen {
    checks: Vec<Check>,
    cluster: Option<u64>,
}

impl Store {
    /// Looks at all members that the URL names, and at our rights.
    pub(super) async fn examine_all(&self) -> Vec<Check> {
        let settings = &self.client.settings;
        let members = settings.endpoints.iter().enumerate();
        let seen = join_all(members.map(|(endpoint, address)| self.member(endpoint, address))).await;
        let serves = |seen: &Seen| seen.checks.iter().all(|check| check.verdict != Verdict::Fail);
        let is_served = seen.iter().any(serves);
        let mut clusters: Vec<u64> = seen.iter().filter_map(|seen| seen.cluster).collect();
        clusters.sort_unstable();
        clusters.dedup();
        let mut checks = vec![Check::pass("url", meaning(settings))];
        for member in seen {
            let spares =
                |check: Check| if is_served && check.what != "alarm" { check.spared() } else { check };
            checks.extend(member.checks.into_iter().map(spares));
        }
        match clusters.as_slice() {
            [] => {}
            [_] => checks.extend([self.rights().await, self.watches().await]),
            many => checks.push(Check::fail(
                "cluster",
                format!("the servers of the URL belong to {} clusters", many.len()),
                "name members of one cluster",
            )),
        }
        checks
    }

    async fn member(&self, endpoint: usize, address: &Address) -> Seen {
        let mut seen = Seen { checks: Vec::new(), cluster: None };
        let begun = self.now();
        match self.status(endpoint, address).await {
            Err(failed) => seen.checks.push(failed),
            Ok(status) => {
                let time = self.now().since(begun);
                seen.checks.push(Check::pass("reach", format!("connected and answered within {time:.1?}")));
                seen.checks.extend([version(&status), role(&status), alarms(&status), size(&status)]);
                seen.cluster = status.header.map(|header| header.cluster);
            }
        }
        seen.checks = seen.checks.into_iter().map(|check| check.at(address)).collect();
        seen
    }

    /// How a member is, by its own word; or which step failed.
    async fn status(&self, endpoint: usize, address: &Address) -> Result<StatusResponse, Check> {
        let (env, settings) = (&self.client.env, &self.client.settings);
        let stream = link::limited(env, address, link::reach(env, address)).await;
        let stream = stream.map_err(|error| unreached(&error))?;
        let stream = link::limited(env, address, link::encrypted(settings, address, stream)).await;
        let stream = stream.map_err(|error| {
            Check::failed("tls", &error, "does the server speak TLS there? etcd:// speaks without")
        })?;
        let next = Arc::new(Next::new(endpoint, settings.endpoints.len()));
        let link = link::limited(env, address, Link::over(stream, env, settings, endpoint, &next)).await;
        let no_etcd =
            "is that an etcd? one that speaks TLS alone is etcds://; else mend host or port in the URL";
        let link = link.map_err(|error| Check::failed("server", &error, no_etcd))?;
        let answer = link.unary(wire::STATUS, StatusRequest {}, None, PATIENCE).await;
        answer.map_err(|status| {
            let failure = Failure::new(status, link.server());
            let what = if failure.is_leaderless() { "role" } else { "server" };
            Check::failed(what, &failure.into_error(), no_etcd)
        })
    }

    /// Whether our user may do what is needed. Asked of whatever member answers.
    async fn rights(&self) -> Check {
        match self.check().await {
            Ok(()) => Check::pass("rights", format!("read and write on \"{}\"", self.prefix())),
            Err(error) if error.kind() == ErrorKind::Refused => {
                Check::failed("rights", &error, "give this user a role with readwrite on the prefix")
            }
            Err(error) => Check::failed("rights", &error, "see what else is said of the members"),
        }
    }

    /// Whether we are told of changes, without which waiters hear of no release. Asked of whatever member answers.
    async fn watches(&self) -> Check {
        let (env, until) = (&self.client.env, self.now() + PATIENCE);
        let opened = async {
            let watch = self.watcher.read(format!("{}%watch", self.prefix()).as_bytes(), false)?;
            loop {
                let news = watch.news();
                match news.refused {
                    Some(error) => return Err(error),
                    None if news.opened > 0 => return Ok(()),
                    None => watch.told().await,
                }
            }
        };
        tokio::select! {
            biased;
            opened = opened => match opened {
                Ok(()) => Check::pass("watch", "changes are told"),
                Err(error) => Check::failed("watch", &error, "waiters hear of no release through it"),
            },
            () = env.sleep_until(until) => {
                Check::fail("watch", format!("none was opened within {PATIENCE:?}"), "see what else is said of the members")
            }
        }
    }
}

/// What a URL means, but for its secrets.
fn meaning(settings: &Settings) -> String {
    let members: Vec<String> = settings.endpoints.iter().map(Address::to_string).collect();
    let login = if settings.credentials.is_some() { "with a login" } else { "without a login" };
    let tls = if settings.tls.is_some() { "with TLS" } else { "not encrypted" };
    format!("etcd at {}; keys \"{}NAME/\", {login}, {tls}", members.join(", "), settings.prefix)
}

fn version(status: &StatusResponse) -> Check {
    let seen = format!("etcd {}", status.version);
    let mut parts = status.version.split(['.', '-']).map(|part| part.parse::<u32>().unwrap_or(0));
    let mut part = || parts.next().unwrap_or(0);
    match (part(), part(), part()) {
        known if known < OLDEST => Check::fail("version", seen, "use version 3.4 or later"),
        (3, 4, ..31) | (3, 5, ..13) => Check::warn(
            "version",
            format!("{seen}: a leader that stood still may end leases that its successor has renewed"),
            "use 3.4.31, 3.5.13 or later",
        ),
        _ => Check::pass("version", seen),
    }
}

fn role(status: &StatusResponse) -> Check {
    let member = status.header.as_ref().map(|header| header.member);
    match status.leader {
        0 => Check::fail(
            "role",
            "it knows no leader",
            "start more members: most of them must be up and reach each other",
        ),
        _ if status.is_learner => Check::fail(
            "role",
            "it only learns as yet, and serves next to nothing",
            "promote it, or leave it out of the URL",
        ),
        leader if Some(leader) == member => Check::pass("role", "leader"),
        _ => Check::pass("role", "follower"),
    }
}

fn alarms(status: &StatusResponse) -> Check {
    // That there is no leader is told apart.
    let alarms: Vec<&str> =
        status.errors.iter().map(String::as_str).filter(|error| error.contains("alarm")).collect();
    match alarms.is_empty() {
        true => Check::pass("alarm", "none"),
        false => Check::fail(
            "alarm",
            alarms.join(", "),
            "NOSPACE: compact, defragment and `etcdctl alarm disarm`, or raise --quota-backend-bytes; CORRUPT: replace the member",
        ),
    }
}

fn size(status: &StatusResponse) -> Check {
    let megabytes = |bytes: i64| format!("{:.1} MB", bytes as f64 / f64::from(1 << 20));
    let StatusResponse { size, quota, .. } = *status;
    let seen = match quota {
        0 => format!("{}, its quota is not told", megabytes(size)),
        quota => format!("{} of {}", megabytes(size), megabytes(quota)),
    };
    match quota > 0 && size / NEARLY_FULL >= quota / 100 {
        true => Check::warn("size", seen, "compact and defragment, or raise --quota-backend-bytes"),
        false => Check::pass("size", seen),
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::Header;
    use super::*;

    #[test]
    fn a_member_that_does_not_serve_is_told_apart() {
        let header = Header { member: 7, ..Header::default() };
        let good = StatusResponse {
            header: Some(header),
            version: "3.5.16".into(),
            leader: 7,
            size: 79 << 20,
            quota: 100 << 20,
            ..StatusResponse::default()
        };
        let verdicts = |status: &StatusResponse| {
            [version(status), role(status), alarms(status), size(status)].map(|check| check.verdict)
        };
        use Verdict::{Fail, Pass, Warn};
        assert_eq!(verdicts(&good), [Pass; 4]);
        for (version, verdict) in [("3.3.27", Fail), ("3.4.30", Warn), ("3.4.31", Pass), ("3.5.12", Warn)] {
            let status = StatusResponse { version: version.into(), ..good.clone() };
            assert_eq!(verdicts(&status), [verdict, Pass, Pass, Pass], "{version}");
        }
        let learner = StatusResponse { is_learner: true, ..good.clone() };
        assert_eq!(verdicts(&learner), [Pass, Fail, Pass, Pass]);
        let alone =
            StatusResponse { leader: 0, errors: vec!["etcdserver: no leader".into()], ..good.clone() };
        assert_eq!(verdicts(&alone), [Pass, Fail, Pass, Pass]);
        let full =
            StatusResponse { size: 90 << 20, errors: vec!["memberID:7 alarm:NOSPACE ".into()], ..good };
        assert_eq!(verdicts(&full), [Pass, Pass, Fail, Warn]);
    }
}
