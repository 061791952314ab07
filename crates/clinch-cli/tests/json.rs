//! What is written as JSON: versions, words, errors, the schema, and the facts in it.

#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used, reason = "test code")]

mod common;

use std::process::Stdio;

use clinch_testkit::{Etcd, Redis};
use common::{Running, World, eventually, us};
use serde_json::Value;

fn parsed(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(bytes)))
}

/// Whether a value is as a schema says, as far as our schemas go: types, properties, references, constants.
fn check(value: &Value, schema: &Value, root: &Value, at: &str) {
    if let Some(path) = schema["$ref"].as_str() {
        return check(value, root.pointer(path.trim_start_matches('#')).unwrap(), root, at);
    }
    for all in ["anyOf", "oneOf"] {
        if let Some(any) = schema[all].as_array() {
            let fits = |one: &Value| std::panic::catch_unwind(|| check(value, one, root, at)).is_ok();
            assert!(any.iter().any(fits), "{at}: {value} fits none of {any:?}");
        }
    }
    if let Some(is) = schema.get("const") {
        assert_eq!(value, is, "{at}");
    }
    if let Some(words) = schema["enum"].as_array() {
        assert!(words.contains(value), "{at}: {value} is none of {words:?}");
    }
    let types: Vec<&str> = match &schema["type"] {
        Value::Array(types) => types.iter().filter_map(Value::as_str).collect(),
        one => one.as_str().into_iter().collect(),
    };
    let is = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    assert!(types.is_empty() || types.contains(&is), "{at}: {value} is no {types:?}");
    for name in schema["required"].as_array().into_iter().flatten() {
        assert!(value.get(name.as_str().unwrap()).is_some(), "{at}: no {name} in {value}");
    }
    for (name, of) in schema["properties"].as_object().into_iter().flatten() {
        if let Some(value) = value.get(name) {
            check(value, of, root, &format!("{at}.{name}"));
        }
    }
    for (at_item, item) in value.as_array().into_iter().flatten().enumerate() {
        check(item, &schema["items"], root, &format!("{at}[{at_item}]"));
    }
}

/// The names of all that a schema describes, and whether anything of it has no description.
fn described(schema: &Value, at: &str) {
    if let Some(properties) = schema["properties"].as_object() {
        for (name, of) in properties {
            // The kind of an event is described with the event.
            let is_tag = name == "event" && of.get("const").is_some();
            let says =
                of.get("description").is_some() || of.get("$ref").is_some() || of.get("anyOf").is_some();
            assert!(is_tag || says, "{at}.{name} is not described");
        }
    }
    match schema {
        Value::Object(fields) => fields.iter().for_each(|(name, of)| described(of, &format!("{at}/{name}"))),
        Value::Array(items) => items.iter().for_each(|of| described(of, at)),
        _ => {}
    }
}

fn schema(world: &World, of: &str) -> Value {
    let schema = parsed(&world.output(["schema", of]).stdout);
    described(&schema, of);
    schema
}

/// A document is not as its schema says, or a field of it is described nowhere.
#[test]
fn every_document_is_as_its_schema_says() {
    let world = World::new();
    let _holder = world.start(["run", "x", "sleep", "60"]);
    eventually("it is held", || world.held("x"));
    let _waiter = world.start(["run", "--permits", "2", "--of", "3", "y", "sleep", "60"]);
    eventually("it is held", || world.held("y"));
    let is = |of: &str, args: &[&str]| {
        let output = world.output(args.iter().copied());
        let (value, schema) = (parsed(&output.stdout), schema(&world, of));
        assert_eq!(value["v"], 1, "{of}");
        check(&value, &schema, &schema, of);
        value
    };
    is("ls", &["ls", "--json"]);
    is("show", &["show", "--json", "x"]);
    is("show", &["show", "--json", "nobody"]);
    let lease = is("acquire", &["acquire", "--json", "--for", &us(), "z"]);
    let claim = lease["claim"].as_str().unwrap();
    is("renew", &["renew", "--json", "z", claim]);
    is("release", &["release", "--json", "z", claim]);
    is("break", &["break", "--json", "--yes", "x"]);
    let wrong = std::panic::catch_unwind(|| {
        check(&serde_json::json!({"v": 2}), &schema(&world, "show"), &Value::Null, "")
    });
    assert!(wrong.is_err(), "this test sees nothing");
}

/// An event is not as the schema says, or its words are spelled in several ways.
#[test]
fn every_event_is_as_its_schema_says() {
    let world = World::new();
    let schema = schema(&world, "events");
    let mut holder = world.start(["run", "x", "-c", "while [ ! -e stop ]; do sleep 0.02; done"]);
    eventually("it is held", || world.held("x"));
    assert_eq!(world.code(["run", "--events", "events", "-n", "x", "true"]), 75);
    let mut waiter = world.start(["run", "--events", "events", "x", "-c", "kill -9 $$"]);
    eventually("it waits", || world.lines("events") > 1);
    world.write("stop", "");
    assert_eq!((holder.code(), waiter.code()), (0, 137));
    let inner = r#""$CLINCH" run --events events x true; trap "" TERM; sleep 60 & wait; wait"#;
    assert_eq!(world.code(["run", "--events", "events", "--max-hold", "1200ms", "x", "-c", inner]), 79);
    let mut broken = world.start(["run", "--events", "events", "x", "sleep", "60"]);
    eventually("it is held", || world.held("x"));
    assert_eq!(world.code(["break", "--yes", "x"]), 0);
    assert_eq!(broken.code(), 79);
    let events = world.events("events");
    for event in &events {
        assert_eq!(event["v"], 1);
        check(event, &schema, &schema, "event");
    }
    let of = |kind: &str| {
        events.iter().find(|event| event["event"] == kind).unwrap_or_else(|| panic!("no {kind}"))
    };
    for kind in ["waiting", "acquired", "reentered", "lost", "stopping", "exited", "released", "refused"] {
        of(kind);
    }
    let exited = of("exited");
    assert_eq!((&exited["code"], &exited["signal"]), (&Value::Null, &9.into()));
    assert!(exited["duration_ms"].is_u64());
    let long = events
        .iter()
        .filter(|event| event["event"] == "exited")
        .map(|event| event["duration_ms"].as_u64().unwrap());
    assert!(long.max().unwrap() >= 900, "the job ran for a second");
    assert!(of("stopping")["signal"] == "term" && of("lost")["kind"] == "deleted");
}

/// A program that asked for JSON gets words on stderr when something fails.
#[test]
fn failures_of_json_are_json() {
    let world = World::new();
    let _holder = world.start(["run", "x", "sleep", "60"]);
    eventually("it is held", || world.held("x"));
    let id = "0".repeat(31) + "1";
    let schema = schema(&world, "error");
    for (args, code) in [
        (&["acquire", "--json", "-n", "--for", &us(), "x"][..], 75),
        (&["acquire", "--json", "-n", "-E", "3", "--for", &us(), "x"], 3),
        (&["acquire", "--json", "-w", "soon", "x"], 64),
        (&["show", "--json"], 64),
        (&["show", "run", "--json", "--bogus"], 64),
        (&["ls", "--json", "-u", "redis://127.0.0.1:1"], 69),
        (&["renew", "--json", "y", &id], 79),
        (&["release", "--json", "y", "nonsense"], 64),
        (&["break", "--json", "y", "--yes"], 1),
    ] {
        let output = world.output(args.iter().copied());
        assert_eq!(output.status.code(), Some(code), "{args:?}");
        let failure = parsed(&output.stderr);
        check(&failure, &schema, &schema, "error");
        assert_eq!((&failure["v"], &failure["code"]), (&1.into(), &code.into()), "{args:?}");
        assert!(!failure["error"].as_str().unwrap().is_empty());
    }
    // A lock, or a value, may be called like a verb.
    for (args, said) in [
        (&["show", "acquire", "--bogus"][..], ""),
        (&["-u", "run", "acquire", "x", "--bogus"], "(exit 64)\n"),
        (&["acquire", "run", "--bogus"], "(exit 64)\n"),
    ] {
        assert_eq!(String::from_utf8(world.output(args.iter().copied()).stdout).unwrap(), said, "{args:?}");
    }
    // What stands in the command of a job is its own.
    let run = world.output(["run", "-n", "x", "true", "--json"]);
    assert!(String::from_utf8(run.stderr).unwrap().starts_with("clinch: lock"));
    let run = world.output(["-u", &world.url(), "run", "-Z", "x", "true", "--json"]);
    assert!(String::from_utf8(run.stderr).unwrap().starts_with("error:"));
}

/// A record names whoever started the program by `sudo`, or a process that has ended.
#[test]
fn records_say_who_really_holds() {
    let (redis, etcd) = (Redis::start(), Etcd::start());
    for world in [World::new(), World::on(redis.url()), World::on(etcd.url())] {
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", r#"lock=$("$CLINCH" acquire x --for $$) || exit; echo $$ > shell.pid; read -r _"#]);
        shell
            .current_dir(world.path("."))
            .env("CLINCH", env!("CARGO_BIN_EXE_clinch"))
            .env("CLINCH_URL", world.url());
        shell
            .env_remove("CLINCH_HELD")
            .env("USER", "mallory")
            .env("LOGNAME", "mallory")
            .stdin(Stdio::piped());
        let shell = Running(shell.spawn().unwrap());
        let pid = world.pid("shell.pid");
        let claim = &world.claims("x", "held")[0];
        assert_eq!(claim["pid"], pid, "{claim}");
        let id = std::process::Command::new("id").arg("-un").output().unwrap();
        assert_eq!(claim["user"], String::from_utf8(id.stdout).unwrap().trim());
        drop(shell);
    }
}

/// A job that was stopped for `--max-hold` is told of a store that does not answer.
#[test]
fn the_end_of_max_hold_is_called_that() {
    let world = World::new();
    let args = [
        "run",
        "--events",
        "events",
        "--max-hold",
        "1s",
        "x",
        "-c",
        r#"trap "" TERM; while :; do sleep 0.02; done"#,
    ];
    let output = world.output(args);
    assert_eq!(output.status.code(), Some(79));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("reaches its --max-hold: sending TERM"), "{said}");
    let args = ["run", "--events", "lost", "--on-lost", "ignore", "--max-hold", "300ms", "y", "sleep", "1"];
    let output = world.output(args);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("was lost: held too long"), "{said}");
    let mut lost = world.events("lost");
    lost.retain(|event| event["event"] == "lost");
    assert_eq!((lost.len(), &lost[0]["kind"]), (1, &"max_hold".into()), "one loss is told once: {lost:?}");
}
