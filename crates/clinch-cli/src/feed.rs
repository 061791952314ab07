//! A store that is looked at again and again, over one connection, by a thread of its own: a server may hang, and a file
//! system may, and keys and signals are to be heard meanwhile.

use std::time::{Duration, SystemTime};

use clinch::backend::{ClaimState, LockState, Survey};
use clinch::{Env, ErrorKind, Lane, Locks};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::Instant;

use crate::args::Store;
use crate::connect::{block_on, connect, in_time, is_transient};
use crate::exit::Failure;
use crate::job::sys;
use crate::output::local;
use crate::verbs::break_::{self, evict};

/// How much later than expected a look may be before that is told.
const LATE: Duration = Duration::from_secs(1);

/// What there is to tell.
pub(crate) enum Told {
    /// What the store answered, and why that is not all.
    Locks(Vec<LockState>, Option<String>),
    /// Why it did not answer.
    Failed(String),
    /// It has not answered for some time, and may still.
    Nothing,
    /// What became of evictions that were asked for, in words.
    Evicted(String),
}

/// A lock to be taken away from these.
struct Eviction {
    name: String,
    victims: Vec<ClaimState>,
}

pub(crate) struct Feed {
    every: Duration,
    told: UnboundedReceiver<Result<Told, Failure>>,
    evictions: UnboundedSender<Eviction>,
    /// When something should have been told.
    due: Instant,
}

impl Feed {
    /// Looks at once, and then this often. `beginning`: what the names begin with.
    pub(crate) fn start(store: &Store, beginning: &str, every: Duration) -> Result<Feed, Failure> {
        let (tell, told) = unbounded_channel();
        let (evictions, asked) = unbounded_channel();
        let look = Looks { store: store.clone(), beginning: beginning.to_owned(), every, tell, asked };
        let body = move || {
            let tell = look.tell.clone();
            if let Err(failure) = block_on(async { look.run().await.map(|()| 0) }) {
                // Nobody listens any more where this fails.
                let _ = tell.send(Err(failure));
            }
        };
        sys::start_deaf(body).map_err(|error| Failure::system("cannot start", error))?;
        Ok(Feed { every, told, evictions, due: Instant::now() + LATE })
    }

    /// What is told next; the end of it all is a failure.
    ///
    /// # Cancel safety
    ///
    /// Nothing is lost.
    pub(crate) async fn next(&mut self) -> Result<Told, Failure> {
        tokio::select! {
            biased;
            told = self.told.recv() => {
                self.due = Instant::now() + self.every + LATE;
                told.unwrap_or_else(|| Err(Failure::system("cannot look at the store", "a thread has ended")))
            }
            () = tokio::time::sleep_until(self.due) => {
                self.due = Instant::now() + LATE;
                Ok(Told::Nothing)
            }
        }
    }

    /// Takes a lock away from those who hold it.
    pub(crate) fn evict(&self, name: &str, victims: Vec<ClaimState>) {
        // Fails only when all has ended, which is told.
        let _ = self.evictions.send(Eviction { name: name.to_owned(), victims });
    }
}

/// The thread's part.
struct Looks {
    store: Store,
    beginning: String,
    every: Duration,
    tell: UnboundedSender<Result<Told, Failure>>,
    asked: UnboundedReceiver<Eviction>,
}

impl Looks {
    /// Until nobody listens, or the store cannot be had at all.
    async fn run(mut self) -> Result<(), Failure> {
        let (mut connected, mut has_answered) = (None, false);
        while !self.tell.is_closed() {
            let next = Instant::now() + self.every;
            let told = match in_time(look(&self.store, &mut connected, &self.beginning)).await {
                Ok(Survey { locks, unread }) => {
                    has_answered = true;
                    Told::Locks(locks, unread.map(|why| Failure::from(why).message.into_owned()))
                }
                // What was never right does not become so by waiting.
                Err(error) if !has_answered && !is_transient(&error) => return Err(error.into()),
                Err(error) => {
                    // A directory that was moved may be made anew.
                    connected = connected.filter(|_| error.kind() != ErrorKind::Closed);
                    Told::Failed(Failure::from(error).message.into_owned())
                }
            };
            let _ = self.tell.send(Ok(told));
            self.wait(next, connected.as_ref()).await;
        }
        Ok(())
    }

    /// Waits until it is time to look again, and begins what is asked for meanwhile.
    async fn wait(&mut self, until: Instant, locks: Option<&Locks>) {
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(until) => return,
                Some(Eviction { name, victims }) = self.asked.recv() => {
                    // Somebody saw the lock, so there was a connection.
                    let Some(locks) = locks.cloned() else { continue };
                    let tell = self.tell.clone();
                    tokio::spawn(async move {
                        let ended = evict(&locks, &name, victims).await;
                        let _ = tell.send(Ok(Told::Evicted(break_::in_words(&name, &ended))));
                    });
                }
            }
        }
    }
}

/// One look. The first one that can be had opens the connection of all. A directory that is not there has no locks.
async fn look(store: &Store, connected: &mut Option<Locks>, beginning: &str) -> clinch::Result<Survey> {
    let locks = match connected {
        Some(locks) => locks,
        None if Locks::is_unmade(&store.url, Env::host(Lane::here()?))? => return Ok(Survey::default()),
        None => connected.insert(connect(store).await?),
    };
    locks.survey(beginning).await
}

/// Since when a store has not answered, and why.
#[derive(Debug, Default)]
pub(crate) struct Silence {
    answered: Option<SystemTime>,
    why: Option<String>,
    /// Why the last answer was not all.
    pub(crate) unread: Option<String>,
}

impl Silence {
    /// Takes note of what was told.
    pub(crate) fn note(&mut self, told: &Told, now: SystemTime) {
        match told {
            Told::Locks(_, unread) => {
                (self.answered, self.why) = (Some(now), None);
                self.unread.clone_from(unread);
            }
            Told::Failed(why) => self.why = Some(format!(": {why}")),
            Told::Nothing => drop(self.why.get_or_insert_default()),
            Told::Evicted(_) => {}
        }
    }

    /// What there is to say of it, in one line; `None`: the store answers.
    pub(crate) fn line(&self) -> Option<String> {
        let why = self.why.as_ref()?;
        Some(match self.answered {
            Some(answered) => format!("no answer since {}{why}", local(answered)),
            None => format!("no answer yet{why}"),
        })
    }
}
