//! Connecting, and for how long a store may be asked.

use std::cell::Cell;
use std::future::Future;
use std::mem::ManuallyDrop;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use clinch::backends::file;
use clinch::{Env, Error, ErrorKind, Instant, Lane, Locks};

use crate::args::{Patience, Store};
use crate::exit::Failure;
use crate::output::say;

/// How long a store may take to answer whoever does not wait for a lock, connecting included. A server that hangs is left for
/// another of its kind within two seconds.
pub(crate) const ANSWER_FOR: Duration = Duration::from_secs(5);

/// How long it may take in any case, however short a wait may be: to be asked once takes a moment.
const ANSWER_AT_LEAST: Duration = Duration::from_secs(1);

/// How much later than the wait itself that is over, which knows better what to say.
const MOMENT: Duration = Duration::from_millis(250);

/// How long the end of a verb waits for releases that are still under way. A server that answers is asked within that time, also
/// over a new connection.
pub(crate) const CLOSE_FOR: Duration = Duration::from_secs(2);

/// Pause before a store that did not answer is asked again.
pub(crate) const TRY_AGAIN: Duration = Duration::from_millis(250);

/// Runs a verb on the one thread of this process.
pub(crate) fn block_on<T>(verb: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let cannot_start = |error| Failure::system("cannot start", error);
    has_descriptors().map_err(cannot_start)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(cannot_start)?;
    // Never taken apart: the process ends next, and the kernel is quicker at it.
    ManuallyDrop::new(runtime).block_on(verb)
}

/// Whether there are the descriptors that a runtime opens, five: where its pipe for signals cannot be had, it panics.
fn has_descriptors() -> std::io::Result<()> {
    let _opened = [UnixStream::pair()?, UnixStream::pair()?, UnixStream::pair()?];
    Ok(())
}

/// How long a verb may take.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    env: Env,
    /// When it began.
    pub(crate) since: Instant,
    /// Until when to wait for the lock; `None`: for as long as it takes.
    pub(crate) until: Option<Instant>,
    /// For how long, and until when, to wait for the store; `None`: until it is known that it does not answer.
    answer: Option<(Duration, Instant)>,
}

impl Limits {
    /// From this moment on, as the command line says.
    pub(crate) fn of(patience: &Patience, env: &Env) -> Limits {
        let now = env.clock().now();
        let answer_for = patience.limit().map(|limit| match limit {
            Duration::ZERO => ANSWER_FOR,
            limit => limit.saturating_add(MOMENT).max(ANSWER_AT_LEAST),
        });
        let answer = answer_for.map(|time| (time, now + time));
        Limits { env: env.clone(), since: now, until: patience.limit().map(|limit| now + limit), answer }
    }

    /// Of a verb that waits for nothing but answers.
    pub(crate) fn of_a_question(env: &Env) -> Limits {
        let now = env.clock().now();
        Limits { env: env.clone(), since: now, until: None, answer: Some((ANSWER_FOR, now + ANSWER_FOR)) }
    }

    /// What the clock says.
    pub(crate) fn now(&self) -> Instant {
        self.env.clock().now()
    }

    /// Whether there is time to ask again.
    pub(crate) fn go_on(&self) -> bool {
        self.until.is_none_or(|until| self.env.clock().now() + TRY_AGAIN < until)
    }

    /// Whether there is time to ask again what the store did not answer.
    fn asks_again(&self) -> bool {
        self.answer.is_none_or(|(_, by)| self.env.clock().now() + TRY_AGAIN < by)
    }

    /// Whether the time to wait for the lock has passed.
    pub(crate) fn is_over(&self) -> bool {
        self.until.is_some_and(|until| self.env.clock().now() >= until)
    }

    /// Gives up a step that the store has not answered in time.
    pub(crate) async fn keep<T>(&self, step: impl Future<Output = clinch::Result<T>>) -> clinch::Result<T> {
        self.within(step).await.unwrap_or_else(|time| {
            let time = humantime::format_duration(Duration::from_secs(time.as_secs().max(1)));
            Err(Error::new(ErrorKind::Unavailable, format!("the store did not answer within {time}")))
        })
    }

    /// Gives up what takes longer than an answer may; tells how long that is.
    pub(crate) async fn within<T>(&self, step: impl Future<Output = T>) -> Result<T, Duration> {
        let Some((time, by)) = self.answer else { return Ok(step.await) };
        tokio::select! {
            biased;
            done = step => Ok(done),
            () = self.env.sleep_until(by) => Err(time),
        }
    }
}

/// The locks of a store, renewed by the runtime that this is called in.
pub(crate) async fn connect(store: &Store) -> clinch::Result<Locks> {
    let env = Env::host(Lane::here()?);
    connect_within(store, &env, &Limits::of_a_question(&env)).await
}

/// Whether there is a store to look at: who takes no lock makes no directory. Says so where there is none, whose URL may be misspelt.
pub(crate) fn is_there(store: &Store) -> clinch::Result<bool> {
    let is_unmade = Locks::is_unmade(&store.url, Env::host(Lane::here()?))?;
    if let Some(dir) = file::dir_of(&store.url).filter(|_| is_unmade) {
        say(format_args!("there is no directory {}, so nobody has locked anything there", dir.display()));
    }
    Ok(!is_unmade)
}

/// Gives up a question, asked once of many, that the store does not answer.
pub(crate) async fn in_time<T>(question: impl Future<Output = clinch::Result<T>>) -> clinch::Result<T> {
    Limits::of_a_question(&Env::host(Lane::here()?)).keep(question).await
}

/// Asks a store one thing.
pub(crate) async fn ask<T>(
    store: &Store,
    question: impl AsyncFnOnce(Locks) -> clinch::Result<T>,
) -> clinch::Result<T> {
    let env = Env::host(Lane::here()?);
    let answer = async { question(Locks::connect(&store.url, env.clone()).await?).await };
    Limits::of_a_question(&env).keep(answer).await
}

/// As [`ask`]; asks again what was not answered, and says why it was not in the end.
pub(crate) async fn insist<T>(
    store: &Store,
    question: impl AsyncFn(&Locks) -> clinch::Result<T>,
) -> clinch::Result<T> {
    let env = Env::host(Lane::here()?);
    let (limits, failure) = (Limits::of_a_question(&env), Cell::default());
    let answer = limits.keep(again(store, &env, &limits, &failure, question)).await;
    answer.map_err(|error| failure.take().filter(|_| is_transient(&error)).unwrap_or(error))
}

/// As [`insist`]; but an answer that comes may take longer.
pub(crate) async fn insist_at_length<T>(
    store: &Store,
    question: impl AsyncFn(&Locks) -> clinch::Result<T>,
) -> clinch::Result<T> {
    let env = Env::host(Lane::here()?);
    again(store, &env, &Limits::of_a_question(&env), &Cell::default(), question).await
}

/// Asks until it is answered, or there is no time to ask again. Notes why it was not.
async fn again<T>(
    store: &Store,
    env: &Env,
    limits: &Limits,
    failure: &Cell<Option<Error>>,
    question: impl AsyncFn(&Locks) -> clinch::Result<T>,
) -> clinch::Result<T> {
    let mut connected = None;
    loop {
        let step = async {
            let locks = match &connected {
                Some(locks) => locks,
                None => connected.insert(connect_within(store, env, limits).await?),
            };
            question(locks).await
        };
        match step.await {
            Err(error) if is_transient(&error) && limits.asks_again() => failure.set(Some(error)),
            answered => return answered,
        }
        tokio::time::sleep(TRY_AGAIN).await;
    }
}

/// As [`connect`], for somebody who has this long: where that is a wait, a store that is down, hangs, or is full just now is
/// tried again.
pub(crate) async fn connect_within(store: &Store, env: &Env, limits: &Limits) -> clinch::Result<Locks> {
    let mut failure = None;
    let connected = limits.keep(async {
        loop {
            match Locks::connect(&store.url, env.clone()).await {
                Err(error) if is_transient(&error) && limits.until.is_some() && limits.go_on() => {
                    failure = Some(error);
                    tokio::time::sleep(TRY_AGAIN).await;
                }
                connected => return connected,
            }
        }
    });
    match (connected.await, failure) {
        (Err(error), Some(failure)) if is_transient(&error) => Err(error.with_source(failure)),
        (Ok(locks), _) if !locks.capabilities().processes => Err(Error::new(
            ErrorKind::Unsupported,
            "no other process sees the locks of this store, so they exclude nobody; use another one, as file://",
        )),
        (connected, _) => connected,
    }
}

/// Whether asking again may help: the store did not answer.
pub(crate) fn is_transient(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown)
}

/// Waits, bounded, for the releases in the background.
pub(crate) async fn close(locks: &Locks) -> Result<(), Failure> {
    Ok(locks.close(CLOSE_FOR).await?)
}
