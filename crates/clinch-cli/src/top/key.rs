//! What is typed, by its meaning.

use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

/// What a key means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Key {
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
    Enter,
    Backspace,
    /// Leaves what was begun, and else the program.
    Escape,
    /// Leaves the program.
    Interrupt,
    Suspend,
    Letter(char),
    /// Text that was not typed letter by letter.
    Pasted(String),
}

impl Key {
    /// `None`: one that means nothing.
    pub(crate) fn of(event: Event) -> Option<Key> {
        let KeyEvent { code, modifiers, kind, .. } = match event {
            Event::Key(key) => key,
            Event::Paste(text) => return Some(Key::Pasted(text)),
            _ => return None,
        };
        if kind == KeyEventKind::Release {
            return None;
        }
        let is_with = |modifier| modifiers.contains(modifier);
        Some(match code {
            KeyCode::Char('c') if is_with(KeyModifiers::CONTROL) => Key::Interrupt,
            KeyCode::Char('z') if is_with(KeyModifiers::CONTROL) => Key::Suspend,
            KeyCode::Char(letter) if !is_with(KeyModifiers::CONTROL) && !is_with(KeyModifiers::ALT) => {
                Key::Letter(letter)
            }
            KeyCode::Up => Key::Up,
            KeyCode::Down => Key::Down,
            KeyCode::PageUp => Key::PageUp,
            KeyCode::PageDown => Key::PageDown,
            KeyCode::Home => Key::Home,
            KeyCode::End => Key::End,
            KeyCode::Enter => Key::Enter,
            KeyCode::Backspace => Key::Backspace,
            KeyCode::Esc => Key::Escape,
            _ => return None,
        })
    }
}
