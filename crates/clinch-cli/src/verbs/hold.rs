//! The holder: a small process that keeps a lock for a shell script, on stores where a lease ends with its process.
//!
//! It lives until the process that it is bound to has ended, or the lease is over: run out without `clinch renew`, released, or
//! taken away. It is deaf to signals; only KILL ends it. What the claim's own record says of that decides, so that what other processes do to it counts.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::time::Duration;

use clinch::backend::NOTICE;
use clinch::{ClaimId, Env, Guard, Instant, Lane, Locks};
use rustix::io::Errno;
use rustix::process::{Pid, getppid, setsid};
use serde::{Deserialize, Serialize};
use tokio::net::unix::pipe::Receiver;

use crate::args::{Hold, Store};
use crate::connect::{Limits, TRY_AGAIN, close, connect_within, is_transient};
use crate::exit::{Failure, Outcome, USAGE};
use crate::job::kin::HOLDER;
use crate::job::sys::{self, ProcessEnd};
use crate::output::{AT_ONCE, has_room};
use crate::request::{Request, with_lease};

/// The longest time without a look at what the store says: a holder whose lease was released ends by then.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// What the command that started the holder says when the report was passed on.
pub(crate) const KEEP: &[u8] = b"keep\n";

/// What the holder tells the command that started it: one line of JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Report {
    /// It waits with this claim.
    Waiting {
        claim: String,
    },
    /// `since`: nanoseconds after boot.
    Granted {
        claim: String,
        token: u64,
        since: u64,
    },
    Failed {
        code: u8,
        message: String,
    },
}

pub(crate) async fn run(store: &Store, args: &Hold) -> Outcome {
    // Away from the caller's terminal, signals and directory. Fails only for a process group leader, which we are not.
    let _ = setsid();
    sys::set_name(HOLDER);
    // Who ends a service, or a session, asks all of it to end; the script may need its lock to do so.
    sys::be_deaf();
    let _ = std::env::set_current_dir("/");
    let failure = match Holder::acquire(store, args).await {
        Ok(Some(holder)) => match holder.begin().await {
            Ok(()) => return holder.hold().await,
            Err(failure) => failure,
        },
        Ok(None) => return Ok(0),
        Err(failure) => failure,
    };
    let _ = report(&Report::Failed { code: failure.code, message: failure.message.to_string() });
    Ok(failure.code)
}

struct Holder {
    env: Env,
    locks: Locks,
    /// A second client, for which the claim is another's: it sets the end that everybody sees.
    outside: Locks,
    guard: Guard,
    /// On which who asked says that the report was passed on.
    word: Receiver,
    /// When it was granted.
    since: Instant,
    bound_to: ProcessEnd,
    ttl: Duration,
    limits: Limits,
}

impl Holder {
    /// Waits for the lock. `None`: the one who asked has gone.
    async fn acquire(store: &Store, args: &Hold) -> Result<Option<Holder>, Failure> {
        let asker = end_of(args.asker)?;
        let cannot_hear = |error| Failure::system("cannot hear who asks for the lock", error);
        let word = io::stdin()
            .as_fd()
            .try_clone_to_owned()
            .and_then(Receiver::from_owned_fd)
            .map_err(cannot_hear)?;
        if getppid() != Pid::from_raw(args.asker) {
            return Ok(None);
        }
        let bound_to = end_of(args.for_pid)?;
        let env = Env::host(Lane::here()?);
        let limits = Limits::of(&args.patience, &env);
        // It is not we who use the lock.
        let owner = args.for_pid.unsigned_abs();
        let locks = connect_within(store, &env, &limits).await?.on_behalf_of(owner);
        let locks = with_lease(locks, &args.lease, "")?;
        let outside = connect_within(store, &env, &limits).await?.on_behalf_of(owner);
        let request = Request::new(&locks, &args.name, &args.share)?;
        let guard = tokio::select! {
            biased;
            guard = request.acquire(&limits, tell_claim) => guard?,
            () = asker.ended() => return Ok(None),
            () = bound_to.ended() => {
                let text = format!("process {} has ended, for which the lock was to be held", args.for_pid);
                return Err(Failure::new(USAGE, text));
            }
        };
        let (since, ttl) = (env.clock().now(), locks.lease_ttl());
        Ok(Some(Holder { env, locks, outside, guard, word, since, bound_to, ttl, limits }))
    }

    /// Sets the end that everybody sees. Where nobody waits for that any more, `hold` lets go.
    async fn begin(&self) -> Result<(), Failure> {
        let (name, claim) = (self.guard.name().as_str(), self.guard.claim_id());
        let begun = async {
            loop {
                match self.outside.renew_detached(name, claim, self.ttl).await {
                    Err(error) if is_transient(&error) && self.limits.go_on() => {
                        tokio::time::sleep(TRY_AGAIN).await;
                    }
                    begun => return Ok(begun?),
                }
            }
        };
        tokio::select! {
            biased;
            begun = begun => begun,
            () = is_given_up(&self.word) => Ok(()),
            () = self.bound_to.ended() => Ok(()),
        }
    }

    async fn hold(self) -> Outcome {
        let claim = self.guard.claim_id().to_string();
        let (token, since) = (self.guard.token().get(), self.since.as_nanos());
        if report(&Report::Granted { claim, token, since }).is_ok() {
            // From the start: who asked may be stopped for as long as it takes.
            tokio::select! {
                () = is_given_up(&self.word) => {}
                () = self.bound_to.ended() => {}
                () = self.over() => {}
            }
        }
        drop(self.guard);
        close(&self.locks).await?;
        Ok(0)
    }

    /// Completes when the lease is over by what its own record says, which others move: its end has passed, it was released, or it was
    /// taken away and the notice is over. Who works under it has been told until when it may, so no failure ends it.
    async fn over(&self) {
        let mut given_up = None;
        loop {
            let state = self.guard.state().await;
            let now = self.env.clock().now();
            let left = match state {
                Ok(Some(state)) => {
                    given_up = None;
                    state.expires_in.unwrap_or(LOOK_AGAIN)
                }
                Ok(None) => Duration::ZERO,
                // Its record is gone for good: no renewal is answered any more, and nobody could see its end.
                Err(_) if !self.guard.is_held() => given_up.get_or_insert(now + NOTICE).since(now),
                Err(_) => LOOK_AGAIN,
            };
            if left.is_zero() {
                return;
            }
            self.env.sleep_until(now + left.min(LOOK_AGAIN)).await;
        }
    }
}

/// Completes if who asked ends without having passed the report on: nobody knows of the lock.
async fn is_given_up(from: &Receiver) {
    let mut word = Vec::new();
    if read_line(from, &mut word).await.is_ok() && word == KEEP {
        std::future::pending().await
    }
}

/// Reads a line, or what there is of it when nobody will write more.
pub(crate) async fn read_line(from: &Receiver, line: &mut Vec<u8>) -> io::Result<()> {
    let mut buffer = [0; 512];
    while !line.ends_with(b"\n") {
        from.readable().await?;
        match from.try_read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => line.extend(buffer.iter().take(read)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// What tells of the end of a process, which has to run.
pub(super) fn end_of(pid: i32) -> Result<ProcessEnd, Failure> {
    let end = Pid::from_raw(pid).map_or_else(|| Err(Errno::SRCH.into()), ProcessEnd::of);
    match end {
        Ok(end) if end.is_over() => Err(Failure::usage(format!("process {pid} has ended"))),
        Ok(end) => Ok(end),
        Err(error) => Err(match Errno::from_io_error(&error) {
            Some(Errno::SRCH) => Failure::usage(format!("there is no process {pid}")),
            // Older and newer kernels.
            Some(Errno::INVAL | Errno::NOENT) => Failure::usage(match process_of(pid) {
                Some(process) => format!("{pid} is a thread of process {process}: say `--for {process}`"),
                None => format!("{pid} is a thread: say the id of its process"),
            }),
            _ => Failure::system(&format!("cannot wait for the end of process {pid}"), error),
        }),
    }
}

/// The process that a thread is of, if that can be seen.
fn process_of(thread: i32) -> Option<i32> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()
}

/// Tells who asks which claim waits, if that does not take any time: it may be stopped.
fn tell_claim(claim: ClaimId) {
    if has_room(rustix::stdio::stdout(), AT_ONCE) {
        let _ = write(&Report::Waiting { claim: claim.to_string() });
    }
}

fn write(report: &Report) -> io::Result<()> {
    let mut line = serde_json::to_vec(report)?;
    line.push(b'\n');
    io::stdout().write_all(&line)?;
    io::stdout().flush()
}

/// Writes the report and lets go of the pipe, so that who reads to its end is not kept waiting.
fn report(report: &Report) -> io::Result<()> {
    write(report)?;
    // Whatever takes its place: this opens nothing, which could fail when all has been told.
    Ok(rustix::stdio::dup2_stdout(io::stdin())?)
}
