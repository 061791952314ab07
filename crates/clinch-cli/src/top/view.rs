//! What `clinch top` looks like: all locks, the claims of the chosen one below, and a line for what there is to say.

use std::time::SystemTime;

use clinch::backend::LockState;
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Margin, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::widgets::{Block, Clear, Widget};
use unicode_width::UnicodeWidthStr;

use super::handoffs::Handoffs;
use super::model::{Mode, Model, Request};
use crate::grid::{Cell, Columns, Cut, Tone, cut, plain};
use crate::output::{describe, local, printable};
use crate::paint::{Paint, line};
use crate::table::{self, age, left, owner};
use crate::verbs::break_::QUESTION;

/// Of what is below the title, the part that the claims of the chosen lock get: one of so many.
const SHARE: u16 = 3;

const HELP: [&str; 12] = [
    "up, k       the lock above",
    "down, j     the lock below",
    "PgUp, PgDn  a page up, down",
    "Home, End   the first, the last lock",
    "/           only names that contain a text",
    "            (Enter keeps it, Esc drops it)",
    "b           take the chosen lock away",
    "Ctrl-Z      stop; fg goes on",
    "q, Esc      leave",
    "",
    "/MIN: how many holders a lock had anew",
    "within a minute, as far as was seen",
];

const COLUMNS: Columns<7> = Columns {
    heads: [
        ("NAME", Cut::Middle),
        ("STATE", Cut::End),
        ("FOR", Cut::End),
        ("LEFT", Cut::End),
        ("WAIT", Cut::End),
        ("/MIN", Cut::End),
        // With the pid at its end.
        ("HOLDER", Cut::Middle),
    ],
    narrowed: &[
        (6, 24),
        (0, 32),
        (3, 8),
        (6, 16),
        (0, 12),
        (6, 8),
        (5, 0),
        (0, 8),
        (6, 0),
        (3, 0),
        (2, 0),
        (4, 0),
    ],
};

/// Where things stand.
struct Places {
    title: Rect,
    locks: Rect,
    rule: Rect,
    claims: Rect,
    foot: Rect,
}

impl Places {
    fn of(area: Rect) -> Places {
        let share = Constraint::Length(area.height.saturating_sub(2) / SHARE);
        let one = Constraint::Length(1);
        let [title, locks, rule, claims, foot] =
            Layout::vertical([one, Constraint::Fill(1), one, share, one]).areas(area);
        Places { title, locks, rule, claims, foot }
    }
}

/// How many locks are seen at once on a terminal of this size.
pub(crate) fn page(area: Rect) -> usize {
    usize::from(Places::of(area).locks.height.saturating_sub(1))
}

/// Draws all of it.
pub(crate) fn draw(model: &Model, paint: Paint, area: Rect, buffer: &mut Buffer, now: SystemTime) {
    let places = Places::of(area);
    title(model, places.title, buffer, now);
    locks(model, paint, places.locks, page(area), buffer, now);
    claims(model, paint, &places, buffer, now);
    foot(model, paint, places.foot, buffer);
    let above = Rect { height: area.height.saturating_sub(1), ..area };
    match &model.mode {
        Mode::Table | Mode::Filter => {}
        Mode::Help => show_box(" keys ", &HELP.map(str::to_owned), " any key closes this ", above, buffer),
        Mode::Confirm(request) => confirm(request, above, buffer),
    }
}

fn title(model: &Model, area: Rect, buffer: &mut Buffer, now: SystemTime) {
    let waiting: usize = model.all().iter().map(waiting).sum();
    let locks = match model.count() {
        count if count == model.all().len() => format!("locks: {count}"),
        count => format!("locks: {count} of {}", model.all().len()),
    };
    let text = match model.has_locks() {
        true => format!("{locks}  waiting: {waiting}  hand-offs/min: {}", model.handoffs.all()),
        false => "asking the store".to_owned(),
    };
    let clock = local(now);
    let clock_width = u16::try_from(clock.len()).unwrap_or(u16::MAX);
    let [left, right] =
        Layout::horizontal([Constraint::Fill(1), Constraint::Length(clock_width)]).spacing(1).areas(area);
    line(&text, Style::new().add_modifier(Modifier::BOLD), left, buffer);
    line(&clock, Style::new(), right, buffer);
}

fn locks(model: &Model, paint: Paint, area: Rect, page: usize, buffer: &mut Buffer, now: SystemTime) {
    let (seen, chosen) = model.seen(page);
    if seen.is_empty() {
        let text = match (model.has_locks(), model.filter.is_empty()) {
            (false, _) => "",
            (true, true) => "no lock is held, waited for or kept closed",
            (true, false) => "no name contains that",
        };
        return line(text, Style::new(), area, buffer);
    }
    let rows = seen.iter().map(|lock| row(lock, &model.handoffs, now)).collect();
    paint.grid(&COLUMNS.grid(rows, Some(usize::from(area.width))), area, buffer);
    // Below the heads.
    if let Some(row) = area.rows().nth(chosen + 1) {
        buffer.set_style(row, Style::new().add_modifier(Modifier::REVERSED));
    }
}

/// One lock. Of those that share it, the first stands for all.
fn row(lock: &LockState, handoffs: &Handoffs, now: SystemTime) -> [Cell; 7] {
    let mut holders = lock.claims.iter().filter(|claim| claim.granted);
    let first = holders.next();
    let others = holders.count();
    let state = match (first, lock.closed_until) {
        (Some(_), _) => ("held", Tone::Held),
        (None, Some(_)) => ("closed", Tone::Closed),
        (None, None) => ("waiting", Tone::Waiting),
    };
    let name = lock.name.as_str();
    let handoffs = handoffs.of(name);
    let count = |count: usize| plain(if count == 0 { String::new() } else { count.to_string() });
    [
        plain(printable(name)),
        (state.0.to_owned(), state.1),
        plain(first.and_then(|claim| age(claim, now)).unwrap_or_default()),
        match (first, lock.closed_until) {
            (Some(claim), _) => left(claim, ""),
            (None, until) => plain(until.map(local).unwrap_or_default()),
        },
        count(waiting(lock)),
        count(handoffs),
        plain(match (first, others) {
            (None, _) => String::new(),
            (Some(claim), 0) => owner(claim),
            (Some(claim), others) => format!("{} +{others}", owner(claim)),
        }),
    ]
}

fn waiting(lock: &LockState) -> usize {
    lock.claims.iter().filter(|claim| !claim.granted).count()
}

/// The claims on the chosen lock, in their order.
fn claims(model: &Model, paint: Paint, places: &Places, buffer: &mut Buffer, now: SystemTime) {
    let rule = "─".repeat(usize::from(places.rule.width));
    line(&rule, Style::new(), places.rule, buffer);
    let Some(lock) = model.chosen() else { return };
    let waiting = format!(": {} waiting ", waiting(lock));
    let inner = places.rule.inner(Margin::new(2, 0));
    let room = usize::from(inner.width).saturating_sub(waiting.len() + 1);
    let name = cut(&printable(lock.name.as_str()), room, Cut::Middle);
    line(&format!(" {name}{waiting}"), Style::new().add_modifier(Modifier::BOLD), inner, buffer);
    // No more than are seen: a queue may be long.
    let rows: Vec<_> = table::rows(lock, "", now).take(usize::from(places.claims.height)).collect();
    let grid = table::COLUMNS.grid(rows, Some(usize::from(places.claims.width)));
    paint.grid(&grid, places.claims, buffer);
}

/// What there is to say, or what can be done.
fn foot(model: &Model, paint: Paint, area: Rect, buffer: &mut Buffer) {
    let bad = paint.style(Tone::Expired).add_modifier(Modifier::BOLD);
    if let Mode::Filter = model.mode {
        // The end is where one writes.
        let room = usize::from(area.width).saturating_sub(2);
        return line(
            &format!("/{}▏", cut(&printable(&model.filter), room, Cut::Start)),
            Style::new(),
            area,
            buffer,
        );
    }
    if let Some(note) = &model.note {
        return line(&printable(note), Style::new().add_modifier(Modifier::BOLD), area, buffer);
    }
    if let Some(silence) = model.silence.line().or_else(|| model.silence.unread.clone()) {
        return line(&printable(&silence), bad, area, buffer);
    }
    if model.evicting > 0 {
        return line("a lock is being taken away; its holder is told first", Style::new(), area, buffer);
    }
    let filter = match model.filter.is_empty() {
        true => "/ filter".to_owned(),
        false => format!("/ filter \"{}\"", printable(&model.filter)),
    };
    line(&format!("q leave  ? keys  b break  {filter}"), Style::new(), area, buffer);
}

/// Names whom the lock would be taken from.
fn confirm(request: &Request, area: Rect, buffer: &mut Buffer) {
    let room = usize::from(area.width).saturating_sub(2 * EDGE);
    let name = cut(&printable(&request.name), room.saturating_sub(8), Cut::Middle);
    let question = wrap(QUESTION, room);
    let mut text: Vec<String> =
        request.victims.iter().flat_map(|victim| wrap(&describe(victim), room)).collect();
    // The question stays, however many there are.
    let most = usize::from(area.height).saturating_sub(3 + question.len());
    if text.len() > most {
        text.truncate(most.saturating_sub(1));
        text.push(format!("... {} holders in all", request.victims.len()));
    }
    text.push(String::new());
    text.extend(question);
    show_box(&format!(" break {name} "), &text, " y: yes, any other key: no ", area, buffer);
}

/// Columns that a box takes on either side of its text.
const EDGE: usize = 2;

/// A box in front of all else, as large as its text, with what can be done at its lower edge.
fn show_box(head: &str, text: &[String], foot: &str, area: Rect, buffer: &mut Buffer) {
    let texts = text.iter().map(String::as_str).chain([head, foot]);
    let width = texts.map(UnicodeWidthStr::width).max().unwrap_or(0) + 2 * EDGE;
    let length = |length: usize| Constraint::Length(u16::try_from(length).unwrap_or(u16::MAX));
    let place = area.centered(length(width), length(text.len() + 2));
    Clear.render(place, buffer);
    Block::bordered().title(head).title_bottom(foot).render(place, buffer);
    for (row, text) in place.inner(Margin::new(2, 1)).rows().zip(text) {
        line(text, Style::new(), row, buffer);
    }
}

/// Lines that are no wider than this, broken between words where there is a choice.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let word = cut(word, width, Cut::Middle);
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(&word),
            Some(line) if line.width() + 1 + word.width() <= width => *line += &format!(" {word}"),
            _ => lines.push(word),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::feed::Told;
    use crate::top::key::Key;
    use crate::top::model::tests::{claim, lock, time, told, type_in};

    /// What is seen, line by line.
    fn seen(model: &mut Model, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        let area = Rect::new(0, 0, width, height);
        model.fit(page(area));
        let paint = Paint { has_colour: true };
        terminal.draw(|frame| draw(model, paint, area, frame.buffer_mut(), time())).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let lines = area.rows().map(|row| {
            // What a wide letter covers has no text of its own.
            let mut covered = 0;
            row.columns()
                .filter_map(|cell| {
                    let text = buffer[cell.as_position()].symbol();
                    let is_seen = covered == 0;
                    covered = if is_seen { text.width().saturating_sub(1) } else { covered - 1 };
                    is_seen.then_some(text)
                })
                .collect::<String>()
        });
        lines.map(|line| line.trim_end().to_owned()).collect()
    }

    fn model() -> Model {
        let mut model = Model::default();
        let mut closed = lock("日本", &[]);
        closed.closed_until = Some(time());
        let queue = [claim(1, true), claim(2, false), claim(3, false)];
        told(&mut model, &[closed, lock("nightly", &queue), lock("x\u{1b}[2J", &[claim(7, false)])]);
        model
    }

    #[test]
    fn a_lock_is_a_line_and_the_chosen_one_has_its_queue_below() {
        let mut model = model();
        type_in(&mut model, "j");
        let lines = seen(&mut model, 80, 24);
        assert!(lines[0].starts_with("locks: 3  waiting: 3  hand-offs/min: 0"), "{lines:#?}");
        assert!(lines[1].starts_with("NAME "), "{lines:#?}");
        assert!(lines[2].starts_with("日本 ") && lines[2].contains("closed"), "{lines:#?}");
        let line = lines[3].split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(line, "nightly held 12m 20s 2 deploy@web-3 pid 1");
        assert!(lines[4].starts_with("x\\u{1b}[2J") && lines[4].contains("waiting"), "{lines:#?}");
        let at = |line: &str, text: &str| line[..line.find(text).unwrap()].width();
        assert_eq!(at(&lines[2], "closed"), at(&lines[3], "held"));
        let rule = lines.iter().position(|line| line.starts_with("── nightly: 2 waiting ──")).unwrap();
        assert!(lines[rule + 2].contains("held for 12m") && lines[rule + 2].contains("pid 1"), "{lines:#?}");
        assert!(
            lines[rule + 4].contains("waiting for 12m") && lines[rule + 4].contains("pid 3"),
            "{lines:#?}"
        );
        assert!(lines[23].starts_with("q leave"));
    }

    #[test]
    fn what_matters_has_room_on_a_small_terminal() {
        let lines = seen(&mut model(), 50, 15);
        for head in ["NAME", "STATE", "FOR", "LEFT", "WAIT", "HOLDER"] {
            assert!(lines[1].contains(head), "{lines:#?}");
        }
    }

    #[test]
    fn no_size_is_too_small() {
        for (width, height) in (0..30).step_by(3).flat_map(|width| (0..12).map(move |height| (width, height)))
        {
            for keys in ["", "jb", "?", "/y"] {
                let mut model = model();
                type_in(&mut model, keys);
                seen(&mut model, width, height);
            }
        }
    }

    #[test]
    fn a_question_names_the_holder_at_any_size() {
        for (width, height) in [(80, 24), (50, 15)] {
            let mut model = model();
            type_in(&mut model, "jb");
            let lines = seen(&mut model, width, height).join("\n");
            for text in
                ["break nightly", "deploy", "web-3", "pid 1 ", "(backup)", "still be running.", "y: yes"]
            {
                assert!(lines.contains(text), "{text}: {lines}");
            }
        }
        let mut model = Model::default();
        let readers: Vec<_> = (1..100).map(|id| claim(id, true)).collect();
        told(&mut model, &[lock("x", &readers)]);
        type_in(&mut model, "b");
        let lines = seen(&mut model, 50, 15).join("\n");
        assert!(lines.contains("99 holders in all") && lines.contains("still be running."), "{lines}");
    }

    #[test]
    fn the_last_line_says_what_there_is_to_say() {
        let mut model = Model::default();
        let last = |model: &mut Model| seen(model, 60, 20).pop().unwrap();
        assert!(seen(&mut model, 60, 20)[0].starts_with("asking the store"));
        model.hear(Told::Failed("a\u{1b}[2J".into()), Instant::now(), time());
        assert_eq!(last(&mut model), "no answer yet: a\\u{1b}[2J");
        told(&mut model, &[]);
        assert!(seen(&mut model, 60, 20)[1].starts_with("no lock is held"));
        model.hear(Told::Nothing, Instant::now(), time());
        assert_eq!(last(&mut model), format!("no answer since {}", local(time())));
        told(&mut model, &[lock("x", &[claim(1, true)])]);
        type_in(&mut model, "/lo");
        assert_eq!(last(&mut model), "/lo▏");
        assert!(seen(&mut model, 60, 20)[1].starts_with("no name contains that"));
        model.press(Key::Enter, 3);
        assert!(last(&mut model).ends_with("/ filter \"lo\""));
        model.note = Some("done".into());
        assert_eq!(last(&mut model), "done");
    }

    #[test]
    fn long_lines_break_between_words() {
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap("abcdefghij k", 5), ["ab…ij", "k"]);
        assert_eq!(wrap("", 5), [""]);
    }
}
