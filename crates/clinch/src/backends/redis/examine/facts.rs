//! What a server says of itself: version, role, eviction, persistence, replicas, clock.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use super::{Part, answered};
use crate::backends::redis::check::{Server, Syncs, fields};
use crate::backends::redis::dial::Dialer;
use crate::backends::redis::failure::Failure;
use crate::backends::redis::link::Link;
use crate::backends::redis::reply;
use crate::backends::redis::resp::Command;
use crate::backends::redis::settings::Settings;
use crate::check::Check;
use crate::error::Result as Outcome;

/// The oldest version that is supported.
const OLDEST: u32 = 6;

/// How far a server's clock may be from ours before that is worth a word.
const APART: Duration = Duration::from_secs(1);

/// What INFO told.
pub(super) struct About<'a> {
    pub(super) settings: &'a Settings,
    pub(super) info: &'a str,
    pub(super) part: Part,
}

impl About<'_> {
    fn fields(&self) -> HashMap<&str, &str> {
        fields(self.info)
    }

    pub(super) fn checks(&self) -> Vec<Check> {
        let server = Server::read(self.info);
        if let Err(error) = server.refuse_sentinel() {
            return vec![Check::failed("mode", &error, "")];
        }
        let mut checks = vec![self.version(&server), self.role(&server), self.eviction(&server)];
        if self.part != Part::Cluster || self.fields().get("role") == Some(&"master") {
            checks.push(self.replicas());
        }
        if self.part == Part::Cluster && self.fields().get("cluster_enabled") == Some(&"0") {
            checks.push(Check::fail("mode", "it is of no Cluster", self.settings.one_server()));
        }
        if self.part == Part::Master && server.has_slots {
            checks.push(Check::warn(
                "mode",
                "one of a Cluster: by this URL there are the locks of its own slots alone, and all others are refused",
                "say redis+cluster:// in the URL",
            ));
        }
        checks
    }

    fn version(&self, server: &Server) -> Check {
        let fields = self.fields();
        let field = |name: &str| fields.get(name).copied().unwrap_or_default();
        let version = match (field("valkey_version"), field("redis_version")) {
            ("", "") => return Check::warn("version", "INFO names none", "is that a Redis or Valkey?"),
            ("", redis) => format!("Redis {redis}"),
            (valkey, _) => format!("Valkey {valkey}"),
        };
        match server.major {
            0..OLDEST => Check::fail("version", version, format!("use version {OLDEST} or later")),
            _ => Check::pass("version", version),
        }
    }

    fn role(&self, server: &Server) -> Check {
        let role = match server.role.as_str() {
            "slave" => "replica",
            role => role,
        };
        match server.refuse_replica().and_then(|()| server.refuse_active()) {
            Err(error) if self.part != Part::Cluster => Check::failed("role", &error, ""),
            _ => Check::pass("role", role.to_owned()),
        }
    }

    fn eviction(&self, server: &Server) -> Check {
        let limit = match server.maxmemory {
            0 => "no maxmemory".to_owned(),
            bytes => format!("maxmemory {} MB", bytes.div_ceil(1 << 20)),
        };
        match server.refuse_evicting(self.settings.eviction_allowed) {
            Err(error) => Check::failed("eviction", &error, ""),
            Ok(()) if server.evicts() => Check::warn(
                "eviction",
                format!("{}, {limit}: locks may be dropped, as eviction=allow says", server.policy),
                "set maxmemory-policy noeviction",
            ),
            Ok(()) => Check::pass("eviction", format!("{}, {limit}", server.policy)),
        }
    }

    fn replicas(&self) -> Check {
        let count: u32 =
            self.fields().get("connected_slaves").and_then(|count| count.parse().ok()).unwrap_or(0);
        let wanted = self.settings.durability.replicas;
        let seen = match count {
            0 => "none".to_owned(),
            count => format!("{count}; a failover may lose the locks that were granted last"),
        };
        match self.part {
            Part::Voter { .. } if count > 0 => Check::warn(
                "replicas",
                format!("{count}, though each server is to be independent of others"),
                "do without replicas: another server that votes is worth more",
            ),
            _ if count < wanted => Check::fail(
                "replicas",
                format!("{count}, but wait_replicas={wanted}: no lock is granted"),
                "start replicas, or lower wait_replicas= in the URL",
            ),
            _ if wanted > 0 => {
                Check::pass("replicas", format!("{count}, of which {wanted} confirm each lock"))
            }
            _ => Check::pass("replicas", seen),
        }
    }
}

/// What of the locks outlives a restart of the server.
pub(super) async fn persistence(link: &Link, about: &About<'_>) -> Result<Check, Failure> {
    let server = Server::read(about.info);
    if let Part::Voter { durable } = about.part {
        let refused: Outcome<()> = if durable { server.refuse_forgetful(link).await } else { Ok(()) };
        return Ok(match refused {
            Err(error) => Check::failed("persistence", &error, ""),
            Ok(()) if durable => {
                Check::pass("persistence", "what was acknowledged is kept, as durable=on says")
            }
            Ok(()) => Check::pass("persistence", "not needed: after a restart it does not vote for max_ttl="),
        });
    }
    if !server.logs_writes {
        return Ok(Check::warn(
            "persistence",
            "no append-only file: locks that are held are forgotten in a restart, and then two may hold one",
            "set appendonly yes",
        ));
    }
    let syncs = Syncs::of(link).await?;
    let seen = match syncs.policy.as_deref() {
        Some("always") if syncs.pauses => {
            "append-only file, appendfsync always, but not while it is rewritten (no-appendfsync-on-rewrite): a crash of \
             its host then loses what was written since"
                .to_owned()
        }
        Some("always") => "append-only file, appendfsync always".to_owned(),
        Some(policy) => {
            format!("append-only file, appendfsync {policy}: a crash of its host loses the last second")
        }
        None => "append-only file".to_owned(),
    };
    Ok(Check::pass("persistence", seen))
}

/// How far the server's clock is from ours; nothing where that may not be asked.
pub(super) async fn clock(dialer: &Dialer, link: &Link) -> Result<Option<Check>, Failure> {
    let (sent, ours) = (dialer.env.now(), dialer.env.clock().wall());
    let Ok(time) = answered(link.call(&Command::new("TIME")).await)? else { return Ok(None) };
    let Some(theirs) = reply::micros(&time) else { return Ok(None) };
    // Read half way, as far as can be told.
    let ours = ours + dialer.env.now().since(sent) / 2;
    let ours = ours.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let theirs = Duration::from_micros(theirs);
    let by = theirs.abs_diff(ours);
    let way = if theirs > ours { "ahead of" } else { "behind" };
    Ok(Some(match by > APART {
        true => Check::warn(
            "clock",
            format!("{} {way} ours", humantime::format_duration(Duration::from_secs(by.as_secs()))),
            "set both by NTP: times that `clinch ls` shows are off, and a failover to another clock moves ends of leases",
        ),
        false => Check::pass("clock", format!("{:.1} ms {way} ours", by.as_secs_f64() * 1000.0)),
    }))
}
