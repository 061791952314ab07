//! What is known and what is chosen: made of what a store tells and of keys. Nothing is asked or drawn here.

use std::time::{Instant, SystemTime};

use clinch::LockName;
use clinch::backend::{ClaimState, LockState};

use super::handoffs::Handoffs;
use super::key::Key;
use crate::feed::{Silence, Told};
use crate::output::printable;
use crate::verbs::break_::victims;

/// What is to be done about a key.
#[derive(Debug)]
pub(crate) enum Act {
    Nothing,
    Leave,
    Suspend,
    Evict(Request),
}

/// A lock to be taken away from who held it when that was asked.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) name: String,
    pub(crate) victims: Vec<ClaimState>,
}

/// What keys are for.
#[derive(Debug, Default)]
pub(crate) enum Mode {
    #[default]
    Table,
    Filter,
    Help,
    Confirm(Request),
}

#[derive(Debug, Default)]
pub(crate) struct Model {
    /// As the store told last; `None`: never yet.
    locks: Option<Vec<LockState>>,
    /// Which of them are shown.
    shown: Vec<usize>,
    /// Which of those is chosen, and which one is seen first.
    chosen: usize,
    first: usize,
    /// The lock that was chosen, which may come back.
    meant: Option<LockName>,
    pub(crate) filter: String,
    pub(crate) mode: Mode,
    /// What became of what was asked for.
    pub(crate) note: Option<String>,
    /// Evictions that are not yet done.
    pub(crate) evicting: usize,
    pub(crate) silence: Silence,
    pub(crate) handoffs: Handoffs,
}

impl Model {
    /// Takes in what was told.
    pub(crate) fn hear(&mut self, told: Told, now: Instant, time: SystemTime) {
        self.silence.note(&told, time);
        match told {
            Told::Locks(locks, _) => {
                self.handoffs.note(&locks, now);
                self.locks = Some(locks);
                self.sift();
            }
            Told::Evicted(words) => {
                self.evicting = self.evicting.saturating_sub(1);
                self.note = Some(words);
            }
            Told::Failed(_) | Told::Nothing => {}
        }
    }

    /// Does what a key says. `page`: how many rows are seen at once.
    pub(crate) fn press(&mut self, key: Key, page: usize) -> Act {
        self.note = None;
        if key == Key::Interrupt {
            return Act::Leave;
        }
        if key == Key::Suspend {
            return Act::Suspend;
        }
        match &self.mode {
            Mode::Table => return self.press_in_table(key, page),
            Mode::Filter => self.press_in_filter(key),
            Mode::Help => self.mode = Mode::Table,
            Mode::Confirm(request) => {
                let confirmed = (key == Key::Letter('y')).then(|| request.clone());
                self.mode = Mode::Table;
                match confirmed {
                    Some(request) => {
                        self.evicting += 1;
                        return Act::Evict(request);
                    }
                    None => self.note = Some("nothing was done".to_owned()),
                }
            }
        }
        Act::Nothing
    }

    fn press_in_table(&mut self, key: Key, page: usize) -> Act {
        match key {
            Key::Up | Key::Letter('k') => self.choose(self.chosen.saturating_sub(1)),
            Key::Down | Key::Letter('j') => self.choose(self.chosen + 1),
            Key::PageUp => self.choose(self.chosen.saturating_sub(page)),
            Key::PageDown => self.choose(self.chosen + page),
            Key::Home => self.choose(0),
            Key::End => self.choose(usize::MAX),
            Key::Letter('/') => self.mode = Mode::Filter,
            Key::Letter('?') => self.mode = Mode::Help,
            Key::Letter('b') => self.ask(),
            Key::Letter('q') | Key::Escape => return Act::Leave,
            _ => {}
        }
        Act::Nothing
    }

    fn press_in_filter(&mut self, key: Key) {
        match key {
            Key::Enter => {
                self.choose(self.chosen);
                self.mode = Mode::Table;
            }
            // What was chosen before is chosen again.
            Key::Escape => {
                self.filter.clear();
                self.mode = Mode::Table;
            }
            Key::Backspace => drop(self.filter.pop()),
            Key::Letter(letter) => self.add(letter),
            Key::Pasted(text) => text.chars().for_each(|letter| self.add(letter)),
            _ => return,
        }
        self.sift();
    }

    fn add(&mut self, letter: char) {
        if !letter.is_control() && self.filter.len() < LockName::MAX_LEN {
            self.filter.push(letter);
        }
    }

    /// Asks whether the chosen lock is to be taken away.
    fn ask(&mut self) {
        let Some(lock) = self.chosen() else { return };
        let request = Request { name: lock.name.to_string(), victims: victims(&lock.claims, None) };
        if request.victims.is_empty() {
            self.note = Some(format!("lock \"{}\" is held by nobody", printable(&request.name)));
        } else {
            self.mode = Mode::Confirm(request);
        }
    }

    /// Finds what is to be shown, and what is chosen: who chose a lock means it, wherever it stands by now.
    fn sift(&mut self) {
        let locks = self.all().iter().enumerate();
        let shown = locks.filter(|(_, lock)| lock.name.as_str().contains(&self.filter));
        self.shown = shown.map(|(at, _)| at).collect();
        let place = self.shown().position(|lock| Some(&lock.name) == self.meant.as_ref());
        self.chosen = place.unwrap_or(self.chosen).min(self.count().saturating_sub(1));
    }

    fn choose(&mut self, place: usize) {
        self.chosen = place.min(self.count().saturating_sub(1));
        self.meant = self.chosen().map(|lock| lock.name.clone());
    }

    /// Moves what is seen as little as shows the chosen one among so many, without room left empty.
    pub(crate) fn fit(&mut self, page: usize) {
        let least = (self.chosen + 1).saturating_sub(page);
        let most = self.chosen.min(self.count().saturating_sub(page));
        self.first = self.first.clamp(least.min(most), most);
    }

    /// Whether the store has ever answered.
    pub(crate) fn has_locks(&self) -> bool {
        self.locks.is_some()
    }

    /// All locks, also those that the filter hides.
    pub(crate) fn all(&self) -> &[LockState] {
        self.locks.as_deref().unwrap_or_default()
    }

    /// Those that the filter lets through.
    fn shown(&self) -> impl Iterator<Item = &LockState> {
        self.shown.iter().filter_map(|at| self.all().get(*at))
    }

    /// How many these are.
    pub(crate) fn count(&self) -> usize {
        self.shown.len()
    }

    /// Those that have room on a page, and which of them is the chosen one.
    pub(crate) fn seen(&self, page: usize) -> (Vec<&LockState>, usize) {
        (self.shown().skip(self.first).take(page).collect(), self.chosen.saturating_sub(self.first))
    }

    pub(crate) fn chosen(&self) -> Option<&LockState> {
        self.shown().nth(self.chosen)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use clinch::{ClaimId, LockName, Owner, Token};

    use super::*;

    pub(crate) fn time() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000)
    }

    /// A claim of a process whose id is its own.
    pub(crate) fn claim(id: u32, granted: bool) -> ClaimState {
        ClaimState {
            id: ClaimId::from_bits(id.into()),
            mode: clinch::Mode::Exclusive,
            granted,
            token: granted.then(|| Token::new(id.into())).flatten(),
            owner: Owner { host: "web-3".into(), pid: id, user: "deploy".into(), label: "backup".into() },
            since: time() - Duration::from_secs(720),
            expires_in: Some(Duration::from_secs(20)),
        }
    }

    pub(crate) fn lock(name: &str, claims: &[ClaimState]) -> LockState {
        LockState { name: LockName::new(name).unwrap(), claims: claims.to_vec(), closed_until: None }
    }

    pub(crate) fn told(model: &mut Model, locks: &[LockState]) {
        model.hear(Told::Locks(locks.to_vec(), None), Instant::now(), time());
    }

    fn named(names: &[&str]) -> Vec<LockState> {
        names.iter().map(|name| lock(name, &[claim(1, true)])).collect()
    }

    fn chosen(model: &Model) -> &str {
        model.chosen().map_or("", |lock| lock.name.as_str())
    }

    pub(crate) fn type_in(model: &mut Model, keys: &str) {
        for letter in keys.chars() {
            model.press(Key::Letter(letter), 3);
        }
    }

    #[test]
    fn keys_choose_and_stop_at_both_ends() {
        let mut model = Model::default();
        model.press(Key::Down, 3);
        told(&mut model, &named(&["a", "b", "c", "d", "e", "f", "g"]));
        for (key, name) in [
            (Key::Up, "a"),
            (Key::Down, "b"),
            (Key::Letter('j'), "c"),
            (Key::Letter('k'), "b"),
            (Key::PageDown, "e"),
            (Key::PageDown, "g"),
            (Key::Down, "g"),
            (Key::PageUp, "d"),
            (Key::Home, "a"),
            (Key::End, "g"),
        ] {
            assert!(matches!(model.press(key.clone(), 3), Act::Nothing));
            assert_eq!(chosen(&model), name, "{key:?}");
        }
    }

    #[test]
    fn what_is_chosen_stays_chosen_wherever_it_moves() {
        let mut model = Model::default();
        told(&mut model, &named(&["b", "c", "d"]));
        model.press(Key::Down, 3);
        told(&mut model, &named(&["a", "b", "c", "d"]));
        assert_eq!(chosen(&model), "c");
        told(&mut model, &named(&["a", "b", "d"]));
        assert_eq!(chosen(&model), "d", "what stands in its place");
        told(&mut model, &named(&["0", "a", "b", "c", "d"]));
        assert_eq!(chosen(&model), "c", "it was free for a moment");
        told(&mut model, &named(&["a"]));
        assert_eq!(chosen(&model), "a");
        told(&mut model, &[]);
        assert_eq!(chosen(&model), "");
    }

    #[test]
    fn the_chosen_one_is_seen_and_no_room_is_left_empty() {
        let mut model = Model::default();
        told(&mut model, &named(&["a", "b", "c", "d", "e", "f", "g"]));
        let seen = |model: &mut Model, page| {
            model.fit(page);
            let (seen, at) = model.seen(page);
            (seen.iter().map(|lock| lock.name.to_string()).collect::<String>(), at)
        };
        assert_eq!(seen(&mut model, 3), ("abc".into(), 0));
        type_in(&mut model, "jjj");
        assert_eq!(seen(&mut model, 3), ("bcd".into(), 2));
        type_in(&mut model, "k");
        assert_eq!(seen(&mut model, 3), ("bcd".into(), 1));
        model.press(Key::End, 3);
        assert_eq!(seen(&mut model, 3), ("efg".into(), 2));
        assert_eq!(seen(&mut model, 5), ("cdefg".into(), 4), "after the terminal was made larger");
        assert_eq!(seen(&mut model, 1), ("g".into(), 0));
        assert_eq!(seen(&mut model, 0), (String::new(), 0));
        told(&mut model, &named(&["a"]));
        assert_eq!(seen(&mut model, 3), ("a".into(), 0));
    }

    #[test]
    fn a_filter_narrows_while_it_is_typed() {
        let mut model = Model::default();
        told(&mut model, &named(&["db/a", "db/b", "web/b"]));
        model.press(Key::End, 3);
        type_in(&mut model, "/b");
        assert_eq!((model.count(), chosen(&model)), (3, "web/b"));
        model.press(Key::Backspace, 3);
        type_in(&mut model, "/b");
        assert_eq!((model.filter.as_str(), model.count(), chosen(&model)), ("/b", 2, "web/b"));
        model.press(Key::Enter, 3);
        told(&mut model, &named(&["db/bq", "web/q"]));
        assert_eq!((model.count(), model.all().len(), chosen(&model)), (1, 2, "db/bq"));
        assert!(matches!(model.press(Key::Letter('q'), 3), Act::Leave), "keys are keys again");
        type_in(&mut model, "/");
        model.press(Key::Backspace, 3);
        model.press(Key::Pasted("q\n\u{1b}".into()), 3);
        assert_eq!((model.filter.as_str(), chosen(&model)), ("/q", "web/q"));
        model.press(Key::Enter, 3);
        type_in(&mut model, "/");
        model.press(Key::Escape, 3);
        assert_eq!((model.filter.as_str(), model.count(), chosen(&model)), ("", 2, "web/q"));
    }

    #[test]
    fn only_who_was_named_is_evicted_and_only_after_a_yes() {
        let mut model = Model::default();
        type_in(&mut model, "b");
        assert!(matches!(model.mode, Mode::Table), "there is nothing to take");
        told(&mut model, &[lock("x", &[claim(1, true), claim(2, false)])]);
        for no in [Key::Letter('n'), Key::Enter, Key::Escape, Key::Letter('q'), Key::Pasted("y".into())] {
            type_in(&mut model, "b");
            assert!(matches!(model.mode, Mode::Confirm(_)));
            assert!(matches!(model.press(no, 3), Act::Nothing));
            assert!(matches!(model.mode, Mode::Table) && model.evicting == 0);
        }
        type_in(&mut model, "b");
        // It changes hands while the question stands there.
        told(&mut model, &[lock("x", &[claim(2, true)])]);
        let Act::Evict(request) = model.press(Key::Letter('y'), 3) else { panic!("nothing is taken") };
        assert_eq!((request.name.as_str(), request.victims.len()), ("x", 1));
        assert_eq!((request.victims[0].id, model.evicting), (ClaimId::from_bits(1), 1));
        model.hear(Told::Evicted("gone".into()), Instant::now(), time());
        assert_eq!((model.note.as_deref(), model.evicting), (Some("gone"), 0));
    }

    #[test]
    fn what_is_pasted_is_no_key() {
        let mut model = Model::default();
        told(&mut model, &[lock("x", &[claim(1, true)])]);
        assert!(matches!(model.press(Key::Pasted("by".into()), 3), Act::Nothing));
        assert!(matches!(model.mode, Mode::Table));
    }

    #[test]
    fn who_is_held_by_nobody_is_not_broken() {
        let mut model = Model::default();
        told(&mut model, &[lock("x", &[claim(2, false)])]);
        type_in(&mut model, "b");
        assert_eq!(model.note.as_deref(), Some("lock \"x\" is held by nobody"));
        type_in(&mut model, "?");
        assert!(matches!(model.mode, Mode::Help) && model.note.is_none());
        assert!(matches!(model.press(Key::Escape, 3), Act::Nothing), "closes the help");
        assert!(matches!(model.press(Key::Escape, 3), Act::Leave));
        for mode in [Mode::Filter, Mode::Help, Mode::Table] {
            model.mode = mode;
            assert!(matches!(model.press(Key::Interrupt, 3), Act::Leave));
            assert!(matches!(model.press(Key::Suspend, 3), Act::Suspend));
        }
    }
}
