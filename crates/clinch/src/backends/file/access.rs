//! Who may use a directory of lock files, and a file in it.
//!
//! Whoever may put files into the directory could plant a link, a pipe or a file of somebody else, and whoever may replace files
//! could split a lock in two. So the mode of the directory decides who shares it, and the URL must say the same: two processes that
//! took one directory for different things would else not exclude each other.

use std::borrow::Cow;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use percent_encoding::{AsciiSet, CONTROLS, percent_encode};
use rustix::fs::{FileType, Stat};
use rustix::io::Errno;

use super::users::{self, Me};
use super::way;
use crate::error::{Error, ErrorKind, Result};

const STICKY: u32 = 0o1000;
const SETGID: u32 = 0o2000;

/// The directory that is named to whoever needs one for several users.
const FOR_SEVERAL_USERS: &str = "file:///var/lib/clinch-group?share=group";

/// What a URL, or a shell that reads it, would take for something else.
const UNSAFE_IN_URLS: AsciiSet = CONTROLS
    .add(b' ')
    .add(b'!')
    .add(b'"')
    .add(b'#')
    .add(b'$')
    .add(b'%')
    .add(b'&')
    .add(b'\'')
    .add(b'(')
    .add(b')')
    .add(b'*')
    .add(b';')
    .add(b'<')
    .add(b'>')
    .add(b'?')
    .add(b'[')
    .add(b'\\')
    .add(b'`')
    .add(b'{')
    .add(b'|');

/// Who shares the files, as the URL says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Share {
    /// Nobody: they are one user's.
    #[default]
    No,
    /// The directory's group (`share=group`).
    Group,
}

/// What may be expected of the files in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sharing {
    /// Nobody else can put any there.
    Own,
    /// Others can add some, as in `/tmp`: only one's own and root's are taken.
    Beside,
    /// The members of this group share them all.
    Group(u32),
    /// They are this user's, and root only looks: what it made there, that user could not open.
    Foreign(u32),
}

impl Sharing {
    /// Refuses a directory in which others can replace files, and one that is not what the URL says.
    pub(super) fn of(path: &Path, stat: &Stat, share: Share, me: &Me) -> Result<Sharing> {
        match share {
            Share::No => Sharing::of_one_user(path, stat, me),
            Share::Group => Sharing::of_a_group(path, stat, me),
        }
    }

    fn of_one_user(path: &Path, stat: &Stat, me: &Me) -> Result<Sharing> {
        let (owner, mode, shown) = (stat.st_uid, stat.st_mode, path.display());
        if is_for_a_group(mode) {
            let group = users::group(stat.st_gid);
            return refused(
                format!("{shown} is shared by {group}"),
                format!("use {}?share=group", url(path)),
            );
        }
        if !me.trusts(owner) {
            if me.is_root() {
                return Ok(Sharing::Foreign(owner));
            }
            let owner = match me.stranger == Some(owner) {
                true => "somebody with no number in this user namespace".to_owned(),
                false => users::user(owner),
            };
            return refused(
                format!("{shown} belongs to {owner}, who could swap lock files"),
                format!("use a directory of your own, or one for several users, as {FOR_SEVERAL_USERS}"),
            );
        }
        let writable = mode & 0o022 != 0;
        if writable && mode & STICKY == 0 {
            let mode = mode & 0o7777;
            return refused(
                format!("others can replace files in {shown} (mode {mode:o})"),
                format!(
                    "run chmod go-w on it; for several users, run chmod 3770 on it and use {}?share=group",
                    url(path)
                ),
            );
        }
        way::check(path, owner, me)?;
        Ok(if writable { Sharing::Beside } else { Sharing::Own })
    }

    fn of_a_group(path: &Path, stat: &Stat, me: &Me) -> Result<Sharing> {
        let (owner, mode, shown) = (stat.st_uid, stat.st_mode, path.display());
        let group = users::group(stat.st_gid);
        let amiss = if mode & 0o002 != 0 {
            Some(("anybody can put files into it".to_owned(), "run chmod o-w on it".to_owned()))
        } else if mode & 0o020 == 0 {
            let remedy = format!("run chmod 3770 on it, or use {} if it is for one user", url(path));
            Some((format!("{group} cannot put files into it"), remedy))
        } else if mode & STICKY == 0 {
            let seen = "members of its group can replace each other's files";
            Some((seen.to_owned(), "run chmod +t on it".to_owned()))
        } else if owner != 0 && mode & SETGID == 0 {
            let seen = format!("it is neither root's nor setgid, but {}'s", users::user(owner));
            Some((seen, "run chmod g+s on it".to_owned()))
        } else {
            None
        };
        if let Some((amiss, remedy)) = amiss {
            let mode = mode & 0o7777;
            return refused(
                format!("{shown} is no directory for share=group (mode {mode:o}): {amiss}"),
                remedy,
            );
        }
        if !me.is_in(stat.st_gid) {
            return refused(
                format!("{shown} is shared by {group}, and {} is not in it", users::user(me.id)),
                "add that user to the group and log in again",
            );
        }
        way::check(path, owner, me)?;
        Ok(Sharing::Group(stat.st_gid))
    }

    /// Whether each file that is opened is to be looked at.
    pub(super) fn needs_a_look(self) -> bool {
        self != Sharing::Own
    }

    /// Refuses a file that others can have planted, or may change who should not. Takes regular files only.
    pub(super) fn check_file(self, path: &Path, stat: &Stat, me: &Me) -> Result<()> {
        let shown = path.display();
        if !is_regular(stat) {
            let owner = users::user(stat.st_uid);
            return refused(
                format!("{shown}, which {owner} put there, is no plain file; lock files always are"),
                "remove it",
            );
        }
        let (mode, linked) = (stat.st_mode, stat.st_nlink > 1);
        match self {
            Sharing::Own | Sharing::Foreign(_) => Ok(()),
            Sharing::Beside if !me.trusts(stat.st_uid) || linked || mode & 0o022 != 0 => refused(
                format!(
                    "{shown} was put there by {}, can be written by others or has another name",
                    users::user(stat.st_uid)
                ),
                format!(
                    "use a directory of your own (mode 0700), or one for several users, as {FOR_SEVERAL_USERS}"
                ),
            ),
            Sharing::Group(group) if linked || stat.st_gid != group || mode & 0o062 != 0o060 => {
                let seen = format!(
                    "{shown} ({}, {}, mode {:o}) is not as share=group makes it: with one name, of {} and mode 0660",
                    users::user(stat.st_uid),
                    users::group(stat.st_gid),
                    mode & 0o7777,
                    users::group(group)
                );
                refused(seen, "make it so with chgrp and chmod, or remove it when nobody holds its lock")
            }
            Sharing::Beside | Sharing::Group(_) => Ok(()),
        }
    }

    /// The same for who only reads. Root may look at any: reading harms nobody.
    pub(super) fn check_for_reading(self, path: &Path, stat: &Stat, me: &Me) -> Result<()> {
        if me.is_root() { Sharing::Own } else { self }.check_file(path, stat, me)
    }

    /// Refuses to change or make any file where one may only look.
    pub(super) fn check_for_writing(self, path: &Path) -> Result<()> {
        let Sharing::Foreign(owner) = self else { return Ok(()) };
        let (shown, owner) = (path.display(), users::user(owner));
        refused(
            format!("{shown} belongs to {owner}: root may look at its locks, not take or change them"),
            format!("run this as that user, or have both use one directory, as {FOR_SEVERAL_USERS}"),
        )
    }
}

/// What to do about a directory that may not be opened, as far as that is known.
pub(super) fn hint(path: &Path, share: Share) -> String {
    let Ok(found) = std::fs::metadata(path) else { return String::new() };
    let (owner, group) = (users::user(found.uid()), users::group(found.gid()));
    match share {
        Share::Group => format!(" (it is of {group}, in which this process must be)"),
        Share::No if is_for_a_group(found.mode()) => {
            format!(" (it is shared by {group}: use {}?share=group as a member of it)", url(path))
        }
        Share::No => format!(" (it is of {owner}; for several users, use one as {FOR_SEVERAL_USERS})"),
    }
}

/// Says how to make a directory for several users. It is not made by whoever comes first: it would be theirs.
pub(super) fn not_made(path: &Path) -> Error {
    let shown = path.display();
    Error::new(ErrorKind::Refused, format!("there is no {shown}, which a group is to share"))
        .with_remedy(format!("make it as root: install -d -g GROUP -m 3770 {shown}"))
}

fn is_for_a_group(mode: u32) -> bool {
    mode & (0o022 | STICKY) == 0o020 | STICKY
}

fn is_regular(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode).is_file()
}

/// The URL of a directory.
pub(super) fn url(path: &Path) -> String {
    format!("file://{}", percent_encode(path.as_os_str().as_bytes(), &UNSAFE_IN_URLS))
}

pub(super) fn refused<T>(message: String, remedy: impl Into<Cow<'static, str>>) -> Result<T> {
    Err(Error::new(ErrorKind::Refused, message).with_remedy(remedy))
}

/// Refuses a directory whose access control list lets others in than its mode says.
pub(super) fn check_list(path: &Path, descriptor: impl AsFd) -> Result<()> {
    // The default one would let them into the files.
    for kind in ["system.posix_acl_access", "system.posix_acl_default"] {
        match rustix::fs::fgetxattr(&descriptor, kind, &mut [0_u8; 0]) {
            Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS) => {}
            Err(error) => {
                let error = io::Error::from(error);
                let message = format!("cannot read the access control list of {}", path.display());
                return Err(Error::new(super::dir::kind(&error), message).with_source(error));
            }
            Ok(_) => {
                let shown = path.display();
                return refused(
                    format!("{shown} has an access control list, so others than its group may use it"),
                    format!("run setfacl -b on it, and chmod 3770 if its mode is another then: {shown}"),
                );
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: u32 = 50;

    fn stat(owner: u32, mode: u32) -> Stat {
        // Only what is looked at matters.
        let mut stat = rustix::fs::stat("/").unwrap();
        (stat.st_uid, stat.st_gid, stat.st_mode, stat.st_nlink) = (owner, GROUP, mode, 1);
        stat
    }

    fn user(id: u32) -> Me {
        Me { id, groups: vec![GROUP], stranger: None }
    }

    fn of(owner: u32, mode: u32, share: Share, me: u32) -> Result<Sharing> {
        Sharing::of(Path::new("/"), &stat(owner, 0o40000 | mode), share, &user(me))
    }

    /// An error names a URL to be used, which a shell would take apart.
    #[test]
    fn a_url_is_one_word_of_a_shell() {
        let path = Path::new("/a b/\"#$%&'(*);<?>[\\]`{|},~!é");
        let script = format!("printf %s {}", url(path));
        let said = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&said.stdout), url(path), "{said:?}");
        let read = url(path)
            .strip_prefix("file://")
            .map(|url| percent_encoding::percent_decode_str(url).decode_utf8_lossy().into_owned());
        assert_eq!(read.as_deref(), path.to_str());
    }

    #[test]
    fn a_directory_that_others_can_rewrite_is_refused() {
        assert!(of(1000, 0o777, Share::No, 1000).is_err());
        assert!(of(1001, 0o700, Share::No, 1000).is_err());
        assert_eq!(of(0, 0o1777, Share::No, 1000).unwrap(), Sharing::Beside, "files in it are then checked");
        assert_eq!(of(1000, 0o755, Share::No, 1000).unwrap(), Sharing::Own);
        assert_eq!(of(1000, 0o700, Share::No, 0).unwrap(), Sharing::Foreign(1000), "root looks");
    }

    #[test]
    fn a_directory_and_its_url_must_agree_on_who_shares_it() {
        for (mode, what_to_do) in [
            (0o700, "use file:/// if it is for one user"),
            (0o3777, "chmod o-w"),
            (0o2770, "chmod +t"),
            (0o0770, "chmod +t"),
        ] {
            let error = of(0, mode, Share::Group, 0).unwrap_err();
            assert!(error.to_string().contains(what_to_do), "{mode:o}: {error}");
        }
        for mode in [0o3770, 0o1770, 0o3775] {
            for me in [0, 1000] {
                assert_eq!(of(0, mode, Share::Group, me).unwrap(), Sharing::Group(GROUP), "{mode:o}");
                let error = of(0, mode, Share::No, me).unwrap_err();
                assert!(error.to_string().contains("file:///?share=group"), "{error}");
            }
        }
        let error = of(1000, 0o1770, Share::Group, 1000).unwrap_err();
        assert!(error.to_string().contains("chmod g+s"), "neither root's nor setgid: {error}");
        let stranger = Me { groups: vec![], ..user(1000) };
        let error = Sharing::of(Path::new("/"), &stat(0, 0o43770), Share::Group, &stranger).unwrap_err();
        assert!(error.to_string().contains("is not in it"), "{error}");
    }

    #[test]
    fn a_file_of_a_group_is_taken_only_as_the_group_makes_it() {
        let shared = Sharing::Group(GROUP);
        let check = |stat: Stat| shared.check_file(Path::new("/d/n.lock"), &stat, &user(0));
        assert!(check(stat(1234, 0o100_660)).is_ok(), "any member may have made it");
        for mode in [0o100_600, 0o100_640, 0o100_662, 0o010_660] {
            assert!(check(stat(1234, mode)).is_err(), "{mode:o}");
        }
        let (mut linked, mut foreign) = (stat(0, 0o100_660), stat(0, 0o100_660));
        (linked.st_nlink, foreign.st_gid) = (2, GROUP + 1);
        assert!(check(linked).is_err() && check(foreign).is_err());
    }
}
