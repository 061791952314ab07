//! Clients that mean the same by a server's vote, and what they leave on the servers.

use super::settings::Rules;
use crate::backends::redis::keys::VOUCHER;
use crate::backends::redis::settings::Address;
use crate::drift::Drift;

/// Clients of which each believes what another has left. What one of another group has seen tells them nothing: of an
/// address it may know another server, and what it allows clocks and servers may be more.
#[derive(Debug)]
pub(super) struct Group {
    /// Where they leave word on each server.
    pub(super) key: String,
    /// What they have in common, and what they leave begins with.
    terms: String,
}

impl Group {
    pub(super) fn of<'a>(addresses: impl Iterator<Item = &'a Address>, rules: &Rules, drift: Drift) -> Group {
        let mut servers: Vec<String> = addresses.map(Address::to_string).collect();
        servers.sort_unstable();
        let switch = |on| if on { "on" } else { "off" };
        let terms = format!(
            "{}?prefix={}&max_ttl={}us&drift={}&durable={}&fencing={} ",
            servers.join(","),
            rules.prefix,
            rules.max_ttl.as_micros(),
            drift.percentage(),
            switch(rules.durable),
            switch(rules.fencing),
        );
        Group { key: format!("{VOUCHER}:{:016x}", hash(&terms)), terms }
    }

    /// What they have in common, and the space after it.
    pub(super) fn terms(&self) -> &str {
        &self.terms
    }
}

/// FNV-1a. The terms stand in the value too, so that what another group has left is never taken for one's own.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_means_something_else_is_of_another_group() {
        let address = |host: &str| Address::Tcp(host.to_owned(), 1);
        let (abc, rules) = (
            [address("a"), address("b"), address("c")],
            Rules {
                prefix: "clinch:".to_owned(),
                max_ttl: Duration::from_secs(30),
                min_validity: Duration::ZERO,
                fencing: true,
                durable: false,
            },
        );
        let key = |addresses: &[Address], rules: &Rules, drift| {
            Group::of(addresses.iter(), rules, Drift::percent(drift).unwrap()).key
        };
        let usual = key(&abc, &rules, 10);
        assert!(usual.starts_with("clinch:~{voucher}:") && usual.len() == VOUCHER.len() + 17, "{usual}");
        let [a, b, c] = abc.clone();
        assert_eq!(key(&[c, a.clone(), b.clone()], &rules, 10), usual, "the order tells nothing");
        let rules_with = |change: fn(&mut Rules)| {
            let mut rules = rules.clone();
            change(&mut rules);
            key(&abc, &rules, 10)
        };
        for other in [
            key(&[a, b, address("d")], &rules, 10),
            key(&abc, &rules, 25),
            rules_with(|rules| rules.prefix = String::new()),
            rules_with(|rules| rules.max_ttl = Duration::from_secs(31)),
            rules_with(|rules| rules.fencing = false),
            rules_with(|rules| rules.durable = true),
        ] {
            assert_ne!(other, usual);
        }
    }
}
