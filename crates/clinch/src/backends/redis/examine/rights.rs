//! What our user may not do, tried out: a server looks at the rights to a command before it looks at anything else, so each is sent such
//! that it does nothing, or what it does ends by itself.

use super::{Part, answered};
use crate::backends::redis::dial::Dialer;
use crate::backends::redis::failure::Failure;
use crate::backends::redis::keys::{FENCE, Home, INBOXES, VOUCHER, slot_of};
use crate::backends::redis::link::Link;
use crate::backends::redis::resp::Command;
use crate::backends::redis::settings::Settings;
use crate::check::Check;

/// A right to a command, how to try it, and what is lost without it; nothing: everything is.
struct Right(&'static str, &'static [&'static str], &'static str);

/// A lock by whose keys the rights are tried; nothing of it changes.
const PROBE: &str = "probe";

/// What stands for a key of nobody's, and for a channel, in what is tried.
const KEY: &str = "{key}";
const CHANNEL: &str = "{channel}";

/// For how long that key is there, at most: a moment.
const MOMENT_MS: &str = "5000";

const REMEDY: &str = "give this user these rights by ACL SETUSER";

const UNTOLD: &str = "waiters ask ten times a second instead of being told";
const UNSEEN: &str = "waiters ask ten times a second for locks whose holders tell nobody, and that a held lock was taken away is told by \
                      its next renewal only";
const UNWATCHED: &str = "that a held lock was taken away is told by its next renewal only";
const UNLISTED: &str = "`clinch ls` cannot list";
const UNNOTICED: &str = "a connection that died is noticed late";
const UNKNOWN: &str = "version, role, eviction policy and persistence are not known";
const UNENDED: &str = "a release after a broken connection takes up to 7 s more";
const UNSCRIPTED: &str = "without scripts there is the lean mode alone: no queue, no tokens, no readers";
const UNSURE: &str = "a master that was replaced is noticed by its first refusal only";

/// What all stores need. The first makes the key, of a type that all other kinds of commands refuse; the second ends it.
const ALL: [Right; 14] = [
    Right("getset", &["GETSET", KEY, ""], ""),
    Right("pexpire", &["PEXPIRE", KEY, MOMENT_MS], ""),
    Right("time", &["TIME"], ""),
    Right("set", &["SET", KEY, "", "XX", "PX", MOMENT_MS], ""),
    Right("getrange", &["GETRANGE", KEY, "0", "1"], ""),
    Right("setrange", &["SETRANGE", KEY, "0", ""], ""),
    Right("pttl", &["PTTL", KEY], ""),
    Right("evalsha", &["EVALSHA", "0000000000000000000000000000000000000000", "0"], ""),
    Right("script|load", &["SCRIPT", "LOAD", "return 0"], ""),
    Right("scan", &["SCAN", "0", "COUNT", "1"], UNLISTED),
    Right("info", &["INFO", "server"], UNKNOWN),
    Right("ping", &["PING"], UNNOTICED),
    Right("client|tracking", &["CLIENT", "TRACKING", "OFF"], UNSEEN),
    Right("client|caching", &["CLIENT", "CACHING", "YES"], UNSEEN),
];

/// What one that has queues needs besides.
const QUEUES: [Right; 24] = [
    Right("mget", &["MGET", KEY], UNWATCHED),
    Right("exists", &["EXISTS", KEY], ""),
    Right("hget", &["HGET", KEY, "f"], ""),
    Right("hmget", &["HMGET", KEY, "f"], ""),
    Right("hgetall", &["HGETALL", KEY], ""),
    Right("hlen", &["HLEN", KEY], ""),
    Right("hscan", &["HSCAN", KEY, "0"], ""),
    Right("hdel", &["HDEL", KEY, "f"], ""),
    Right("hset", &["HSET", KEY, "f", ""], ""),
    Right("hsetnx", &["HSETNX", KEY, "f", ""], ""),
    Right("rpush", &["RPUSH", KEY, "m"], ""),
    Right("lpush", &["LPUSH", KEY, "m"], ""),
    Right("lrange", &["LRANGE", KEY, "0", "0"], ""),
    Right("llen", &["LLEN", KEY], ""),
    Right("lindex", &["LINDEX", KEY, "0"], ""),
    Right("lrem", &["LREM", KEY, "1", "m"], ""),
    Right("lpop", &["LPOP", KEY], ""),
    Right("zadd", &["ZADD", KEY, "1", "m"], ""),
    Right("zcard", &["ZCARD", KEY], ""),
    Right("zscore", &["ZSCORE", KEY, "m"], ""),
    Right("zrange", &["ZRANGE", KEY, "0", "0"], ""),
    Right("zrevrange", &["ZREVRANGE", KEY, "0", "0"], ""),
    Right("zrangebyscore", &["ZRANGEBYSCORE", KEY, "1", "1"], ""),
    Right("zrem", &["ZREM", KEY, "m"], ""),
];

/// By what waiters are told. In protocol 2 a connection that listens can do nothing else.
const TELLS: [Right; 2] = [
    Right("publish", &["PUBLISH", CHANNEL, ""], UNTOLD),
    Right("subscribe", &["SUBSCRIBE", CHANNEL], UNTOLD),
];

/// The same where channels belong to slots.
const SHARDED_TELLS: [Right; 2] = [
    Right("spublish", &["SPUBLISH", CHANNEL, ""], UNTOLD),
    Right("ssubscribe", &["SSUBSCRIBE", CHANNEL], UNTOLD),
];

/// What a voter needs besides.
const VOTES: [Right; 3] = [
    Right("get", &["GET", KEY], ""),
    Right("client|id", &["CLIENT", "ID"], UNENDED),
    Right("client|kill", &["CLIENT", "KILL", "ID", "0"], UNENDED),
];

/// What is needed of these where a server does without scripts.
const LEAN: [&str; 5] = ["+set", "+getrange", "+pttl", "+scan", "+info"];

const DEL: Right = Right("del", &["DEL", KEY], "");
const CLUSTER_SLOTS: Right = Right("cluster|slots", &["CLUSTER", "SLOTS"], "");
const ASKING: Right = Right("asking", &["ASKING"], "");
const ROLE: Right = Right("role", &["ROLE"], UNSURE);
const WAIT: Right = Right("wait", &["WAIT", "0", "1"], "");
const WAIT_AOF: Right = Right("waitaof", &["WAITAOF", "0", "0", "1"], "");

/// What a URL needs the right to.
fn needed(settings: &Settings, part: Part, is_followed: bool, major: u32) -> Vec<&'static Right> {
    let some = |is_needed: bool, right: &'static [Right]| if is_needed { right } else { &[] };
    let votes = matches!(part, Part::Voter { .. });
    let is_cluster = part == Part::Cluster;
    let mut rights: Vec<&Right> = ALL.iter().collect();
    rights.extend(some(votes, &VOTES));
    rights.extend(some(!votes, &QUEUES));
    rights.push(&DEL);
    rights.extend(some(is_cluster, &[CLUSTER_SLOTS, ASKING]));
    rights.extend(some(is_followed, &[ROLE]));
    rights.extend(some(settings.durability.replicas > 0, &[WAIT]));
    rights.extend(some(settings.durability.aof.is_some(), &[WAIT_AOF]));
    // As the store tells; see `Store::shard_channels`.
    let tells = if is_cluster && major >= 7 { &SHARDED_TELLS } else { &TELLS };
    rights.extend(some(!votes, tells));
    rights
}

/// The keys that are written to, each with the pattern that gives the right to it.
fn key_patterns(prefix: &str, part: Part) -> Vec<(String, String)> {
    let lock = [prefix, PROBE].concat();
    let mut keys = vec![(lock.clone(), format!("~{prefix}*"))];
    if matches!(part, Part::Voter { .. }) {
        let all = || "~clinch:~*".to_owned();
        keys.extend([(FENCE.to_owned(), all()), (format!("{VOUCHER}:probe"), all())]);
        return keys;
    }
    let home = Home::of(slot_of(&lock));
    keys.push((home.key(":claims:", &lock).concat(), format!("~clinch:~{{???}}:*:{prefix}*")));
    keys.push((home.key(":fence", "").concat(), "~clinch:~{???}:fence".to_owned()));
    keys
}

/// A right that is not there, and what is lost without it.
#[derive(Debug, PartialEq, Eq)]
struct Lacking {
    right: String,
    without: &'static str,
}

/// What our user may not do on a server.
pub(super) async fn rights(
    dialer: &Dialer,
    link: &Link,
    part: Part,
    is_followed: bool,
    major: u32,
) -> Result<Vec<Check>, Failure> {
    let prefix = &dialer.settings.prefix;
    let lock = [prefix, PROBE].concat();
    let key = match part {
        Part::Voter { .. } => format!("{VOUCHER}:probe"),
        _ => Home::of(slot_of(&lock)).key(":probe:", &lock).concat(),
    };
    let channel = [INBOXES, "probe"].concat();
    // Where there are no scripts, that does for locks without a queue.
    let compares = command(&["SET", KEY, "", "IFEQ", "-", "PX", "1"], &key, &channel);
    let compares = answered(link.call(&compares).await)?.is_ok();
    let mut lacking: Vec<Lacking> = Vec::new();
    let mut lack = |right: String, without| {
        if !lacking.iter().any(|known| known.right == right) {
            lacking.push(Lacking { right, without });
        }
    };
    for (key, pattern) in key_patterns(prefix, part) {
        let write = command(&["SETRANGE", KEY, "0", ""], &key, &channel);
        if let Denied::Key = denied(link, &write).await? {
            lack(pattern, "");
        }
    }
    for Right(name, words, without) in needed(&dialer.settings, part, is_followed, major) {
        match denied(link, &command(words, &key, &channel)).await? {
            Denied::Command => lack(format!("+{name}"), without),
            Denied::Channel => lack("&clinch:~{*".to_owned(), without),
            // Told by its pattern.
            Denied::Key | Denied::Nothing => {}
        }
    }
    let is_scripting = |lacking: &Lacking| ["+evalsha", "+script|load"].contains(&&*lacking.right);
    if compares && lacking.iter().any(is_scripting) {
        lacking.retain(|lacking| is_scripting(lacking) || LEAN.contains(&&*lacking.right));
        lacking
            .iter_mut()
            .filter(|lacking| is_scripting(lacking))
            .for_each(|lacking| lacking.without = UNSCRIPTED);
    }
    Ok(told(&lacking))
}

fn command(words: &[&str], key: &str, channel: &str) -> Command {
    let [name, words @ ..] = words else { return Command::new("PING") };
    let mut command = Command::new(name);
    for word in words {
        command.arg(match *word {
            KEY => key,
            CHANNEL => channel,
            word => word,
        });
    }
    command
}

/// What a server has denied.
enum Denied {
    Nothing,
    Command,
    Key,
    Channel,
}

async fn denied(link: &Link, command: &Command) -> Result<Denied, Failure> {
    let Err(failure) = answered(link.call(command).await)? else { return Ok(Denied::Nothing) };
    let says = |word| failure.detail().contains(word);
    Ok(match failure.code() {
        "NOPERM" if says("channel") && says("access") => Denied::Channel,
        "NOPERM" if says("key") && says("access") => Denied::Key,
        "NOPERM" => Denied::Command,
        _ => Denied::Nothing,
    })
}

/// One line for what nothing works without, and one for each other loss.
fn told(lacking: &[Lacking]) -> Vec<Check> {
    let mut losses: Vec<&str> = lacking.iter().map(|lacking| lacking.without).collect();
    losses.sort_unstable();
    losses.dedup();
    let line = |loss: &str| {
        let rights: Vec<&str> =
            lacking.iter().filter(|lacking| lacking.without == loss).map(|lacking| &*lacking.right).collect();
        let seen = format!("this user lacks {}", rights.join(" "));
        match loss {
            "" => Check::fail("rights", seen, REMEDY),
            loss => Check::warn("rights", format!("{seen}: {loss}"), REMEDY),
        }
    };
    match losses.is_empty() {
        true => vec![Check::pass("rights", "this user may do all that is needed")],
        false => losses.into_iter().map(line).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The commands of the ACL line in a module's documentation.
    fn documented(docs: &str) -> BTreeSet<String> {
        let (_, line) = docs.split_once("//! user clinch on >PASSWORD").expect("it has an ACL line");
        let (line, _) = line.split_once("//! ```").unwrap();
        line.split_whitespace().filter_map(|word| word.strip_prefix('+')).map(str::to_owned).collect()
    }

    /// A right that is not tried is one whose absence nobody is told.
    #[test]
    fn each_right_of_the_documentation_is_tried() {
        let settings = |url| Settings::parse(&mut crate::url::StoreUrl::parse(url).unwrap()).unwrap();
        let tried = |part| {
            let rights = needed(&settings("redis://h"), part, false, 7);
            rights.into_iter().map(|Right(name, ..)| (*name).to_owned()).collect::<BTreeSet<_>>()
        };
        assert_eq!(tried(Part::Master), documented(include_str!("../../redis.rs")));
        let voter = Part::Voter { durable: false };
        assert_eq!(tried(voter), documented(include_str!("../redlock.rs")));
        let more = needed(&settings("redis://h?wait_replicas=1&wait_aof=1"), Part::Cluster, true, 7);
        let named = |name| more.iter().any(|Right(known, ..)| *known == name);
        assert!(
            ["cluster|slots", "asking", "role", "wait", "waitaof", "spublish", "ssubscribe"]
                .into_iter()
                .all(named)
        );
    }
}
