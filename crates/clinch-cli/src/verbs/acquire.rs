//! `clinch acquire`: a lease that a shell script holds across commands.
//!
//! Where leases live in the store, this takes one and leaves it there. Where a lease ends with its process, it starts a
//! holder (`hold.rs`) that is bound to the calling shell, and waits for its report.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use clinch::{Env, Lane, Locks, Released, Renew};
use rustix::process::{Pid, Signal, getppid};

use super::hold::Report;
use crate::args::{Acquire, Share, Store};
use crate::connect::{CLOSE_FOR, Limits, close, connect_within};
use crate::exit::{CONFLICT, Failure, INTERNAL, Outcome, SIGNAL_BASE, UNWRITTEN};
use crate::job::kin::Stat;
use crate::job::signals::Signals;
use crate::job::sys;
use crate::output::{LeaseJson, answer, has_room, json, shell_word, show};
use crate::request::{Request, with_lease};

/// How long the answer may take to be read, and which part of the lease at most: who reads it later has little of that.
const READ_WITHIN: Duration = Duration::from_secs(5);
const READ_WITHIN_PART: u32 = 4;

pub(crate) async fn run(store: &Store, args: &Acquire) -> Outcome {
    let outcome = acquire(store, args).await;
    if let Err(failure) = &outcome
        && !args.json
        && failure.code != UNWRITTEN
        && has_room(rustix::stdio::stdout())
    {
        // For `eval "$(clinch acquire ...)"`, which would otherwise go on.
        let _ = show(&format!("(exit {})\n", failure.code));
    }
    outcome
}

async fn acquire(store: &Store, args: &Acquire) -> Outcome {
    if !sys::has_stdout() {
        return Err(Failure::new(UNWRITTEN, "stdout is closed: nobody would learn which claim has the lock"));
    }
    let env = Env::host(Lane::here()?);
    let limits = Limits::of(&args.patience, &env);
    let locks = with_lease(connect_within(store, &env, &limits).await?, &args.lease, "")?;
    let can = locks.capabilities();
    let lease = if can.detached && can.processes {
        take(&locks, args, &limits).await
    } else if can.crash_release && can.processes {
        // Wrong arguments are told here, where they can be explained.
        Request::new(&locks, &args.name, &args.share)?;
        start_holder(store, args)
    } else {
        let text =
            "on this store a lock ends with the process that took it; use `clinch run`, or another store";
        Err(Failure::usage(text))
    };
    let report = lease.map_err(|failure| match failure.code {
        CONFLICT => Failure { code: args.conflict_exit_code, ..failure },
        _ => failure,
    })?;
    let Report::Granted { claim, token } = report else { return Ok(INTERNAL) };
    let (name, ttl) = (args.name.clone(), locks.lease_ttl());
    let text = if args.json {
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        json(&LeaseJson { name, claim: claim.clone(), token, ttl_ms })?
    } else {
        format!("name={} claim={claim} token={token}\n", shell_word(&name))
    };
    let why = match hand_over(text, READ_WITHIN.min(ttl / READ_WITHIN_PART)).await {
        Ok(()) => return Ok(0),
        Err(why) => why,
    };
    let freed = give_back(&locks, args, &claim).await;
    Err(match why {
        Unread::Failed(why) => Failure::new(UNWRITTEN, format!("{}; {freed}", why.message)),
        Unread::Signalled(signal) => ended_by(signal),
    })
}

/// Why nobody knows of a lease.
enum Unread {
    Failed(Failure),
    Signalled(Signal),
}

/// Writes the answer. Where nobody reads, this thread may not wait: only it can give the lock back.
async fn hand_over(text: String, within: Duration) -> Result<(), Unread> {
    let failed =
        |error: &dyn std::fmt::Display| Unread::Failed(Failure::system("cannot write the answer", error));
    let mut signals = Signals::ending().map_err(|error| failed(&error))?;
    let written = tokio::task::spawn_blocking(move || answer(&text));
    tokio::select! {
        biased;
        written = written => written.map_err(|error| failed(&error))?.map_err(Unread::Failed),
        signal = signals.next() => Err(Unread::Signalled(signal)),
        () = tokio::time::sleep(within) => Err(failed(&"nobody reads it")),
    }
}

/// Releases what nobody knows of; says whether that was done.
async fn give_back(locks: &Locks, args: &Acquire, claim: &str) -> String {
    let name = &args.name;
    let released = async { locks.release_detached(name, claim.parse()?).await };
    match tokio::time::timeout(CLOSE_FOR, released).await {
        Ok(Ok(Released::Released | Released::AlreadyLost(_))) => format!("lock \"{name}\" was released"),
        _ => format!(
            "lock \"{name}\" stays taken until its lease ends, or until `clinch release {} {claim}`",
            shell_word(name)
        ),
    }
}

/// Ends by a signal, where the kernel lets us.
fn ended_by(signal: Signal) -> Failure {
    sys::die_by(signal);
    Failure::new(SIGNAL_BASE.saturating_add(u8::try_from(signal.as_raw()).unwrap_or(0)), "")
}

/// Takes a lease and leaves it in the store.
async fn take(locks: &Locks, args: &Acquire, limits: &Limits) -> Result<Report, Failure> {
    let locks = locks.clone().renew(Renew::Never);
    let request = Request::new(&locks, &args.name, &args.share)?;
    let mut signals = Signals::ending().map_err(|error| Failure::system("cannot catch signals", error))?;
    let left = limits.keep(async { request.acquire(limits).await?.detach().await });
    let taken = tokio::select! {
        biased;
        lease = left => Ok(lease),
        signal = signals.next() => Err(signal),
    };
    let failed = match taken {
        Ok(Ok(lease)) => {
            return Ok(Report::Granted { claim: lease.claim.to_string(), token: lease.token.get() });
        }
        Ok(Err(error)) => Ok(error),
        Err(signal) => Err(signal),
    };
    // A place in the queue, a claim in doubt, or a lease that could not be left is withdrawn first: nobody else would do it.
    let _ = close(&locks).await;
    Err(match failed {
        Ok(error) => error.into(),
        Err(signal) => ended_by(signal),
    })
}

/// Starts a process that holds the lock and waits until it does, or cannot. If we are killed meanwhile, it gives up.
fn start_holder(store: &Store, args: &Acquire) -> Result<Report, Failure> {
    let failed = |error| Failure::system("cannot start the holder of the lock", error);
    let for_pid = args.for_pid.or_else(caller).ok_or_else(|| {
        Failure::usage(
            "the calling process cannot be told; name one with --for-pid, whose end frees the lock",
        )
    })?;
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    // By the environment, since everybody may read the arguments.
    command.env("CLINCH_URL", &store.url);
    command.args(["hold", "--for-pid", &for_pid.to_string(), "--asker", &std::process::id().to_string()]);
    pass_on(&mut command, args);
    command.arg("--").arg(&args.name);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    sys::inherit_nothing(&mut command);
    let mut holder = command.spawn().map_err(failed)?;
    let mut line = String::new();
    if let Some(report) = holder.stdout.take() {
        BufReader::new(report).read_line(&mut line).map_err(failed)?;
    }
    match serde_json::from_str(&line) {
        Ok(Report::Failed { code, message }) => Err(Failure::new(code, message)),
        Ok(granted) => Ok(granted),
        Err(_) => Err(Failure::new(INTERNAL, "the holder of the lock ended without a word")),
    }
}

/// The options that the holder needs.
fn pass_on(command: &mut Command, args: &Acquire) {
    let nanos = |time: Duration| format!("{}ns", time.as_nanos());
    if let Some(limit) = args.patience.limit() {
        command.args(["--wait", &nanos(limit)]);
    }
    if let Some(ttl) = args.lease.ttl {
        command.args(["--ttl", &nanos(ttl)]);
    }
    if let Some(label) = &args.lease.label {
        command.arg(format!("--label={label}"));
    }
    match args.share {
        Share { permits: Some(permits), of: Some(capacity), .. } => {
            command.args(["--permits", &permits.to_string(), "--of", &capacity.to_string()]);
        }
        Share { shared: true, .. } => {
            command.arg("--shared");
        }
        _ => {}
    }
}

/// The shell that called us: our parent, or, when that is but a subshell of it, as in `$(... | ...)`, or a command that has nothing to
/// do but to run us, as in `$(timeout 5 clinch ...)`, its parent.
fn caller() -> Option<i32> {
    let words = |pid| fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let ours = [&b"\0"[..], &words(i32::try_from(std::process::id()).ok()?)].concat();
    let mut caller = getppid()?.as_raw_nonzero().get();
    let of = |pid| Stat::of(Pid::from_raw(pid)?);
    let mut stat = of(caller)?;
    while let Some(parent) = of(stat.parent) {
        // A subshell is forked without an exec, so its stack starts where its parent's does; others' are at random places.
        let is_subshell = parent.stack != 0 && parent.stack == stat.stack;
        let runs_us = ours.len() > 1 && words(caller).ends_with(&ours);
        if !is_subshell && !runs_us {
            break;
        }
        (caller, stat) = (stat.parent, parent);
    }
    Some(caller)
}
