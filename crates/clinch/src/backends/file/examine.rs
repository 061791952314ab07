//! What the promises of a lock directory rest on: where it is and why there, whose it is, what it lies on, and which other directories
//! look as if they were for the same jobs.

use std::collections::HashSet;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::Access;
use rustix::io::Errno;

use super::access::{Share, Sharing};
use super::dir::{Dir, Options};
use super::home::{self, BELOW_HOME};
use super::network::check_file_system;
use super::users::{self, Me};
use crate::check::{Check, Verdict};
use crate::error::{Error, ErrorKind, Result};

/// How many lock files are looked at.
const FILES: usize = 1000;

/// With what the locks begin that `clinch doctor` takes: where there are but those, nobody uses a directory.
const OF_DOCTOR: &str = "clinch-doctor%2F";

/// File systems in memory, tmpfs and ramfs, by the magic number of `statfs(2)`.
const EMPTIED: [u32; 2] = [0x0102_1994, 0x8584_58f6];

/// What to do about a directory that cannot be used, where nothing more is known.
const OTHERWISE: &str = "mend what it says, or name another directory: file:///DIR";

/// What to do where several users need the same locks.
const FOR_SEVERAL_USERS: &str = "a directory for several users, as file:///var/lib/clinch-group?share=group";

/// Looks at the directory of a URL; an empty path is the user's default. It is made if it is not there, as for a lock.
pub(super) fn examine(named: &Path, options: Options) -> Vec<Check> {
    let me = Me::now();
    let default = home::default_path(&me);
    let is_named =
        !named.as_os_str().is_empty() && default.as_ref().ok().is_none_or(|default| default != named);
    let path = match default {
        _ if !named.as_os_str().is_empty() => named.to_path_buf(),
        Ok(default) => default,
        Err(error) => {
            let url = Check::pass("url", "the default directory of the user");
            return vec![url, Check::failed("directory", &error, OTHERWISE)];
        }
    };
    let why = match () {
        () if is_named => "named by the URL",
        () if me.is_root() => "the default of root",
        () => "the default, below the home of the user",
    };
    let opened = Dir::open(named, options).and_then(|dir| dir.metadata());
    let directory = format!("{} ({why})", path.display());
    let meta = match opened {
        Ok(meta) => meta,
        Err(error) => {
            return vec![Check::pass("url", directory), Check::failed("directory", &error, OTHERWISE)];
        }
    };
    let owner = format!(
        "{}, {}, mode {:04o}",
        users::user(meta.uid()),
        users::group(meta.gid()),
        meta.mode() & 0o7777
    );
    let mut checks = vec![
        Check::pass("url", directory),
        Check::pass("directory", owner),
        file_system(&path, options.network_allowed),
        exclusion(&me, &meta, options.share, is_named),
    ];
    checks.extend(files(&path, options.share, &me));
    if !is_named {
        checks.push(others(&meta));
    }
    checks
}

fn file_system(path: &Path, network_allowed: bool) -> Check {
    let magic = match rustix::fs::statfs(path) {
        Ok(system) => system.f_type as u32,
        Err(error) => {
            let seen = format!("what {} lies on cannot be read: {error}", path.display());
            return Check::warn("file-system", seen, "use a local file system");
        }
    };
    match check_file_system(path, magic) {
        Ok(()) => {
            let system = mounted(path).unwrap_or_else(|| format!("of type {magic:#x}"));
            match EMPTIED.contains(&magic) {
                false => Check::pass("file-system", system),
                true => Check::warn(
                    "file-system",
                    format!(
                        "{system}, which a reboot empties: tokens then rise only if the clock was not set back, and --once-per \
                         begins anew"
                    ),
                    "use a directory on a disk, below /var/lib for one",
                ),
            }
        }
        Err(error) if network_allowed => {
            let seen = error.what().to_owned();
            Check::warn("file-system", seen, "be sure that no other host uses it, as network-fs=allow says")
        }
        Err(error) => Check::failed("file-system", &error, ""),
    }
}

/// The type of the file system at a path, by the longest mount point above it; of two at one place the later one counts.
fn mounted(path: &Path) -> Option<String> {
    let path = path.canonicalize().ok()?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mount = |line: &str| {
        let (place, system) = line.split_once(" - ")?;
        // What would end a field is written in octal.
        let place = place.split(' ').nth(4)?.replace("\\040", " ").replace("\\011", "\t");
        Some((PathBuf::from(place), system.split(' ').next()?.to_owned()))
    };
    let above = mounts.lines().filter_map(mount).filter(|(place, _)| path.starts_with(place));
    above.max_by_key(|(place, _)| place.components().count()).map(|(_, system)| system)
}

/// Whose jobs exclude each other there.
fn exclusion(me: &Me, meta: &Metadata, share: Share, is_named: bool) -> Check {
    let seen = match share {
        Share::Group => {
            format!("root and all members of {} exclude each other here", users::group(meta.gid()))
        }
        Share::No if meta.uid() != me.id && (me.is_root() || meta.mode() & 0o022 == 0) => {
            let seen = format!(
                "only jobs of {} exclude each other here; {} may look at its locks{}, not take or change them",
                users::user(meta.uid()),
                if me.is_root() { "root".to_owned() } else { users::user(me.id) },
                if me.is_root() { "" } else { " at most" }
            );
            let remedy = format!("run this as that user, or have both use {FOR_SEVERAL_USERS}");
            return Check::warn("users", seen, remedy);
        }
        Share::No if meta.mode() & 0o022 != 0 => {
            let seen = format!(
                "others can add lock files of their own here (mode {:04o}), which are then refused (77) for everybody else",
                meta.mode() & 0o7777
            );
            let remedy = format!("use one of mode 0700, or {FOR_SEVERAL_USERS}");
            return Check::warn("users", seen, remedy);
        }
        Share::No => {
            let others = if is_named { "are refused" } else { "have other directories" };
            format!("only jobs of {} exclude each other here; other users {others}", users::user(meta.uid()))
        }
    };
    Check::pass("users", seen)
}

/// Whether the lock files that are there already can be used, where others can have put some there.
fn files(path: &Path, share: Share, me: &Me) -> Option<Check> {
    let stat = rustix::fs::stat(path).ok()?;
    let sharing = Sharing::of(path, &stat, share, me)
        .ok()
        .filter(|sharing| matches!(sharing, Sharing::Beside | Sharing::Group(_)))?;
    let files = std::fs::read_dir(path).ok()?.flatten().map(|file| file.path());
    let locks = files.filter(|file| file.extension().is_some_and(|end| end == "lock")).take(FILES);
    let amiss = locks.into_iter().find_map(|file| {
        // One that is gone does no harm.
        let stat = rustix::fs::lstat(&file).ok()?;
        sharing.check_file(&file, &stat, me).and_then(|()| may_be_opened(&file)).err()
    });
    Some(match amiss {
        None => Check::pass("files", "the lock files that are there can be used"),
        Some(error) => Check { verdict: Verdict::Warn, ..Check::failed("files", &error, OTHERWISE) },
    })
}

/// Refuses a lock file that this user may not read and write, without opening it, which would wake its waiters.
fn may_be_opened(file: &Path) -> Result<()> {
    match rustix::fs::access(file, Access::READ_OK | Access::WRITE_OK) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => {
            let error = std::io::Error::from(error);
            Err(Error::new(ErrorKind::Refused, format!("cannot open {}", file.display())).with_source(error))
        }
    }
}

/// Other default directories, of ours or of other users, that are in use.
fn others(ours: &Metadata) -> Check {
    let own = ["XDG_STATE_HOME", "HOME"].into_iter().filter_map(home::variable);
    let own = own.flat_map(|dir| [dir.join("clinch"), dir.join(BELOW_HOME)]);
    let homes = homes().into_iter().map(|home| home.join(BELOW_HOME));
    let mut seen = HashSet::from([identity(ours)]);
    let (mut found, mut closed) = (Vec::new(), Vec::new());
    for dir in std::iter::once(PathBuf::from(home::OF_ROOT)).chain(own).chain(homes) {
        let Some(meta) = std::fs::metadata(&dir).ok().filter(Metadata::is_dir) else { continue };
        if !seen.insert(identity(&meta)) {
            continue;
        }
        let told = format!("{} of {}", dir.display(), users::user(meta.uid()));
        match is_store(&dir) {
            None => closed.push(told),
            Some(true) => found.push(told),
            Some(false) => {}
        }
    }
    if found.is_empty() {
        let closed = match &*closed {
            [] => String::new(),
            closed => format!("; cannot be looked into: {}", closed.join(", ")),
        };
        return Check::pass("others", format!("no other default directory is seen in use{closed}"));
    }
    Check::warn(
        "others",
        format!("also in use: {}; jobs there run beside jobs here", found.join(", ")),
        "where they are the same jobs, name one directory for all: file:///var/lib/clinch-group?share=group",
    )
}

/// Whether there are locks in it that a job has used; `None` where it cannot be looked into.
fn is_store(dir: &Path) -> Option<bool> {
    let is_lock = |name: std::ffi::OsString| {
        let name = name.to_string_lossy();
        name.ends_with(".lock") && !name.starts_with(OF_DOCTOR)
    };
    Some(std::fs::read_dir(dir).ok()?.flatten().any(|file| is_lock(file.file_name())))
}

fn identity(meta: &Metadata) -> (u64, u64) {
    (meta.dev(), meta.ino())
}

/// The homes of the users that the host itself knows.
fn homes() -> Vec<PathBuf> {
    let text = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    text.lines().filter_map(|line| line.split(':').nth(5)).map(PathBuf::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_directory_tells_its_file_system_and_whose_it_is() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("a dir");
        let checks = examine(&path, Options::default());
        let of = |what: &str| &checks.iter().find(|check| check.what == what).unwrap().seen;
        assert!(of("directory").contains("mode 0700"), "{checks:?}");
        assert!(!of("file-system").is_empty() && !of("file-system").contains("0x"), "{checks:?}");
    }

    fn directory(mode: u32) -> tempfile::TempDir {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(mode)).unwrap();
        dir
    }

    #[test]
    fn an_old_lock_file_in_a_directory_of_a_group_is_named() {
        let dir = directory(0o3770);
        let path = dir.path().canonicalize().unwrap();
        let options = Options { share: Share::Group, ..Options::default() };
        let of = || files(&path, options.share, &Me::now()).unwrap();
        assert_eq!(of().verdict, Verdict::Pass);
        std::fs::write(path.join("n.lock"), "").unwrap();
        let check = of();
        assert_eq!(check.verdict, Verdict::Warn);
        assert!(check.seen.contains("n.lock") && check.remedy.unwrap().contains("chmod"));
    }

    #[test]
    fn a_directory_into_which_all_can_put_files_is_told() {
        let dir = directory(0o1777);
        let checks = examine(dir.path(), Options::default());
        let users = checks.iter().find(|check| check.what == "users").unwrap();
        assert_eq!(users.verdict, Verdict::Warn);
        assert!(users.seen.contains("others can add lock files"), "{users:?}");
    }

    #[test]
    fn a_directory_in_which_but_doctor_was_is_not_in_use() {
        let dir = directory(0o700);
        std::fs::write(dir.path().join("clinch-doctor%2Fme@here.lock"), "").unwrap();
        assert_eq!(is_store(dir.path()), Some(false));
        std::fs::write(dir.path().join("n.lock"), "").unwrap();
        assert_eq!(is_store(dir.path()), Some(true));
        assert_eq!(is_store(&dir.path().join("none")), None);
    }

    #[test]
    fn the_longest_mount_point_counts() {
        assert_eq!(mounted(Path::new("/proc/self")).as_deref(), Some("proc"));
        assert_eq!(mounted(Path::new("/there/is/none")), None);
    }
}
