//! `clinch acquire`: a lease that a shell script holds across commands.
//!
//! Where leases live in the store, this takes one and leaves it there. Where a lease ends with its process, it starts a
//! holder (`hold.rs`) that is bound to the process that --for names, waits for its report, and tells it when that was passed on.

use std::future::Future;
use std::io::{self, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use clinch::backends::file;
use clinch::{Env, ErrorKind, Instant, Lane, Locks, Released, Renew};
use rustix::process::{Signal, getppid};
use tokio::net::unix::pipe::Receiver;

use super::hold::{KEEP, Report, end_of, read_line};
use crate::args::{Acquire, Share, Store};
use crate::around::{comes_to_be_kept, jobs_around, waits_for_itself};
use crate::connect::{CLOSE_FOR, Limits, TRY_AGAIN, close, connect_within, is_transient};
use crate::documents::{LeaseJson, document, whole_ms};
use crate::exit::{CONFLICT, Failure, INTERNAL, LOST, Outcome, SIGNAL_BASE, UNWRITTEN};
use crate::job::signals::Signals;
use crate::job::spawn::forget_jobs;
use crate::job::sys;
use crate::output::{AT_ONCE, PATIENTLY, answer, has_room, shell_word, show};
use crate::request::{Request, why_taken, with_lease};
use crate::waiting::Waiting;

/// How long the answer may take to be read, and which part of the lease at most: who reads it later has little of that.
const READ_WITHIN: Duration = Duration::from_secs(5);
const READ_WITHIN_PART: u32 = 4;

/// Which part of a lease may have passed when it is told of.
const LATE_PART: u32 = 2;

/// What was taken.
struct Lease {
    claim: String,
    token: u64,
    /// When it is too late to tell of it.
    late: Instant,
}

/// How soon is looked again whether there is room for it.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

pub(crate) async fn run(store: &Store, args: &Acquire) -> Outcome {
    let mut signals = Signals::ending().map_err(|error| Failure::system("cannot catch signals", error))?;
    match acquire(store, args, &mut signals).await {
        Ok(()) => Ok(0),
        Err(Failed::Because(failure)) => Err(failure),
        Err(Failed::Signalled(signal)) => {
            let code = SIGNAL_BASE.saturating_add(u8::try_from(signal.as_raw()).unwrap_or(0));
            if !args.json {
                fail_eval(code);
            }
            sys::die_by(signal);
            // The kernel does not let process 1.
            Ok(code)
        }
    }
}

/// Why nothing is held.
enum Failed {
    Because(Failure),
    Signalled(Signal),
}

impl<E: Into<Failure>> From<E> for Failed {
    fn from(failure: E) -> Failed {
        Failed::Because(failure.into())
    }
}

/// For `eval "$(clinch acquire ...)"`, which would otherwise go on.
pub(crate) fn fail_eval(code: u8) {
    if sys::has_stdout() && has_room(rustix::stdio::stdout(), PATIENTLY) {
        let _ = show(&format!("(exit {code})\n"));
    }
}

async fn acquire(store: &Store, args: &Acquire, signals: &mut Signals) -> Result<(), Failed> {
    if !sys::has_stdout() {
        let text = "stdout is closed: nobody would learn which claim has the lock";
        return Err(Failure::new(UNWRITTEN, text).into());
    }
    check_process(store, args)?;
    let env = Env::host(Lane::here()?);
    let limits = Limits::of(&args.patience, &env);
    let waits = !args.patience.no_wait;
    let waiting = Waiting::new(&args.name, &limits, waits && !args.json).warning(waits);
    let connecting = waiting.beside(None, connect_within(store, &env, &limits));
    let connected = unless_ended(signals, connecting).await?;
    let locks = with_lease(connected?, &args.lease, "")?;
    let can = locks.capabilities();
    let mut holder = None;
    let lease = if can.detached {
        take(&locks, args, &env, &limits, &waiting, signals).await
    } else if can.crash_release {
        // Wrong arguments are told here, where they can be explained.
        Request::new(&locks, &args.name, &args.share)?;
        let mut started = Holder::start(store, args, args.for_pid.ok_or_else(unnamed)?)?;
        let report = waiting.beside(Some(&locks), started.report(locks.lease_ttl(), &waiting));
        let (outer, _) = jobs_around(&args.name);
        let report = tokio::select! {
            biased;
            report = unless_ended(signals, report) => report,
            () = comes_to_be_kept(&locks, &args.name, &outer) => Err(waits_for_itself(&args.name).into()),
        };
        holder = Some(started);
        report.and_then(|report| Ok(report?))
    } else {
        let text =
            "on this store a lock ends with the process that took it; use `clinch run`, or another store";
        Err(Failure::usage(text).into())
    };
    drop(waiting);
    let Lease { claim, token, late } = match lease {
        Err(Failed::Because(failure)) if failure.code == CONFLICT => {
            let failure = why_taken(&locks, &limits, &args.name, failure).await;
            return Err(Failure { code: args.conflict_exit_code, ..failure }.into());
        }
        lease => lease?,
    };
    let (name, ttl) = (&args.name, locks.lease_ttl());
    let for_pid = holder.as_ref().map(|holder| holder.for_pid);
    let text = if args.json {
        document(LeaseJson {
            name: name.clone(),
            claim: claim.clone(),
            token,
            ttl_ms: whole_ms(ttl),
            for_pid,
        })?
    } else {
        // Empty where there is none: an earlier answer may have set it.
        let for_pid = for_pid.map(|pid| pid.to_string()).unwrap_or_default();
        format!("name={} claim={claim} token={token} for_pid={for_pid}\n", shell_word(name))
    };
    let is_held = is_held(&locks, name, holder.as_ref().map(|_| claim.as_str()), late, &env);
    let within = READ_WITHIN.min(ttl / READ_WITHIN_PART).min(late.since(env.clock().now()));
    let failed = match hand_over(&text, within, is_held, signals).await {
        Ok(()) => {
            if let Some(holder) = holder {
                holder.keep();
            }
            // Servers that were not needed may have yet to be told something. The caller waits for us, and its lease runs.
            let _ = tokio::time::timeout(within, close(&locks)).await;
            return Ok(());
        }
        Err(failed) => failed,
    };
    let freed = give_back(&locks, args, &claim).await;
    Err(match failed {
        Failed::Because(why) => Failure::new(why.code, format!("{}; {freed}", why.message)).into(),
        signalled => signalled,
    })
}

/// Before anything is opened or made: where a lock is bound to a process, it has to be said to which, since nobody can tell who will work under it.
fn check_process(store: &Store, args: &Acquire) -> Result<(), Failure> {
    match args.for_pid {
        Some(pid) if pid.unsigned_abs() == std::process::id() => Err(Failure::usage(format!(
            "--for names process {pid}, which is this command and ends next: within `$( )`, in a pipeline and before `&` bash's $BASHPID is not the shell; \
             say `me=$BASHPID` before that, and then `--for $me`"
        ))),
        Some(pid) => end_of(pid).map(drop),
        None if file::dir_of(&store.url).is_some() => Err(unnamed()),
        None => Ok(()),
    }
}

fn unnamed() -> Failure {
    Failure::usage(
        "on file:// a lock is bound to a process, whose end frees it: say which, with `--for $$` for this shell (for a subshell or a background part of bash \
         `me=$BASHPID` in it, and then `--for $me`; in fish `--for $fish_pid`, with --json)",
    )
}

/// Does something unless a signal asks to end first.
async fn unless_ended<T>(signals: &mut Signals, step: impl Future<Output = T>) -> Result<T, Failed> {
    tokio::select! {
        biased;
        done = step => Ok(done),
        caught = signals.next() => Err(Failed::Signalled(caught.signal)),
    }
}

/// Writes the answer once somebody has room for it, if it is still true then: we may have been stopped. Whether it was written is then
/// known, whatever signal comes meanwhile: what has been read may not be given back.
async fn hand_over(
    text: &str,
    within: Duration,
    is_held: impl Future<Output = Result<bool, Failure>>,
    signals: &mut Signals,
) -> Result<(), Failed> {
    let room = async {
        while !has_room(rustix::stdio::stdout(), AT_ONCE) {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    };
    if unless_ended(signals, tokio::time::timeout(within, room)).await?.is_err() {
        return Err(Failure::new(UNWRITTEN, "cannot write the answer: nobody reads it").into());
    }
    if !unless_ended(signals, is_held).await?? {
        let text = "the lock was lost, or the most of its lease was over, before it could be told of";
        return Err(Failure::new(LOST, text).into());
    }
    Ok(answer(text)?)
}

/// Whether a lease may be told of. One that a holder keeps is renewed, which says more than that the holder lives: an operator may have
/// taken it away meanwhile.
async fn is_held(
    locks: &Locks,
    name: &str,
    kept: Option<&str>,
    late: Instant,
    env: &Env,
) -> Result<bool, Failure> {
    if let Some(claim) = kept {
        let claim = claim.parse()?;
        loop {
            match locks.renew_detached(name, claim, locks.lease_ttl()).await {
                Ok(()) => break,
                Err(error) if error.kind() == ErrorKind::Lost => return Ok(false),
                Err(error) if is_transient(&error) && env.clock().now() < late => {}
                Err(error) => return Err(error.into()),
            }
            tokio::time::sleep(TRY_AGAIN).await;
        }
    }
    Ok(env.clock().now() < late)
}

/// Releases what nobody knows of; says whether that was done.
async fn give_back(locks: &Locks, args: &Acquire, claim: &str) -> String {
    let name = &args.name;
    let released = async { locks.release_detached(name, claim.parse()?).await };
    match tokio::time::timeout(CLOSE_FOR, released).await {
        Ok(Ok(Released::Released | Released::AlreadyLost(_))) => format!("lock \"{name}\" was released"),
        _ => format!(
            "lock \"{name}\" stays taken until its lease ends, or until `clinch release -- {} {claim}`",
            shell_word(name)
        ),
    }
}

/// Takes a lease and leaves it in the store.
async fn take(
    locks: &Locks,
    args: &Acquire,
    env: &Env,
    limits: &Limits,
    waiting: &Waiting<'_>,
    signals: &mut Signals,
) -> Result<Lease, Failed> {
    let mut locks = locks.clone().renew(Renew::Never);
    // Not us, who end next.
    let parent = || getppid().map(|parent| parent.as_raw_nonzero().get());
    if let Some(owner) = args.for_pid.or_else(parent) {
        locks = locks.on_behalf_of(owner.unsigned_abs());
    }
    let request = Request::new(&locks, &args.name, &args.share)?;
    let left = limits.keep(async {
        let granted = request.acquire(limits, |claim| waiting.waits_with(claim));
        let guard = waiting.beside(Some(&locks), granted).await?;
        let late = env.clock().now() + guard.remaining().unwrap_or(locks.lease_ttl());
        let left = guard.detach().await?;
        Ok(Lease { claim: left.claim.to_string(), token: left.token.get(), late })
    });
    let failed = match unless_ended(signals, left).await {
        Ok(Ok(lease)) => return Ok(lease),
        Ok(Err(error)) => error.into(),
        Err(signalled) => signalled,
    };
    // A place in the queue, a claim in doubt, or a lease that could not be left is withdrawn first: nobody else would do it.
    let _ = close(&locks).await;
    Err(failed)
}

/// The process that holds the lock where none can be left in the store. It lets go unless it hears that the answer was written.
struct Holder {
    process: Child,
    report: Receiver,
    /// Whose end frees the lock.
    for_pid: i32,
}

impl Holder {
    fn start(store: &Store, args: &Acquire, for_pid: i32) -> Result<Holder, Failure> {
        let failed = |error| Failure::system("cannot start the holder of the lock", error);
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        // It would be ended with the job around us.
        forget_jobs(&mut command);
        // By the environment, since everybody may read the arguments.
        command.env("CLINCH_URL", &store.url);
        command.args(["hold", "--for-pid", &for_pid.to_string(), "--asker", &std::process::id().to_string()]);
        pass_on(&mut command, args);
        command.arg("--").arg(&args.name);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        sys::bequeath_no_descriptors();
        let mut process = command.spawn().map_err(failed)?;
        let report = process.stdout.take().ok_or_else(|| failed(io::ErrorKind::BrokenPipe.into()))?;
        let report = Receiver::from_owned_fd(report.into()).map_err(failed)?;
        Ok(Holder { process, report, for_pid })
    }

    /// Waits until it has the lock, or cannot have it.
    async fn report(&mut self, ttl: Duration, waiting: &Waiting<'_>) -> Result<Lease, Failure> {
        loop {
            let mut text = Vec::new();
            read_line(&self.report, &mut text)
                .await
                .map_err(|error| Failure::system("cannot hear the holder of the lock", error))?;
            let lines = text.split_inclusive(|byte| *byte == b'\n').map(serde_json::from_slice);
            // With the end of the pipe there is none.
            for report in lines.chain(text.is_empty().then(|| serde_json::from_slice(&[]))) {
                match report {
                    Ok(Report::Waiting { claim }) => waiting.waits_with(claim.parse()?),
                    Ok(Report::Granted { claim, token, since }) => {
                        let late = Instant::from_nanos(since) + ttl / LATE_PART;
                        return Ok(Lease { claim, token, late });
                    }
                    Ok(Report::Failed { code, message }) => {
                        let is_taken = code == CONFLICT;
                        return Err(Failure { is_taken, ..Failure::new(code, message) });
                    }
                    Err(_) => {
                        return Err(Failure::new(INTERNAL, "the holder of the lock ended without a word"));
                    }
                }
            }
        }
    }

    /// Lets it hold the lock when we have ended.
    fn keep(mut self) {
        if let Some(mut stdin) = self.process.stdin.take() {
            // If it has ended, its lock is lost, which is seen when it is renewed or released.
            let _ = stdin.write_all(KEEP);
        }
    }
}

/// The options that the holder needs.
fn pass_on(command: &mut Command, args: &Acquire) {
    // What is longer than can be told is for ever.
    let nanos = |time: Duration| format!("{}ns", time.as_nanos().min(u64::MAX.into()));
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
