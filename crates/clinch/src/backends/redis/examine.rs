//! What the promises of the servers of a URL rest on, looked at step by step, so that it is known which step fails. On connections of
//! its own, which refuse no server: what is wrong with one is what is to be told.

mod facts;
mod rights;

use std::sync::Arc;

use futures_util::future::join_all;

use super::check::Server;
use super::dial::Dialer;
use super::failure::Failure;
use super::link::Link;
use super::resp::Command;
use super::route::Route;
use super::settings::{Address, Settings, Topology};
use crate::backends::approach::unreached;
use crate::check::{Check, Verdict};
use crate::error::{Error, ErrorKind};

/// What a server is taken for that may not be asked for its version.
const RECENT: u32 = 7;

/// What a server is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// It keeps all locks.
    Master,
    /// It is one of a Cluster, and may be a replica.
    Cluster,
    /// It has one vote of several, and keeps what it acknowledged if it is `durable`.
    Voter { durable: bool },
}

/// Looks at all servers of a URL.
pub(super) async fn examine(dialer: &Arc<Dialer>, route: &Route) -> Vec<Check> {
    let settings = &dialer.settings;
    let mut checks = vec![Check::pass("url", meaning(settings))];
    let part = if route.is_cluster() { Part::Cluster } else { Part::Master };
    if let Topology::Sentinel(sentinel) = &settings.topology {
        checks.extend(sentinel.examine(dialer).await);
    }
    match route.addresses().await {
        Ok(addresses) => {
            let servers = addresses.iter().map(async |(address, is_needed)| {
                let checks = server(dialer, address, part).await.into_iter();
                checks.map(|check| if *is_needed { check } else { check.spared() }).collect::<Vec<_>>()
            });
            checks.extend(join_all(servers).await.into_iter().flatten());
        }
        Err(error) => checks.push(Check::failed("master", &error, "look at the sentinels")),
    }
    checks
}

/// What a URL means, but for its secrets.
fn meaning(settings: &Settings) -> String {
    let list = |addresses: &[Address]| {
        let texts: Vec<String> = addresses.iter().map(Address::to_string).collect();
        texts.join(", ")
    };
    let servers = match &settings.topology {
        Topology::Single(address) => format!("one server, {address}"),
        Topology::Sentinel(sentinel) => {
            format!("the master \"{}\" of the sentinels {}", sentinel.master, list(&sentinel.sentinels))
        }
        Topology::Cluster(seeds) => format!("the Cluster of {}", list(seeds)),
    };
    format!("{servers}; {}", keys(settings))
}

/// Where the locks of a URL are on a server, and how it is spoken to.
pub(super) fn keys(settings: &Settings) -> String {
    let login = match settings.credentials.are_given() {
        true => "with a login",
        false => "without a login",
    };
    let tls = if settings.tls.is_some() { "with TLS" } else { "not encrypted" };
    format!("database {}, keys \"{}NAME\", {login}, {tls}", settings.db, settings.prefix)
}

/// Looks at one server.
pub(super) async fn server(dialer: &Dialer, address: &Address, part: Part) -> Vec<Check> {
    let mut checks = Vec::new();
    if let Some(link) = reach(dialer, address, &mut checks).await
        && let Err(cut) = look(dialer, &link, part, &mut checks).await
    {
        let error = cut.into_error(link.server());
        checks.push(Check::failed("server", &error, "look whether it, or what stands before it, hangs up"));
    }
    checks.into_iter().map(|check| check.at(address)).collect()
}

/// A connection to a server, logged in; says which step failed.
async fn reach(dialer: &Dialer, address: &Address, checks: &mut Vec<Check>) -> Option<Link> {
    let begun = dialer.env.now();
    let failed = match dialer.limited(address, dialer.reach(address)).await {
        Err(error) => match address {
            Address::Tcp(..) => unreached(&error),
            Address::Unix(_) => Check { what: "socket", ..unreached(&error) },
        },
        Ok(stream) => match dialer.limited(address, dialer.encrypted(stream, address)).await {
            Err(error) => Check::failed(
                "tls",
                &error,
                "does the server speak TLS there? its port for that is often another",
            ),
            Ok(stream) => match dialer.limited(address, dialer.login_over(stream, address, None)).await {
                Err(error) => not_let_in(&error),
                Ok((link, _)) => {
                    let time = dialer.env.now().since(begun);
                    checks.push(Check::pass("reach", format!("connected and logged in within {time:.1?}")));
                    return Some(link);
                }
            },
        },
    };
    checks.push(failed);
    None
}

fn not_let_in(error: &Error) -> Check {
    match error.kind() {
        ErrorKind::Refused => Check::failed("auth", error, "look at user and password in the URL"),
        _ => Check::failed(
            "server",
            error,
            "is that a Redis or Valkey? one that speaks TLS alone is rediss://; else mend host or port in the URL",
        ),
    }
}

/// An error is a connection that broke.
async fn look(dialer: &Dialer, link: &Link, part: Part, checks: &mut Vec<Check>) -> Result<(), Failure> {
    let mut major = RECENT;
    match answered(link.call(&Command::new("INFO")).await)? {
        Ok(info) => {
            let about =
                facts::About { settings: &dialer.settings, info: info.text().unwrap_or_default(), part };
            major = Server::read(about.info).major;
            checks.extend(about.checks());
            checks.push(facts::persistence(link, &about).await?);
        }
        // Told with the rights.
        Err(failure) if failure.code() == "NOPERM" => {}
        Err(failure) => {
            let error = failure.into_error(link.server());
            checks.push(Check::failed("server", &error, "look at what the server logs"));
        }
    }
    checks.extend(facts::clock(dialer, link).await?);
    let is_followed = matches!(dialer.settings.topology, Topology::Sentinel(_));
    checks.extend(rights::rights(dialer, link, part, is_followed, major).await?);
    Ok(())
}

/// An answer, which may be a refusal; an error is a connection that broke.
fn answered<T>(answer: Result<T, Failure>) -> Result<Result<T, Failure>, Failure> {
    match answer {
        Err(cut @ Failure::Cut { .. }) => Err(cut),
        answer => Ok(answer),
    }
}

/// Whether a server could not be used at all.
pub(super) fn has_failed(checks: &[Check]) -> bool {
    checks.iter().any(|check| check.verdict == Verdict::Fail)
}
