//! The scripts, and how one becomes a command.

use std::sync::LazyLock;
use std::time::Duration;

use super::dating::millis;
use super::resp::{Arg, Command};
use super::settings::RUN;
use super::wire::HELD_BACK;
use crate::backend::TAKE_WITHIN;
use crate::net::UNDELIVERED;

/// How much longer than their last claim the side keys of a lock live, and for how long a grave stands.
const SPARE: Duration = Duration::from_secs(60);

/// A request that was given up arrives while its claim's grave still stands: it lies here and in the kernel for less than half
/// of that time.
const _: () = assert!(2 * (HELD_BACK.as_millis() + UNDELIVERED.as_millis()) < SPARE.as_millis());

/// For how long it counts that a client was seen that may poll.
const FOREIGN: Duration = Duration::from_secs(600);

/// For how long a voucher stands after its last use. Whoever uses it writes it anew, at the latest when it is older than the longest
/// TTL, which is a day at most.
const VOUCHED: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// A Lua script and the beginning of the command that runs it, by the name under which the server keeps it.
pub(super) struct Script {
    text: String,
    run: Command,
}

macro_rules! scripts {
    ($($(#[$doc:meta])* $name:ident = $($part:literal)+;)*) => {
        $($(#[$doc])* pub(super) static $name: LazyLock<Script> =
            LazyLock::new(|| Script::new(concat!($(include_str!(concat!("lua/", $part, ".lua"))),+)));)*
    };
}

scripts! {
    /// Claim a lock.
    ACQUIRE = "token" "acquire_fast" "tell" "queue" "acquire";
    /// Turn an exclusive hold into a shared one.
    DOWNGRADE = "token" "tell" "queue" "downgrade";
    /// Take a claim away.
    EVICT = "token" "tell" "queue" "evict";
    /// Find out which commands are forbidden.
    PROBE = "probe";
    /// Read which exclusive locks are held.
    READ_HELD = "held" "read_held";
    /// Claim one server's vote for a lock.
    REDLOCK_CLAIM = "redlock_claim";
    /// Write back the token that the servers agree on.
    REDLOCK_AGREE = "redlock_agree";
    /// Take a vote from its claim, but keep it closed.
    REDLOCK_EVICT = "redlock_evict";
    /// Leave what is known of a server with it.
    REDLOCK_VOUCH = "redlock_vouch";
    /// Release a lock or leave its queue.
    RELEASE = "release_fast" "token" "tell" "hand_over" "queue" "release";
    /// Release a lock that has no queue.
    RELEASE_LEAN = "release_lean";
    /// Renew claims of one lock.
    RENEW = "token" "tell" "queue" "renew";
    /// Renew exclusive locks.
    RENEW_HELD = "held" "renew_held";
    /// Go on with a queue that was too long for a release.
    SETTLE = "token" "tell" "queue" "settle";
    /// Read one lock.
    STATE = "token" "tell" "queue" "state";
}

impl Script {
    fn new(text: &str) -> Script {
        let in_millis = |time| millis(time).to_string();
        let times = [
            ("WINDOW_MS", TAKE_WITHIN),
            ("SPARE_MS", SPARE),
            ("FOREIGN_MS", FOREIGN),
            ("RUN_MS", RUN),
            ("VOUCHED_MS", VOUCHED),
        ];
        let text = times
            .into_iter()
            .fold(text.to_owned(), |text, (name, time)| text.replace(name, &in_millis(time)));
        let mut run = Command::new("EVALSHA");
        run.arg(sha1_smol::Sha1::from(&text).digest().to_string());
        Script { text, run }
    }

    /// The command that runs it on these keys; arguments follow.
    pub(super) fn on(&self, keys: impl IntoIterator<Item: Arg, IntoIter: ExactSizeIterator>) -> Command {
        let keys = keys.into_iter();
        let mut command = self.run.and_keys(keys.len() as u64, keys.len());
        for key in keys {
            command.arg(key);
        }
        command
    }

    /// The command that has the server keep it.
    pub(super) fn load(&self) -> Command {
        let mut command = Command::new("SCRIPT");
        command.arg("LOAD").arg(&self.text);
        command
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    /// The commands that stand after these words in a script.
    fn named<'a>(text: &'a str, before: &str) -> BTreeSet<&'a str> {
        text.split(before).skip(1).filter_map(|rest| rest.split('\'').next()).collect()
    }

    /// The commands of the ACL line in a manual.
    fn allowed(manual: &str) -> BTreeSet<String> {
        let (_, line) = manual.split_once("//! user clinch on ").unwrap();
        let (line, _) = line.split_once("//! ```").unwrap();
        line.split_whitespace().filter_map(|word| word.strip_prefix('+')).map(str::to_uppercase).collect()
    }

    #[test]
    fn a_voucher_stands_for_as_long_as_the_manual_says() {
        let days = format!("{} days", VOUCHED.as_secs() / (24 * 60 * 60));
        assert_eq!(include_str!("redlock.rs").matches(&days).count(), 2, "redlock.rs does not say {days}");
        assert!(REDLOCK_VOUCH.text.contains(&format!("'PX', {})", millis(VOUCHED))));
    }

    /// A script that is refused in its middle has done half of its work.
    #[test]
    fn every_command_of_a_script_is_asked_for_at_the_start_and_named_in_the_manual() {
        let probed = named(PROBE.text.as_str(), "try('");
        let (queued, voted) = (allowed(include_str!("../redis.rs")), allowed(include_str!("redlock.rs")));
        let mut called = BTreeSet::new();
        for file in Path::new(env!("CARGO_MANIFEST_DIR")).join("src/backends/redis/lua").read_dir().unwrap() {
            let path = file.unwrap().path();
            let (text, name) = (std::fs::read_to_string(&path).unwrap(), path.file_stem().unwrap());
            let name = name.to_str().unwrap();
            let commands = named(&text, "call('");
            if name.starts_with("redlock_") || ["release_lean", "held", "renew_held"].contains(&name) {
                let missing: Vec<_> = commands.iter().filter(|command| !voted.contains(**command)).collect();
                assert!(missing.is_empty(), "{name}.lua calls what redlock.rs does not name: {missing:?}");
            }
            if !name.starts_with("redlock_") {
                called.extend(commands.into_iter().map(str::to_owned));
            }
        }
        assert_eq!(called, probed.into_iter().map(str::to_owned).collect(), "called, and asked for");
        let missing: Vec<_> = called.difference(&queued).collect();
        assert!(missing.is_empty(), "redis.rs does not name {missing:?}");
    }
}
