//! The job's environment, and jobs inside jobs.

mod common;

use std::io::Read;
use std::os::linux::net::SocketAddrExt;

use common::pty::Screen;
use common::{Running, World, eventually, kill};

fn stdout(world: &World, args: &[&str]) -> String {
    String::from_utf8_lossy(&world.output(args.iter().copied()).stdout).into_owned()
}

/// A job cannot tell the store which of two jobs is the later one.
#[test]
fn a_job_knows_what_it_holds_and_tokens_rise() {
    let world = World::new();
    let tell = ["run", "a b", "-c", "echo \"$CLINCH_NAME/$CLINCH_TOKEN/$CLINCH_CLAIM\""];
    let parse = |text: String| {
        let parts: Vec<&str> = text.trim().split('/').collect();
        assert_eq!((parts[0], parts[2].len()), ("a b", 32));
        parts[1].parse::<u64>().unwrap()
    };
    let (first, second) = (parse(stdout(&world, &tell)), parse(stdout(&world, &tell)));
    assert!(first < second && second <= 1 << 53);
}

/// The password of the store ends up in the environment of every job, and from there in its crash reports.
#[test]
fn a_password_never_reaches_the_job() {
    let world = World::new();
    let store = world.url();
    let mut command = world.clinch(["run", "-u", &store, "x", "env"]);
    let output = command.env("CLINCH_URL", "redis://me:hunter2@h/0").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("CLINCH_HELD=") && !text.contains("hunter2"));
    for secret in
        ["redis+sentinel://h/m?sentinel_password=hunter2", "redis+sentinel://h/m?sentinel%5Fpassword=hunter2"]
    {
        let mut command = world.clinch(["run", "-u", &store, "x", "env"]);
        let output = command.env("CLINCH_URL", secret).output().unwrap();
        assert!(!String::from_utf8_lossy(&output.stdout).contains("hunter2"), "{secret}");
    }
    let seen = stdout(&world, &["run", "x", "-c", "echo $CLINCH_URL"]);
    assert_eq!(seen.trim(), world.url(), "what holds no secret is kept, so that nested runs find the store");
}

/// A run inside a job would lock in the store of this host, unseen by all others, if the URL were only gone.
#[test]
fn a_run_inside_a_job_is_told_that_the_url_is_withheld() {
    let world = World::new();
    let store = world.url();
    let inner = |arguments: &str| {
        let script = format!("\"$CLINCH\" run {arguments} y true");
        let mut command = world.clinch(["run", "-u", &store, "x", "-c", &script]);
        command.env("CLINCH_URL", "redis://me:hunter2@h/0").output().unwrap()
    };
    let output = inner("");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(64), "{message}");
    assert!(message.contains("password") && message.contains("CLINCH_URL"), "{message}");
    assert_eq!(inner("-u \"$CLINCH_URL?ttl=5s\"").status.code(), Some(64));
    assert_eq!(inner(&format!("-u '{store}'")).status.code(), Some(0));
}

/// Help and errors show the password to whoever looks over a shoulder.
#[test]
fn a_password_is_not_shown() {
    let world = World::new();
    for args in [&["--help"][..], &["run", "--help"], &["run", "x", "true"], &["run", "--bad"], &["ls"]] {
        let mut command = world.clinch(args.iter().copied());
        let output =
            command.env("CLINCH_URL", "redis://me:hunter2@127.0.0.1:1/0?bad=hunter2").output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        assert!(!String::from_utf8_lossy(&text).contains("hunter2"), "{args:?}");
    }
}

/// A password that is taken for the name of a lock is stored, and shown to everybody.
#[test]
fn a_password_in_the_wrong_place_is_not_repeated() {
    let world = World::new();
    let url = "redis://me:hunter2@127.0.0.1:1";
    for args in [
        &[url, "run", "x", "true"][..],
        &["run", url, "true"],
        &["run", "x", url, "--", "true"],
        &["show", "x", url],
        &["acquire", "x", url],
        &["ls", url],
        &["show", url],
        &["acquire", "-n", url],
        &["break", url],
        &["acquire", "redsi://me:hunter2@h"],
        &["sentinel://me:hunter2@h", "ls"],
        &["run", "x", &format!("CLINCH_URL={url}"), "true"],
        &["run", "--events", url, "x", "true"],
        &["man", url],
        &[&format!("--url {url}"), "ls"],
        &[&format!("URL={url}"), "ls"],
        &["run", "--label", url, "x", "true"],
    ] {
        let output = world.output(args.iter().copied());
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        assert!(output.status.code() == Some(64) && text.contains("CLINCH_URL"), "{args:?}: {text}");
        assert!(!text.contains("hunter2"), "{args:?}: {text}");
    }
    assert!(world.list().is_empty());
    for name in ["http://host:8443/users/@me", "docker://reg:5000/app@sha256:aa", "https://ci/job?author=me"]
    {
        assert_eq!(world.code(["run", name, "true"]), 0, "a name may be a URL: {name}");
    }
}

/// A job that takes the lock that it holds waits for itself.
#[test]
fn a_job_inside_a_job_reenters() {
    let world = World::new();
    let script = r#"echo $CLINCH_TOKEN; "$CLINCH" run -w 20 x -c 'echo $CLINCH_TOKEN; exit 9'"#;
    let output = world.output(["run", "x", "-c", script]);
    assert_eq!(output.status.code(), Some(9));
    let text = String::from_utf8(output.stdout).unwrap();
    let tokens: Vec<&str> = text.lines().collect();
    assert!(tokens.len() == 2 && tokens[0] == tokens[1], "{text}");
    let other = r#""$CLINCH" run y -- "$CLINCH" run x -c 'exit 8'"#;
    assert_eq!(world.code(["run", "x", "-c", other]), 8, "through another lock");
}

/// A store or a lock that is spelled in another way is taken for another, and the job waits for itself.
#[test]
fn a_job_reenters_however_its_lock_is_spelled() {
    let redis = clinch_testkit::Redis::start();
    let world = World::on(redis.url());
    let port = redis.port();
    for (name, query) in [("x", "/0"), ("x", "/?ttl=5s"), ("x", "?prefix=clinch:"), ("clinch:x", "?prefix=")]
    {
        let inner = format!(r#""$CLINCH" -u 'redis://LOCALHOST:{port}{query}' run -w 20 {name} -c 'exit 9'"#);
        assert_eq!(world.code(["run", "x", "-c", &inner]), 9, "{query}");
    }
    let another = format!(r#""$CLINCH" -u '{}/1' run x -c 'exit 8'"#, redis.url());
    assert_eq!(world.code(["run", "--once-per", "1h", "x", "-c", &another]), 8, "another store");
    let files = World::new();
    std::os::unix::fs::symlink(files.path("store"), files.path("link")).unwrap();
    let link = files.path("link");
    let inner = format!(r#""$CLINCH" -u 'file://{}/' run -w 20 x -c 'exit 9'"#, link.display());
    assert_eq!(files.code(["run", "x", "-c", &inner]), 9);
}

/// A command that somebody else starts with the environment of the job, as `at` does, works on beside the next holder.
#[test]
fn only_a_job_inside_a_job_reenters() {
    let world = World::new();
    let job = "echo \"$CLINCH_HELD\" > held; while [ ! -e stop ]; do sleep 0.02; done";
    let mut run = world.start(["run", "x", "-c", job]);
    eventually("the job runs", || world.read("held").ends_with('\n'));
    let mut command = world.clinch(["run", "x", "test", "-e", "stop"]);
    let mut spooled = Running(command.env("CLINCH_HELD", world.read("held").trim()).spawn().unwrap());
    eventually("it waits for its turn, or runs", || {
        spooled.0.try_wait().unwrap().is_some() || world.claims("x", "waiting").len() == 1
    });
    world.write("stop", "");
    assert_eq!((spooled.code(), run.code()), (0, 0), "it waited until the job had ended");
}

/// A job inside a reader becomes a writer beside other readers.
#[test]
fn a_writer_does_not_reenter_a_reader() {
    let world = World::new();
    assert_eq!(world.code(["run", "-s", "x", "-c", r#""$CLINCH" run x true"#]), 64);
    assert_eq!(world.code(["run", "-s", "x", "-c", r#""$CLINCH" run -s x true"#]), 0);
}

/// The next holder begins while a part of it runs that was to keep the lock.
#[test]
fn a_run_inside_a_job_is_refused_what_the_run_around_it_has_to_do() {
    for option in ["--orphans=wait", "--no-fork", "--min-hold=1s", "--max-hold=1s", "--once-per=1s"] {
        let world = World::new();
        let inner = format!(r#"exec "$CLINCH" run {option} x touch ran"#);
        let output = world.output(["run", "x", "-c", &inner]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(64), "{option}: {said}");
        let (name, _) = option.split_once('=').unwrap_or((option, ""));
        assert!(said.contains(name) && said.contains("the job around this one"), "{said}");
        assert!(!world.path("ran").exists(), "{option}");
    }
    let world = World::new();
    let inner = r#""$CLINCH" run --orphans leave x true && "$CLINCH" run --orphans wait y true"#;
    assert_eq!(world.code(["run", "x", "-c", inner]), 0, "what says nothing, and another lock");
}

/// A claim that is over is taken for one that holds.
#[test]
fn a_stale_or_forged_hint_is_not_believed() {
    let world = World::new();
    let held = stdout(&world, &["run", "x", "-c", "echo $CLINCH_HELD"]);
    let mut command = world.clinch(["run", "x", "true"]);
    assert_eq!(
        command.env("CLINCH_HELD", held.trim()).status().unwrap().code(),
        Some(0),
        "a daemon's, of old"
    );
    let script = format!(r#"CLINCH_HELD="{}" "$CLINCH" run -n x true"#, held.trim());
    assert_eq!(world.code(["run", "x", "-c", &script]), 75, "another has it");
    let mut command = world.clinch(["run", "x", "true"]);
    assert_eq!(command.env("CLINCH_HELD", "%ff,, garbage").status().unwrap().code(), Some(0));
}

/// In a chain of processes that hand their environment on, each of which takes a lock, no program can be started any more.
#[test]
fn what_outer_jobs_hold_does_not_fill_the_environment() {
    let world = World::new();
    let one = stdout(&world, &["run", "x", "printenv", "CLINCH_HELD"]);
    let many = vec![one.trim(); 131_000 / one.len()].join(" ");
    let mut command = world.clinch(["run", "last", "printenv", "CLINCH_HELD"]);
    let output = command.env("CLINCH_HELD", many).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let held = String::from_utf8(output.stdout).unwrap();
    assert!(held.len() < 16_000, "{}", held.len());
    assert!(held.split(' ').next_back().unwrap().starts_with("last,"));
}

/// A run inside a job that lets nobody in any more waits for that, whatever it was told of waiting.
#[test]
fn a_job_that_is_about_to_end_is_not_waited_for_too_long() {
    let world = World::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let guard = runtime.block_on(async {
        let locks = clinch::connect(&world.url()).await.unwrap();
        locks.mutex("x").unwrap().lock().await.unwrap()
    });
    // One that can let nobody in is not waited for at all.
    for (limit, door) in [(&["-n"][..], "nowhere"), (&["-w", "300ms"], "nowhere"), (&[], "")] {
        let mut command = world.clinch(["run"].iter().chain(limit).chain(&["x", "true"]).copied());
        command.env("CLINCH_HELD", format!("x,{},{door}", guard.claim_id()));
        let mut inner = Running(command.spawn().unwrap());
        assert_eq!(inner.code(), 75, "{limit:?}");
    }
}

/// A run inside a job waits for ever for the job's wrapper, which is stopped, or enters a lock that nobody renews.
#[test]
fn a_stopped_wrapper_lets_nobody_in() {
    let world = World::new();
    let script =
        r#"kill -STOP $PPID; "$CLINCH" run -w 300ms x touch entered; code=$?; kill -CONT $PPID; exit $code"#;
    assert_eq!(world.code(["run", "x", "-c", script]), 75);
    assert!(!world.path("entered").exists());
}

/// As above, without a word.
#[test]
fn a_wait_for_a_stopped_wrapper_is_told() {
    for option in ["", "-v"] {
        let world = World::new();
        let script = format!(
            r#"kill -STOP $PPID; "$CLINCH" run {option} x touch entered 2> said & echo $! > inner.pid; wait $!"#
        );
        let mut run = world.start(["run", "x", "sh", "-c", &script]);
        eventually("it is told", || world.read("said").contains("waiting for the job around this one"));
        assert_eq!(world.read("said").contains("held by"), option == "-v", "{}", world.read("said"));
        assert!(!world.path("entered").exists());
        run.signal(rustix::process::Signal::CONT);
        assert_eq!(run.code(), 0);
        assert!(world.path("entered").exists());
        assert!(!world.read("said").contains("CLINCH_HELD"), "{}", world.read("said"));
    }
    // On a terminal: to who types it in a shell inside. A shell around would take the terminal back.
    let world = World::new();
    let mut screen = Screen::start(&world, 20, 120);
    screen.type_in("sh -c '\"$CLINCH\" run x bash --norc --noprofile --noediting -i; true'\n");
    eventually("it runs", || world.held("x"));
    screen.type_in("echo $PPID > outer.pid; kill -STOP $PPID; \"$CLINCH\" run x touch entered\n");
    let outer = world.pid("outer.pid");
    screen.shows("waiting for \"x\": held by ");
    kill(outer, rustix::process::Signal::CONT);
    eventually("it is entered", || world.path("entered").exists());
}

/// Anybody on the host keeps a lock by its door.
#[test]
fn only_what_a_job_has_started_is_let_in() {
    let world = World::new();
    let mut run =
        world.start(["run", "x", "-c", "echo $CLINCH_HELD > held; while [ ! -e stop ]; do sleep 0.02; done"]);
    eventually("the job runs", || world.read("held").ends_with('\n'));
    let held = world.read("held");
    let door = held.trim().rsplit(',').next().unwrap();
    let door = std::os::unix::net::SocketAddr::from_abstract_name(door).unwrap();
    let mut stream = std::os::unix::net::UnixStream::connect_addr(&door).unwrap();
    let mut told = [0];
    stream.read_exact(&mut told).unwrap();
    assert_eq!(told, *b"0", "it is told so");
    world.write("stop", "");
    assert_eq!(run.code(), 0);
}

/// A run inside a job gives up at the first question that its store does not answer, though it was given time.
#[test]
fn a_run_inside_a_job_waits_for_its_store() {
    let redis = clinch_testkit::Redis::start();
    let (world, proxy) = (World::on(redis.url()), clinch_testkit::Proxy::start(redis.addr()));
    // So that there is time to see it ask.
    proxy.delay(std::time::Duration::from_millis(200));
    let inner = format!(
        r#"echo $$ > inner.pid; exec "$CLINCH" -u redis://{} run -w 25s x -c 'exit 9'"#,
        proxy.addr()
    );
    let mut run = world.start(["run", "x", "-c", &inner]);
    let name = format!("/proc/{}/comm", world.pid("inner.pid"));
    let is = |what: &str| std::fs::read_to_string(&name).is_ok_and(|name| name.trim() == what);
    eventually("it asks", || is("clinch-enters"));
    proxy.refuse(true);
    proxy.cut_all();
    eventually("it was not answered", || !is("clinch-enters"));
    proxy.refuse(false);
    assert_eq!(run.code(), 9);
}

/// A run whose environment was cleared, or an `acquire`, waits for ever for the job that waits for it, without a word; or for what it has inherited from one.
#[test]
fn a_wait_for_the_job_around_is_told() {
    let [run, acquire] = [
        r#"env -i CLINCH_URL="$CLINCH_URL" "$CLINCH" run -w 60 x true"#,
        r#""$CLINCH" acquire --for $$ -w 60 x"#,
    ];
    for (options, inner, end) in [
        ("-x", run, "wait"),
        ("-s", &run.replace(" x ", " -x x "), "wait"),
        ("-F", run, "wait"),
        ("-F", run, "exit"),
        ("-x", acquire, "wait"),
        ("-F", acquire, "wait"),
    ] {
        let world = World::new();
        let script = format!("(exec {inner}) 2> said > answer & echo $! > inner.pid; {end}; :");
        let _run = world.start(["run", options, "x", "sh", "-c", &script]);
        eventually("it is told", || world.read("said").contains("held for the job around"));
        assert!(world.read("said").contains("CLINCH_HELD"), "{options} {inner}");
    }
}

/// It is told of a job around it, where there is none, and to have `sudo` keep what nobody has set.
#[test]
fn a_wait_for_what_the_same_shell_has_acquired_is_told() {
    let world = World::new();
    // The second has become the shell for which the lock is held, as the last command of `bash -c` does without a word.
    for (wait, lock) in [
        (r#""$CLINCH" run -w 60 y true 2> said & wait"#, "y"),
        (r#"exec "$CLINCH" run -w 60 z true 2> said"#, "z"),
    ] {
        let _ = std::fs::remove_file(world.path("said"));
        let script = format!(r#"eval "$("$CLINCH" acquire {lock} --for $$)"; {wait}"#);
        // Of another lock's job, for what that tells.
        let mut run = world.start(["run", "x", "bash", "-c", &script]);
        eventually("it is told", || world.read("said").contains("held by `clinch acquire` for process"));
        let said = world.read("said");
        assert!(!said.contains("CLINCH_HELD") && !said.contains("without end"), "{said}");
        run.signal(rustix::process::Signal::TERM);
        run.wait();
    }
}

/// It is told to release what a program holds by the library, which would free that under it.
#[test]
fn a_wait_for_what_a_program_holds_that_has_started_it_is_told() {
    let world = World::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let locks = clinch::connect(&world.url()).await.unwrap();
        let guard = locks.mutex("x").unwrap().lock().await.unwrap();
        let mut eviction = None;
        // What is taken away has an end, too.
        for is_evicted in [false, true] {
            if is_evicted {
                eviction = Some(world.start(["break", "--yes", "x"]));
                let is_ending = |claim: &serde_json::Value| claim["expires_in_ms"].is_u64();
                eventually("it is taken away", || world.claims("x", "held").iter().any(is_ending));
            }
            // The store is asked in this thread, which need not hear it.
            let output = world.output(["run", "-w", "3", "x", "true"]);
            let said = String::from_utf8(output.stderr).unwrap();
            assert!(said.contains(&format!("held by process {}", std::process::id())), "{said}");
            assert!(!said.contains("clinch release") && !said.contains("clinch acquire"), "{said}");
        }
        guard.release().await.unwrap();
        assert_eq!(eviction.unwrap().code(), 0);
    });
}

/// It is told of a wait for another.
#[test]
fn a_wait_for_another_job_is_no_wait_for_the_job_around() {
    let world = World::new();
    let mut holder =
        world.start(["run", "x", "-c", "echo $$ > job.pid; while [ ! -e stop ]; do sleep 0.02; done"]);
    world.pid("job.pid");
    let inner = r#"env -i CLINCH_URL="$CLINCH_URL" "$CLINCH" run -v -w 3 x true 2> said"#;
    assert_eq!(world.code(["run", "y", "-c", inner]), 75);
    assert!(
        world.read("said").contains("held by") && !world.read("said").contains("around"),
        "{}",
        world.read("said")
    );
    world.write("stop", "");
    assert_eq!(holder.code(), 0);
}

/// What `unshare` needs to make a namespace.
fn map() -> &'static str {
    if rustix::process::geteuid().is_root() { "" } else { "--user --map-root-user" }
}

/// It waits for ever, or is told what is not so, as process ids are others there.
#[test]
fn a_run_in_another_pid_namespace_is_told_what_is_known() {
    let world = World::new();
    let inner =
        r#"unshare MAP --pid --fork --mount-proc "$CLINCH" run x true 2> said; echo $? > code; cat said >&2"#;
    assert_eq!(world.code(["run", "x", "-c", &inner.replace("MAP", map())]), 0);
    assert_eq!(world.read("code"), "75\n");
    assert!(world.read("said").contains("in another pid namespace"), "{}", world.read("said"));
}

/// A host that gets its name during a job is taken for another: the inner run waits for ever.
#[test]
fn a_run_enters_its_job_also_when_the_host_has_another_name() {
    let world = World::new();
    let inner = r#"unshare MAP --uts sh -c 'hostname another && exec "$CLINCH" run -w 20 x touch entered'"#;
    assert_eq!(world.code(["run", "x", "-c", &inner.replace("MAP", map())]), 0);
    assert!(world.path("entered").exists());
}
