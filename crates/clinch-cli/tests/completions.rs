//! Completion scripts, in the shells that they are for.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

mod common;

use std::net::TcpListener;

use common::terminal::Terminal;
use common::{World, eventually};

const BASH: [&str; 2] = [
    "bash",
    ". /usr/share/bash-completion/bash_completion\n. ./script\ncomplete -W 'alpha beta' clinch-tool\n",
];
const ZSH: [&str; 2] = [
    "zsh",
    "autoload -U compinit; compinit -D -u\n. ./script\ncompdef '_arguments \"1:a word:(alpha beta)\"' clinch-tool\n",
];
const FISH: [&str; 2] = ["fish", "source ./script\ncomplete -c clinch-tool -f -a 'alpha beta'\n"];

/// A shell in which `clinch` is what stands in `bin`, and `clinch-tool` writes down its arguments.
struct Shell {
    world: World,
    terminal: Terminal,
}

impl Shell {
    fn start(world: World, [shell, settings]: [&str; 2]) -> Shell {
        world.write("script", &String::from_utf8(world.output(["completions", shell]).stdout).unwrap());
        let dir = world.path(".");
        let path = format!("PATH={}:{}", world.path("bin").display(), std::env::var("PATH").unwrap());
        world.write("bin/clinch-tool", "#!/bin/sh\necho \"$@\" >> said\n");
        world.install(world.path("bin/clinch-tool"), "bin/clinch-tool");
        let home = format!("HOME={}", dir.display());
        let (rc, options): (_, &[&str]) = match shell {
            "bash" => ("settings", &["--noprofile", "--rcfile", "settings"]),
            "zsh" => (".zshrc", &["-d"]),
            _ => ("settings", &["--no-config", "--init-command", "source settings"]),
        };
        world.write(rc, settings);
        let env = [
            "env",
            "-u",
            "XDG_CONFIG_HOME",
            "-u",
            "XDG_DATA_HOME",
            "-u",
            "ZDOTDIR",
            "TERM=xterm",
            &path,
            &home,
        ];
        let terminal = Terminal::of(&world, &[&env, &[shell][..], options, &["-i"]].concat());
        let mut shell = Shell { world, terminal };
        shell.enter("clinch-tool ready");
        shell.says("ready");
        shell
    }

    fn enter(&mut self, keys: &str) {
        self.terminal.type_in(&format!("{keys}\n"));
    }

    /// What a line writes to the file `out`.
    fn out(&mut self, line: &str) -> String {
        self.enter("clinch-tool next");
        self.says("next");
        let _ = std::fs::remove_file(self.world.path("out"));
        self.enter(&format!("{line}; clinch-tool done"));
        self.says("done");
        self.world.read("out")
    }

    /// Waits until the tool was last called with this.
    fn says(&self, words: &str) {
        let last = || self.world.read("said").lines().last().map(str::to_owned);
        eventually(&format!("{words:?} is said"), || last().as_deref() == Some(words));
    }
}

/// A world with the built binary on the way.
fn world() -> World {
    let world = World::new();
    std::fs::create_dir(world.path("bin")).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_clinch"), world.path("bin/clinch")).unwrap();
    world
}

/// What is offered does not work when it is put in, or nothing is.
fn completes(shell: [&str; 2]) {
    let world = world();
    let names = ["nightly:full", "my lock", "weekly"];
    let _holders = names.map(|name| world.start(["run", name, "sleep", "60"]));
    let elsewhere = format!("file://{}", world.path("elsewhere").display());
    let _other = world.start(["-u", &elsewhere, "run", "other", "sleep", "60"]);
    eventually("all are held", || names.iter().all(|name| world.held(name)));
    let claim = world.claims("weekly", "held")[0]["claim"].as_str().unwrap().to_owned();
    world.write("file-of-mine", "");
    let mut shell = Shell::start(world, shell);

    // With `complete`, which nobody types, there would be two.
    let written = shell.out("clinch comp\tbash > out");
    assert!(written.contains("_clinch_live"), "{written}");
    // Names in which there is what shells take for the end of a word.
    for (typed, name) in [
        ("nig\t", "nightly:full"),
        ("nightly:f\t", "nightly:full"),
        ("my\t", "my lock"),
        ("'my\t", "my lock"),
    ] {
        let told = shell.out(&format!("clinch show --json {typed} > out"));
        assert!(told.contains(&format!("\"{name}\"")), "{typed:?}: {told}");
    }
    let told = shell.out(&format!("clinch -u {elsewhere} show --json \t > out"));
    assert!(told.contains("\"other\""), "{told}");
    let told = shell.out("clinch break --yes --json weekly --claim \t > out");
    assert!(told.contains(&claim), "{told}");
    for command in [
        "clinch run x -- clinch-to\tal\t",
        "clinch run -E3 -w5s x clinch-tool al\t",
        "clinch run x -- clinch run y -- clinch-tool al\t",
    ] {
        shell.enter("clinch-tool next");
        shell.says("next");
        shell.enter(command);
        shell.says("alpha");
    }
    let told = shell.out("clinch run x -- ls file-o\t > out");
    assert_eq!(told, "file-of-mine\n");
    shell.out("clinch run --events file-o\t x true > out");
    assert!(shell.world.read("file-of-mine").contains("acquired"));
}

#[test]
fn bash_completes_names_claims_and_commands() {
    completes(BASH);
}

/// The name of a lock, which anybody may choose, runs as a command of whoever completes it.
fn quotes(shell: [&str; 2]) {
    let world = world();
    let names = [
        "cmd $(touch ran)",
        "tick`touch ran`",
        "it's",
        "quo\"te",
        "back\\slash",
        "over\\",
        "wow!clinch",
        "dollar$HOME",
        "~root",
        "{a,b}",
        "*",
        "semi;touch ran",
        "<in",
    ];
    for name in names {
        assert_eq!(world.code(["run", "--min-hold", "1h", name, "true"]), 0);
    }
    let mut shell = Shell::start(world, shell);
    for name in names {
        let begun = &name[..1];
        let plain =
            if begun.starts_with(char::is_alphabetic) { begun.to_owned() } else { format!("\\{begun}") };
        for typed in [plain, format!("'{begun}"), format!("\"{begun}")] {
            let told = shell.out(&format!("clinch show --json {typed}\t > out"));
            let told: serde_json::Value = serde_json::from_str(&told).unwrap_or_default();
            assert_eq!(told["name"], name, "{typed}");
        }
    }
    // What stands there already is quoted.
    for (typed, name) in [(r"it\'", "it's"), ("\"it'", "it's"), ("\"cmd \\$(tou", "cmd $(touch ran)")] {
        let told = shell.out(&format!("clinch show --json {typed}\t > out"));
        assert!(told.contains(&format!("\"{name}\"")), "{typed}: {told}");
    }
    assert!(!shell.world.path("ran").exists(), "a name has run");
}

#[test]
fn bash_quotes_what_it_completes() {
    quotes(BASH);
}

#[test]
fn zsh_quotes_what_it_completes() {
    quotes(ZSH);
}

#[test]
fn fish_quotes_what_it_completes() {
    quotes(FISH);
}

/// As above, where the package that knows most commands is not there.
#[test]
fn bash_alone_completes_names_and_commands() {
    let world = world();
    world.write("file-of-mine", "");
    let mut shell = Shell::start(world, [BASH[0], ". ./script\n"]);
    shell.enter("clinch run x -- clinch-to\tfile-o\t");
    shell.says("file-of-mine");
}

#[test]
fn zsh_completes_names_claims_and_commands() {
    completes(ZSH);
}

#[test]
fn fish_completes_names_claims_and_commands() {
    completes(FISH);
}

/// After an upgrade that is only half done, nothing is offered, or errors stand in the prompt.
fn falls_back(shell: [&str; 2]) {
    let world = world();
    std::fs::remove_file(world.path("bin/clinch")).unwrap();
    world.write(
        "bin/clinch",
        "#!/bin/sh\nif [ \"$1\" = complete ]; then echo no verb >&2; exit 64; fi\necho \"$@\" >> said\n",
    );
    world.install(world.path("bin/clinch"), "bin/clinch");
    let mut shell = Shell::start(world, shell);
    shell.enter("clinch rele\t--js\t");
    shell.says("release --json");
    assert!(!shell.terminal.seen.lock().unwrap().contains("no verb"));
}

#[test]
fn bash_offers_the_static_words_of_an_older_clinch() {
    falls_back(BASH);
}

#[test]
fn zsh_offers_the_static_words_of_an_older_clinch() {
    falls_back(ZSH);
}

#[test]
fn fish_offers_the_static_words_of_an_older_clinch() {
    falls_back(FISH);
}

/// Verbs that no person calls are offered.
#[test]
fn hidden_verbs_are_in_no_script() {
    let world = World::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = String::from_utf8(world.output(["completions", shell]).stdout).unwrap();
        assert!(
            script.contains("release") && !script.contains("end-job") && !script.contains("asker"),
            "{shell}"
        );
    }
    assert_eq!(offered(&world, &["ho"]), ["words"]);
}

/// What `clinch complete` says; it must be silent on all else.
fn offered(world: &World, words: &[&str]) -> Vec<String> {
    let output = world.output(["complete", "--", "clinch"].iter().chain(words).copied());
    assert!(output.status.success() && output.stderr.is_empty(), "{words:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// A key makes a directory, shows an error, or is never answered.
#[test]
fn where_no_names_can_be_had_nothing_is_said_and_nothing_made() {
    let world = World::new();
    let hangs = TcpListener::bind("127.0.0.1:0").unwrap();
    let hangs = format!("redis://{}", hangs.local_addr().unwrap());
    for url in [
        "redis://127.0.0.1:1",
        &hangs,
        "etcd://127.0.0.1:1",
        "no-store://",
        "file://host/x",
        "$URL",
        &world.url(),
    ] {
        assert_eq!(offered(&world, &["-u", url, "show", "x"]), ["words"], "{url}");
        assert_eq!(offered(&world, &["-u", url, "renew", "x", "a"]), ["words"], "{url}");
    }
    assert_eq!(std::fs::read_dir(world.path(".")).unwrap().count(), 0);
    assert_eq!(world.code(["run", "--min-hold", "1h", "closed", "true"]), 0);
    let files = || {
        let mut files: Vec<_> =
            std::fs::read_dir(world.path("store")).unwrap().map(|file| file.unwrap().file_name()).collect();
        files.sort();
        files
    };
    let before = files();
    assert_eq!(offered(&world, &["show", "clo"]), ["words", "closed\tkept closed"]);
    assert_eq!(offered(&world, &["renew", "closed", ""]).len(), 1 + OPTIONS_OF_RENEW);
    assert_eq!(before, files());
}

/// With no claim to offer there are the options: --url, --ttl, --json, --help.
const OPTIONS_OF_RENEW: usize = 4;

/// A store of ten thousand locks fills the screen; or the name of one steers the terminal.
#[test]
fn no_more_names_are_offered_than_can_be_read_and_none_that_misleads() {
    let world = World::new();
    let close = |name: &str| assert_eq!(world.code(["run", "--min-hold", "1h", name, "true"]), 0);
    (0..201).for_each(|number| close(&format!("many{number}")));
    for name in ["odd\x1b[31m", "odd\nline", "odd\u{202e}", "odd but plain"] {
        close(name);
    }
    assert_eq!(offered(&world, &["show", "many"]).len(), 1 + 200);
    let odd = offered(&world, &["show", "odd"]);
    assert!(odd.len() == 2 && odd[1].starts_with("odd but plain\t"), "{odd:?}");
}
