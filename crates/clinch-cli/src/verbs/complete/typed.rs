//! A word as it stands on bash's command line: what it says, and how it is gone on with.
//!
//! Bash puts in what it is given as it is, and the name of a lock is whatever somebody chose: `$(rm -r ~)` must stay a name in any
//! quotes.

/// A word as far as it was typed.
pub(super) struct Typed {
    /// What it says.
    pub(super) says: String,
    /// How much of that stands before what bash replaces: what follows an open quote, else the last sign that parts words for it.
    kept: usize,
    /// The quotes that are open.
    quotes: Option<char>,
}

impl Typed {
    /// Reads a word that is perhaps cut off within quotes.
    pub(super) fn of(word: &str, breaks: &str) -> Typed {
        let (mut says, mut broken, mut opened, mut quotes) = (String::new(), 0, 0, None);
        let mut letters = word.chars();
        while let Some(letter) = letters.next() {
            match (quotes, letter) {
                (None, '\'' | '"') => (quotes, opened) = (Some(letter), says.len()),
                (Some(open), _) if open == letter => quotes = None,
                (None, '\\') => says.extend(letters.next()),
                (Some('"'), '\\') => match letters.next() {
                    Some(letter) if needs_a_backslash(letter) => says.push(letter),
                    other => says.extend(other.into_iter().flat_map(|other| ['\\', other])),
                },
                (None, _) if breaks.contains(letter) => {
                    says.push(letter);
                    broken = says.len();
                }
                _ => says.push(letter),
            }
        }
        let kept = if quotes.is_some() { opened } else { broken };
        Typed { says, kept, quotes }
    }

    /// What bash is to put in so that the word is this one.
    pub(super) fn completed(&self, word: &str) -> Option<String> {
        let rest = word.starts_with(&self.says).then(|| word.get(self.kept..))??;
        Some(match self.quotes {
            Some('\'') => rest.replace('\'', r"'\''"),
            Some(_) => rest.chars().map(in_double_quotes).collect(),
            None => rest.chars().map(in_no_quotes).collect(),
        })
    }
}

/// Within double quotes.
fn needs_a_backslash(letter: char) -> bool {
    "$`\"\\".contains(letter)
}

fn in_double_quotes(letter: char) -> String {
    match letter {
        // Of a `!`, bash would keep the backslash.
        '!' => "\"'!'\"".to_owned(),
        _ if needs_a_backslash(letter) => format!("\\{letter}"),
        _ => letter.to_string(),
    }
}

fn in_no_quotes(letter: char) -> String {
    let is_plain = letter.is_ascii_alphanumeric() || !letter.is_ascii() || "-_./:@%+=".contains(letter);
    if is_plain { letter.to_string() } else { format!("\\{letter}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_read_as_bash_reads_it() {
        for (typed, word) in [
            ("a\\ b", "a b"),
            ("'a b'", "a b"),
            ("\"a b", "a b"),
            ("'a", "a"),
            ("", ""),
            ("a", "a"),
            ("a\\", "a"),
            ("'it'\\''s", "it's"),
            (r#""\$a\b\"'c"#, r#"$a\b"'c"#),
        ] {
            assert_eq!(Typed::of(typed, "").says, word, "{typed}");
        }
    }

    #[test]
    fn a_word_goes_on_in_its_quotes_from_where_bash_replaces_it() {
        for (typed, name, put_in) in [
            ("", "$(a)", Some(r"\$\(a\)")),
            ("\"", "$(a)`b`!", Some("\\$(a)\\`b\\`\"'!'\"")),
            ("'", "it's $(a)", Some(r"it'\''s $(a)")),
            ("'it'\\''", "it's", Some("s")),
            ("a:b", "a:b:c d", Some(r"b:c\ d")),
            ("a\\:b", "a:b c", Some(r"a:b\ c")),
            ("\"a:b", "a:b c", Some("a:b c")),
            ("a:\"b", "a:b c", Some("b c")),
            ("'a'b", "abc", Some("abc")),
            ("b", "abc", None),
        ] {
            assert_eq!(Typed::of(typed, ":=@").completed(name).as_deref(), put_in, "{typed} {name}");
        }
    }
}
