//! `clinch ls --watch`: the table again and again, in place on a terminal, else for each change.

use std::time::{Duration, SystemTime};

use clinch::backend::{ClaimState, LockState};
use clinch::{ClaimId, Mode, Token};
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};

use super::ls::Wanted;
use crate::args::Store;
use crate::documents::{self, LockJson, LocksJson};
use crate::exit::{Failure, Outcome};
use crate::feed::{Feed, Silence, Told};
use crate::grid::Tone;
use crate::job::signals::Signals;
use crate::output::{is_read, is_same_moment, local, printable, say, show};
use crate::paint::{Paint, line};
use crate::screen::{self, Screen};
use crate::table::{Look, grid, table, wants_colour};

pub(crate) async fn run(store: &Store, wanted: Wanted<'_>, every: Duration) -> Outcome {
    let feed = Feed::start(store, wanted.beginning, every)?;
    if wanted.ls.json || !screen::is_there() {
        return print_changes(feed, &wanted).await;
    }
    draw(feed, &wanted).await
}

/// Prints what changed, for as long as somebody reads it.
async fn print_changes(mut feed: Feed, wanted: &Wanted<'_>) -> Outcome {
    let (mut silence, mut was_silent) = (Silence::default(), false);
    let mut printed: Option<Vec<LockState>> = None;
    let mut unread = None;
    while is_read() {
        let told = feed.next().await?;
        let now = SystemTime::now();
        silence.note(&told, now);
        match silence.line() {
            Some(line) if !was_silent => say(line),
            None if was_silent => say("the store answers again"),
            _ => {}
        }
        was_silent = silence.line().is_some();
        if silence.unread != unread {
            unread.clone_from(&silence.unread);
            unread.iter().for_each(say);
        }
        let Told::Locks(mut locks, _) = told else { continue };
        locks.retain_mut(|lock| wanted.keeps(lock));
        if printed.as_ref().is_none_or(|printed| differ(printed, &locks)) {
            show(&match wanted.ls.json {
                true => documents::line(LocksJson { locks: locks.iter().map(LockJson::from).collect() }),
                false if locks.is_empty() && unread.is_some() => "\n".to_owned(),
                false if locks.is_empty() => format!("{}\n\n", wanted.none()),
                false => table(&locks, Look::of_stdout(false), now) + "\n",
            })?;
            printed = Some(locks);
        }
    }
    Ok(0)
}

/// Whether somebody came, left, or was given a lock, or a lock was closed or opened; not whether time has passed.
fn differ(before: &[LockState], now: &[LockState]) -> bool {
    let same_end = |one: Option<SystemTime>, other: Option<SystemTime>| match (one, other) {
        (Some(one), Some(other)) => is_same_moment(one, other),
        (one, other) => one == other,
    };
    let same = |(one, other): (&LockState, &LockState)| {
        one.name == other.name
            && same_end(one.closed_until, other.closed_until)
            && one.claims.iter().map(standing).eq(other.claims.iter().map(standing))
    };
    before.len() != now.len() || !before.iter().zip(now).all(same)
}

/// What of a claim does not change by itself, and whether its lease has run out.
fn standing(claim: &ClaimState) -> (ClaimId, Mode, bool, Option<Token>, &str, bool) {
    let is_over = claim.expires_in.is_some_and(|left| left.is_zero());
    (claim.id, claim.mode, claim.granted, claim.token, &claim.owner.host, is_over)
}

/// Shows the table in place until a signal ends it.
async fn draw(mut feed: Feed, wanted: &Wanted<'_>) -> Outcome {
    let mut signals = Signals::drawing().map_err(|error| Failure::system("cannot hear signals", error))?;
    let mut screen = Screen::enter(false)?;
    let mut view =
        View { silence: Silence::default(), locks: None, paint: Paint { has_colour: wants_colour() } };
    loop {
        screen.draw(|frame| view.draw(wanted, frame.area(), frame.buffer_mut(), SystemTime::now()))?;
        tokio::select! {
            told = feed.next() => {
                let told = told?;
                view.silence.note(&told, SystemTime::now());
                if let Told::Locks(mut locks, _) = told {
                    locks.retain_mut(|lock| wanted.keeps(lock));
                    view.locks = Some(locks);
                }
            }
            caught = signals.next() => {
                if let Some(code) = screen.heed(caught.signal)? {
                    return Ok(code);
                }
            }
        }
    }
}

/// What stands on the terminal.
struct View {
    silence: Silence,
    locks: Option<Vec<LockState>>,
    paint: Paint,
}

impl View {
    /// A title, or what there is to say of a store that does not answer, and as much of the table as there is room for.
    fn draw(&self, wanted: &Wanted<'_>, area: Rect, buffer: &mut Buffer, now: SystemTime) {
        let style = |tone| self.paint.style(tone);
        let [title, mut rest] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(area);
        match (self.silence.line().or_else(|| self.silence.unread.clone()), &self.locks) {
            (Some(silence), _) => line(&printable(&silence), style(Tone::Expired), title, buffer),
            (None, None) => line("asking the store", style(Tone::Plain), title, buffer),
            (None, Some(_)) => line(&local(now), style(Tone::Plain), title, buffer),
        }
        let locks = match &self.locks {
            None => return,
            Some(locks) if locks.is_empty() && self.silence.unread.is_some() => return,
            Some(locks) if locks.is_empty() => return line(&wanted.none(), style(Tone::Plain), rest, buffer),
            Some(locks) => locks,
        };
        let grid = grid(locks, Some(usize::from(area.width)), now);
        if grid.len() > usize::from(rest.height) {
            rest.height = rest.height.saturating_sub(1);
            let more = grid.len() - usize::from(rest.height);
            let last = Rect { y: rest.bottom(), height: 1, ..rest }.intersection(area);
            line(&format!("… {more} more"), style(Tone::Head), last, buffer);
        }
        self.paint.grid(&grid, rest, buffer);
    }
}
