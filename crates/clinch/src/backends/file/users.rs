//! The users of this host: who this process is, what others are called, and where one is at home.

use std::path::PathBuf;

use nix::unistd::{Gid, Group, Uid, User};

/// Who this process acts as.
#[derive(Clone, Debug)]
pub(super) struct Me {
    pub(super) id: u32,
    pub(super) groups: Vec<u32>,
}

impl Me {
    pub(super) fn now() -> Me {
        let id = rustix::process::geteuid().as_raw();
        let others = rustix::process::getgroups().unwrap_or_default();
        let groups = others.into_iter().chain([rustix::process::getegid()]);
        Me { id, groups: groups.map(|group| group.as_raw()).collect() }
    }

    pub(super) fn is_root(&self) -> bool {
        self.id == 0
    }

    /// Whether files of this user cannot harm us.
    pub(super) fn trusts(&self, owner: u32) -> bool {
        owner == self.id || owner == 0
    }

    /// Whether what a group may do is allowed to us.
    pub(super) fn is_in(&self, group: u32) -> bool {
        self.is_root() || self.groups.contains(&group)
    }
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
    })
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
