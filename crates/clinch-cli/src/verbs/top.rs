//! `clinch top`: the locks on a full screen, live.

use std::io::IsTerminal;
use std::time::{Duration, Instant, SystemTime};

use ratatui::crossterm::event;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;
use rustix::process::Signal;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::MissedTickBehavior;

use crate::args::Store;
use crate::exit::{Failure, Outcome};
use crate::feed::{Feed, Told};
use crate::job::signals::{Signals, asks_to_stop};
use crate::job::sys;
use crate::output::say;
use crate::paint::Paint;
use crate::screen::{self, Screen};
use crate::table::wants_colour;
use crate::top::key::Key;
use crate::top::model::{Act, Model};
use crate::top::view;

/// How often the store is looked at.
const EVERY: Duration = Duration::from_secs(1);

/// How long a key is waited for that is there: with no time at all none is read.
const MOMENT: Duration = Duration::from_millis(1);

pub(crate) async fn run(store: &Store) -> Outcome {
    if !std::io::stdin().is_terminal() || !screen::is_there() {
        return Err(Failure::usage(
            "top needs a terminal to draw on and to read keys from; see `clinch ls --watch`",
        ));
    }
    let mut signals = Signals::drawing().map_err(|error| Failure::system("cannot hear signals", error))?;
    let mut feed = Feed::start(store, "", EVERY)?;
    let mut model = Model::default();
    if let Some(code) = show(&mut feed, &mut signals, &mut model).await? {
        return Ok(code);
    }
    finish(&mut feed, &mut signals, model.evicting).await
}

/// Shows all until a key or a signal ends it. `None`: a key did.
async fn show(feed: &mut Feed, signals: &mut Signals, model: &mut Model) -> Result<Option<u8>, Failure> {
    let mut screen = Screen::enter(true)?;
    let mut keys = keys()?;
    let paint = Paint { has_colour: wants_colour() };
    // Time goes on also where nothing is told.
    let mut second = tokio::time::interval(Duration::from_secs(1));
    second.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        model.fit(view::page(screen.area()));
        let now = SystemTime::now();
        screen.draw(|frame| view::draw(model, paint, frame.area(), frame.buffer_mut(), now))?;
        tokio::select! {
            told = feed.next() => model.hear(told?, Instant::now(), SystemTime::now()),
            _ = second.tick() => {}
            caught = signals.next() => {
                if let Some(code) = screen.heed(caught.signal)? {
                    return Ok(Some(code));
                }
            }
            key = keys.recv() => {
                // Without keys nobody is there.
                let Some(key) = key else { return Ok(None) };
                match model.press(key, view::page(screen.area())) {
                    Act::Nothing => {}
                    Act::Leave => return Ok(None),
                    Act::Suspend => screen.stop()?,
                    Act::Evict(request) => feed.evict(&request.name, request.victims),
                }
            }
        }
    }
}

/// Waits for what was begun, and tells of it, since half an eviction is none.
async fn finish(feed: &mut Feed, signals: &mut Signals, mut evicting: usize) -> Outcome {
    if evicting > 0 {
        say("a lock is still being taken away; its holder is told first");
    }
    while evicting > 0 {
        tokio::select! {
            told = feed.next() => {
                if let Told::Evicted(words) = told? {
                    say(words);
                    evicting -= 1;
                }
            }
            caught = signals.next() => match caught.signal {
                Signal::WINCH | Signal::CONT => {}
                signal if asks_to_stop(signal) => drop(sys::stop_group(signal)),
                signal => return Ok(screen::end_by(signal)),
            },
        }
    }
    Ok(0)
}

/// What is typed, read by a thread of its own: a terminal cannot be read without waiting for it, and is shared with others.
fn keys() -> Result<UnboundedReceiver<Key>, Failure> {
    let (tell, keys) = unbounded_channel();
    let read = move || {
        // Who reads in the background is to be stopped, as anybody is.
        sys::unblock(Signal::TTIN);
        // Ends when the terminal is gone, and with the process.
        let _ = read_keys(&tell);
    };
    sys::start_deaf(read).map_err(|error| Failure::system("cannot start", error))?;
    Ok(keys)
}

fn read_keys(tell: &UnboundedSender<Key>) -> std::io::Result<()> {
    let stdin = rustix::stdio::stdin();
    loop {
        let mut fds = [PollFd::from_borrowed_fd(stdin, PollFlags::IN)];
        retry_on_intr(|| poll(&mut fds, None))?;
        // The events below would be waited for without end, and without rest, on a terminal that is gone.
        if fds.iter().any(|fd| fd.revents().intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL)) {
            return Ok(());
        }
        while event::poll(MOMENT)? {
            if let Some(key) = Key::of(event::read()?)
                && tell.send(key).is_err()
            {
                return Ok(());
            }
        }
    }
}
