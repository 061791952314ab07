//! The users of this host: who this process is, what others are called, and where one is at home.

use std::path::PathBuf;

use nix::unistd::{Gid, Group, Uid, User};

/// Who this process acts as.
#[derive(Clone, Debug)]
pub(super) struct Me {
    pub(super) id: u32,
    pub(super) groups: Vec<u32>,
    /// The number that all strangers show who have none in this user namespace, unless somebody has it.
    pub(super) stranger: Option<u32>,
}

impl Me {
    pub(super) fn now() -> Me {
        let id = rustix::process::geteuid().as_raw();
        let others = rustix::process::getgroups().unwrap_or_default();
        let groups = others.into_iter().chain([rustix::process::getegid()]);
        let map = text("/proc/self/uid_map");
        Me { id, groups: groups.map(|group| group.as_raw()).collect(), stranger: stranger(&map, overflow()) }
    }

    pub(super) fn is_root(&self) -> bool {
        self.id == 0
    }

    /// Whether files of this user cannot harm us.
    pub(super) fn trusts(&self, owner: u32) -> bool {
        owner == 0 || owner == self.id && Some(owner) != self.stranger
    }

    /// Whether what a group may do is allowed to us.
    pub(super) fn is_in(&self, group: u32) -> bool {
        self.is_root() || self.groups.contains(&group)
    }
}

/// What the kernel shows for a user without a number in this user namespace.
pub(super) fn overflow() -> u32 {
    text("/proc/sys/fs/overflowuid").trim().parse().unwrap_or(65_534)
}

/// It, where the namespace has nobody of that number. `map`: the ranges of numbers that it has.
fn stranger(map: &str, overflow: u32) -> Option<u32> {
    let is_in = |range: &str| {
        let mut numbers = range.split_whitespace().map(|number| number.parse::<u32>().ok());
        let (first, count) = (numbers.next()??, numbers.nth(1)??);
        Some(overflow >= first && overflow - first < count)
    };
    (!map.lines().filter_map(is_in).any(|is_in| is_in)).then_some(overflow)
}

/// Where a user is at home, as the database of users says.
pub(super) fn home(user: u32) -> Option<PathBuf> {
    User::from_uid(Uid::from_raw(user)).ok().flatten().map(|user| user.dir)
}

/// Whether a group is the one that a system gives a user for itself: of its name, and with nobody else in it. Not that of root, in which processes of
/// no known user run in many containers.
pub(super) fn is_alone_in(user: u32, group: u32) -> bool {
    if group == 0 {
        return false;
    }
    let user = User::from_uid(Uid::from_raw(user)).ok().flatten();
    let group = Group::from_gid(Gid::from_raw(group)).ok().flatten();
    user.zip(group).is_some_and(|(user, group)| {
        user.gid == group.gid
            && user.name == group.name
            && group.mem.iter().all(|member| *member == user.name)
            && is_alone_by(&text("/etc/passwd"), &text("/etc/group"), &user.name, group.gid.as_raw())
    })
}

/// What the database does not tell, which has one entry for each number: the group may have several lines, and be that of users whom none of
/// them names.
fn is_alone_by(users: &str, groups: &str, user: &str, group: u32) -> bool {
    let is_of = |line: &&str, at: usize| {
        line.split(':').nth(at).and_then(|number| number.parse().ok()) == Some(group)
    };
    let of_them = users.lines().filter(|line| is_of(line, 3)).filter_map(|line| line.split(':').next());
    let named = groups.lines().filter(|line| is_of(line, 2)).filter_map(|line| line.split(':').nth(3));
    let members = named.flat_map(|members| members.split(',')).map(str::trim);
    of_them.chain(members).all(|member| member.is_empty() || member == user)
}

fn text(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// A user, for people.
pub(super) fn user(id: u32) -> String {
    match User::from_uid(Uid::from_raw(id)) {
        Ok(Some(user)) => format!("user {}", user.name),
        _ => format!("user {id}"),
    }
}

/// A group, for people.
pub(super) fn group(id: u32) -> String {
    match Group::from_gid(Gid::from_raw(id)) {
        Ok(Some(group)) => format!("group {}", group.name),
        _ => format!("group {id}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_nobody_has_is_a_strangers() {
        assert_eq!(stranger("         0          0 4294967295\n", 65_534), None, "no namespace");
        assert_eq!(stranger("0 100000 65536\n", 65_534), None, "a container with a user nobody");
        for map in ["", "1000 1000 1\n", "0 1000 1\n1 100000 65533\n65535 1 1\n"] {
            assert_eq!(stranger(map, 65_534), Some(65_534), "{map:?}");
        }
        let me = Me { id: 65_534, groups: vec![], stranger: Some(65_534) };
        assert!(me.trusts(0) && !me.trusts(65_534));
    }

    #[test]
    fn a_group_is_alone_by_all_lines_of_its_number() {
        let (users, groups) = ("root:x:0:0::/:\nann:x:7:7::/:\n", "root:x:0:\nann:x:7:ann\n");
        assert!(is_alone_by(users, groups, "ann", 7));
        let second = format!("{groups}friends:x:7:ann,bob\n");
        assert!(!is_alone_by(users, &second, "ann", 7), "the database tells of the first line only");
        let of_it = format!("{users}bob:x:8:7::/:\n");
        assert!(!is_alone_by(&of_it, groups, "ann", 7), "it is bob's group too");
    }
}
