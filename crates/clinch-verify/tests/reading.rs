//! Reading and recording: what is accepted, what is refused and with which words.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test may fail")]

use clinch_verify::{History, Kind, Mode, Recorder};
use std::io::Write;

const GOOD: &str =
    r#"{"k":"inv","id":1,"p":"c1","lock":"a","f":"acquire","mode":"x","claim":"9f","t":5,"ttl":100}"#;

#[track_caller]
fn refused(line: &str, with: &str) {
    let error = History::parse(&format!("{GOOD}\n{line}\n{GOOD}\n")).unwrap_err().to_string();
    assert!(error.starts_with("line 2"), "{error}");
    assert!(error.contains(with), "{error}");
    assert!(!error.contains("line 1"), "{error}");
}

#[test]
fn damaged_lines_are_refused_with_their_number() {
    refused("nonsense", "line 2, column");
    refused(r#"{"k":"inv","#, "EOF");
    refused(r#"{"k":"inv","t":1,"colour":"red"}"#, "unknown field `colour`");
    refused(r#"{"k":"ivn","t":1}"#, "unknown variant `ivn`");
    refused(r#"{"k":"note"}"#, "missing field `t`");
    refused(r#"{"k":"note","t":-1}"#, "invalid value");
    refused(r#"{"k":"note","t":1} {}"#, "trailing characters");
}

#[test]
fn incomplete_events_are_refused() {
    refused(r#"{"k":"ok","id":1,"t":1}"#, "needs `f`");
    refused(r#"{"k":"ok","f":"renew","t":1}"#, "needs `id`");
    refused(r#"{"k":"ok","id":1,"f":"renew","t":1}"#, "needs `p`");
    refused(r#"{"k":"lost","p":"c1","claim":"9f","t":1}"#, "needs `lock`");
    refused(r#"{"k":"lost","p":"c1","lock":"a","t":1}"#, "needs `claim`");
    refused(r#"{"k":"crash","t":1}"#, "needs `p`");
    refused(r#"{"k":"store","f":"write","lock":"a","token":1,"t":1}"#, "`acc`");
    refused(r#"{"k":"store","f":"renew","t":1}"#, "\"write\"");
    refused(&GOOD.replace(r#""mode":"x","#, ""), "needs `mode`");
    refused(&GOOD.replace("acquire", "downgrade"), "needs `mode`: \"s\"");
    refused(r#"{"k":"crash","p":"c1","t":12,"from":13}"#, "not be later");
    refused(&GOOD.replace(r#""mode":"x""#, r#""mode":"p""#), "needs `of`");
    refused(&GOOD.replace(r#""mode":"x""#, r#""mode":"p","n":0,"of":3"#), "at least 1");
    refused(&GOOD.replace(r#""mode":"x""#, r#""mode":"x","of":3"#), "belong to mode");
}

#[test]
fn a_line_cut_off_at_the_end_is_noted_at_every_length() {
    for length in 1..GOOD.len() {
        let history = History::parse(&format!("{GOOD}\n{}", &GOOD[..length])).unwrap();
        assert_eq!(history.events().len(), 1);
        assert!(history.notes()[0].starts_with("an event of line 2 is cut off"), "{:?}", history.notes());
    }
    let whole = History::parse(&format!("{GOOD}\n{GOOD}")).unwrap();
    assert_eq!((whole.events().len(), whole.notes().len()), (2, 0));
}

#[test]
fn a_wrong_last_line_is_not_taken_for_a_cut_off_one() {
    for wrong in ["nonsense", r#"{"k":"note"}"#, r#"{"colour":"#] {
        History::parse(&format!("{GOOD}\n{wrong}")).unwrap_err();
    }
}

#[test]
fn blank_lines_are_passed_over() {
    assert_eq!(History::parse(&format!("\n{GOOD}\n \n")).unwrap().events().len(), 1);
}

#[test]
fn a_line_is_written_as_it_was_read() {
    let lines = [
        GOOD,
        r#"{"k":"ok","id":1,"p":"c1","lock":"a","f":"acquire","mode":"p","n":2,"of":5,"claim":"9f","token":41,"t":9,"te":3,"ttl":100,"dl":90}"#,
        r#"{"k":"info","id":2,"p":"c1","lock":"a","f":"release","claim":"9f","t":10}"#,
        r#"{"k":"lost","p":"c1","lock":"a","claim":"9f","t":11}"#,
        r#"{"k":"crash","p":"c1","t":12,"from":10}"#,
        r#"{"k":"inv","id":3,"p":"c1","lock":"a","f":"downgrade","mode":"s","claim":"9f","t":12}"#,
        r#"{"k":"inv","id":4,"p":"c1","lock":"a","f":"release","claim":"9f","t":12,"linger":500}"#,
        r#"{"k":"store","lock":"a","f":"write","claim":"9f","token":41,"t":13,"acc":false}"#,
        r#"{"k":"note","t":14,"text":"partition"}"#,
    ];
    let text = lines.join("\n") + "\n";
    let mut written = Vec::new();
    History::parse(&text).unwrap().write(&mut written).unwrap();
    assert_eq!(String::from_utf8(written).unwrap(), text);
}

/// A file for one test, removed afterwards.
struct Scratch(std::path::PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("clinch-verify-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn recorders_share_a_file_without_mixing_lines() {
    let scratch = Scratch::new("shared");
    std::thread::scope(|scope| {
        for thread in 0..4 {
            // Two recorders of their own stand for processes, two threads share each.
            let recorder = Recorder::file(&scratch.0).unwrap();
            for half in 0..2 {
                let recorder = recorder.clone();
                scope.spawn(move || {
                    let process = format!("c{thread}-{half}");
                    for time in 0..200 {
                        recorder
                            .claim(&process, "a", "9f", Mode::Shared)
                            .acquire(time)
                            .granted(time, None, None);
                    }
                    recorder.written().unwrap();
                });
            }
        }
    });
    let history = History::read(std::fs::File::open(&scratch.0).unwrap()).unwrap();
    assert_eq!(history.events().len(), 4 * 2 * 200 * 2);
}

/// One that is killed while it writes spoils what all others record.
#[test]
fn others_go_on_behind_an_event_that_was_cut_off() {
    let scratch = Scratch::new("torn");
    let other = Recorder::file(&scratch.0).unwrap();
    for length in 1..=GOOD.len() {
        let mut file = std::fs::File::create(&scratch.0).unwrap();
        file.write_all(format!("{GOOD}\n{}", &GOOD[..length]).as_bytes()).unwrap();
        other.crash("c1", 6, 7);
        Recorder::file(&scratch.0).unwrap().note(r#"{"k":"inv""#, 8);
        let history = History::read(std::fs::File::open(&scratch.0).unwrap()).unwrap();
        let read = if length < GOOD.len() { (3, 1) } else { (4, 0) };
        assert_eq!((history.events().len(), history.notes().len()), read, "{length}");
    }
    for (damaged, at) in [(format!("nonsense{GOOD}"), 2), (format!(r#"{{"k":"inv"}}{GOOD}"#), 11)] {
        let error = History::parse(&damaged).unwrap_err().to_string();
        assert!(error.starts_with(&format!("line 1, column {at}: ")), "{error}");
    }
    // Who goes on without what it did not record seems to do what it did not.
    let crash = r#"{"k":"crash","p":"c1","t":12}"#;
    let twice = format!("{}{}{GOOD}\n{crash}\n", &GOOD[..20], &GOOD[..9]);
    let error = History::parse(&twice).unwrap_err().to_string();
    assert!(error.starts_with("line 1, column 29: EOF"), "{error}");
    let history = History::parse(&format!("{twice}{crash}")).unwrap();
    assert_eq!((history.events().len(), history.notes().len()), (3, 2));
}

#[test]
fn a_failed_write_is_reported_and_stays() {
    // A device that is always full.
    let recorder = Recorder::memory_and_file("/dev/full").unwrap();
    recorder.note("lost", 1);
    recorder.note("lost too", 2);
    assert!(recorder.written().unwrap_err().to_string().contains("incomplete"));
    assert_eq!(recorder.history().events().len(), 2);
}

#[test]
fn the_clock_error_is_recorded() {
    let recorder = Recorder::memory().clock_error(7);
    recorder.crash("c1", 90, 100);
    let history = recorder.history();
    let event = &history.events()[0];
    assert_eq!((event.kind, event.earliest(), event.latest()), (Kind::Crash, 83, 107));
}
