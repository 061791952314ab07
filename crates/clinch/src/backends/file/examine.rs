//! What the promises of a lock directory rest on: where it is and why there, whose it is, what it lies on, and which other directories
//! look as if they were for the same jobs.

use std::collections::HashSet;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::access::Share;
use super::dir::{Dir, Options};
use super::home::{self, BELOW_HOME};
use super::network::check_file_system;
use super::users::{self, Me};
use crate::check::Check;
use crate::error::Result;

/// Looks at the directory of a URL; an empty path is the user's default. It is made if it is not there, as by every use of it.
///
/// An error says that there is no default directory.
pub(super) fn examine(named: &Path, options: Options) -> Result<Vec<Check>> {
    let me = Me::now();
    let default = home::default_path(&me);
    let is_named =
        !named.as_os_str().is_empty() && default.as_ref().ok().is_none_or(|default| default != named);
    let path = if named.as_os_str().is_empty() { default? } else { named.to_path_buf() };
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
            let otherwise = "name a local directory of your own: file:///DIR";
            return Ok(vec![Check::pass("url", directory), Check::failed("directory", &error, otherwise)]);
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
    if !is_named {
        checks.push(others(&meta));
    }
    Ok(checks)
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
        Ok(()) => Check::pass("file-system", mounted(path).unwrap_or_else(|| format!("of type {magic:#x}"))),
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
        Share::No => {
            let others = if is_named { "are refused" } else { "have other directories" };
            format!("only jobs of {} exclude each other here; other users {others}", users::user(me.id))
        }
    };
    Check::pass("users", seen)
}

/// Other default directories, of ours or of other users, that are in use.
fn others(ours: &Metadata) -> Check {
    let own = ["XDG_STATE_HOME", "HOME"].into_iter().filter_map(home::variable);
    let own = own.flat_map(|dir| [dir.join("clinch"), dir.join(BELOW_HOME)]);
    let homes = homes().into_iter().map(|home| home.join(BELOW_HOME));
    let mut seen = HashSet::from([identity(ours)]);
    let found = std::iter::once(PathBuf::from(home::OF_ROOT)).chain(own).chain(homes).filter_map(|dir| {
        let meta = std::fs::metadata(&dir).ok().filter(Metadata::is_dir)?;
        let is_store = is_store(&dir) && seen.insert(identity(&meta));
        is_store.then(|| format!("{} of {}", dir.display(), users::user(meta.uid())))
    });
    let found: Vec<String> = found.collect();
    if found.is_empty() {
        return Check::pass("others", "no other default directory is in use, as far as can be seen");
    }
    Check::warn(
        "others",
        format!("also in use: {}; jobs there run beside jobs here", found.join(", ")),
        "where they are the same jobs, name one directory for all: file:///run/lock/clinch?share=group",
    )
}

/// Whether there are locks in it; one that cannot be looked into may have some.
fn is_store(dir: &Path) -> bool {
    let is_lock = |name: std::ffi::OsString| name.to_string_lossy().ends_with(".lock");
    std::fs::read_dir(dir).map_or(true, |files| files.flatten().any(|file| is_lock(file.file_name())))
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
        let checks = examine(&path, Options::default()).unwrap();
        let of = |what: &str| &checks.iter().find(|check| check.what == what).unwrap().seen;
        assert!(of("directory").contains("mode 0700"), "{checks:?}");
        assert!(!of("file-system").is_empty() && !of("file-system").contains("0x"), "{checks:?}");
    }

    #[test]
    fn the_longest_mount_point_counts() {
        assert_eq!(mounted(Path::new("/proc/self")).as_deref(), Some("proc"));
        assert_eq!(mounted(Path::new("/there/is/none")), None);
    }
}
