//! One edit of a mutant: whole lines of one file that are found there once, and the lines that stand in their place.

use crate::shell::Result;

/// What is looked for in a file, and what replaces it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Edit {
    /// From the workspace's root.
    pub(super) file: String,
    sought: Vec<String>,
    placed: Vec<String>,
    /// Empty lines that stand in the edit if more of it follows.
    empty: usize,
}

impl Edit {
    pub(super) fn of(file: &str) -> Edit {
        Edit { file: file.to_owned(), sought: Vec::new(), placed: Vec::new(), empty: 0 }
    }

    /// Adds a line as it stands in the mutant: ' ' stays, '-' goes, '+' comes. An empty line between them stays, too: no
    /// editor leaves a blank at a line's end.
    pub(super) fn add(&mut self, line: &str) -> Result {
        let mut text = line.chars();
        let (goes, comes) = match text.next() {
            None => {
                self.empty += usize::from(!self.is_empty());
                return Ok(());
            }
            Some(' ') => (true, true),
            Some('-') => (true, false),
            Some('+') => (false, true),
            Some(_) => return Err(format!("a line of an edit begins with ' ', '-' or '+': {line}")),
        };
        let text = text.as_str();
        for lines in [&mut self.sought, &mut self.placed] {
            lines.extend(std::iter::repeat_n(String::new(), self.empty));
        }
        self.empty = 0;
        self.sought.extend(goes.then(|| text.to_owned()));
        self.placed.extend(comes.then(|| text.to_owned()));
        Ok(())
    }

    fn is_empty(&self) -> bool {
        self.sought.is_empty() && self.placed.is_empty()
    }

    /// Refuses an edit that could not be placed, or would change nothing.
    pub(super) fn check(&self) -> Result {
        if self.sought.is_empty() {
            return Err(format!("{}: nothing to look for: an edit needs a line with '-' or ' '", self.file));
        }
        if self.sought == self.placed {
            return Err(format!("{}: the replacement is equal to what it replaces", self.file));
        }
        Ok(())
    }

    /// The file's text with the edit in it.
    pub(super) fn apply(&self, text: &str) -> Result<String> {
        let lines: Vec<&str> = text.split('\n').collect();
        let places: Vec<usize> = (0..)
            .zip(lines.windows(self.sought.len()))
            .filter_map(|(at, there)| (*there == *self.sought).then_some(at))
            .collect();
        let [at] = places[..] else { return Err(self.misplaced(&lines, &places)) };
        let (before, rest) = lines.split_at(at);
        let (_, after) = rest.split_at(self.sought.len());
        let placed: Vec<&str> = self.placed.iter().map(String::as_str).collect();
        Ok([before, placed.as_slice(), after].concat().join("\n"))
    }

    fn misplaced(&self, lines: &[&str], places: &[usize]) -> String {
        let file = &self.file;
        if !places.is_empty() {
            let at: Vec<String> = places.iter().map(|at| (at + 1).to_string()).collect();
            return format!("{file}: text found {} times, at lines {}", at.len(), at.join(", "));
        }
        let Some(missing) = self.sought.iter().find(|line| !lines.contains(&line.as_str())) else {
            return format!("{file}: text not found: its lines are there, but not one after the other");
        };
        let missing = missing.trim();
        match lines.iter().position(|line| line.trim() == missing) {
            Some(at) => {
                format!("{file}: text not found: line {} is indented otherwise: {missing}", at + 1)
            }
            None => format!("{file}: text not found: {missing}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "fn one() {\n    true\n}\n\nfn two() {\n    true\n}\n";

    fn edit(lines: &[&str]) -> Edit {
        let mut edit = Edit::of("a.rs");
        for line in lines {
            edit.add(line).unwrap();
        }
        edit
    }

    #[test]
    fn what_is_there_once_is_replaced_and_all_else_stays() {
        let edit = edit(&[" fn two() {", "-    true", "+    false"]);
        let mutated = edit.apply(TEXT).unwrap();
        assert_eq!(mutated, "fn one() {\n    true\n}\n\nfn two() {\n    false\n}\n");
    }

    #[test]
    fn lines_are_added_and_taken_out_at_both_ends_of_a_file() {
        assert_eq!(
            edit(&["+// head", " fn one() {"]).apply("fn one() {\n}").unwrap(),
            "// head\nfn one() {\n}"
        );
        assert_eq!(edit(&["-}"]).apply("fn one() {\n}").unwrap(), "fn one() {");
    }

    #[test]
    fn empty_lines_count_between_lines_and_not_around_them() {
        let edit = edit(&["", " }", "", "-fn two() {", "+fn three() {", "", ""]);
        let mutated = edit.apply(TEXT).unwrap();
        assert_eq!(mutated, "fn one() {\n    true\n}\n\nfn three() {\n    true\n}\n");
    }

    #[test]
    fn what_is_there_twice_is_refused_with_its_places() {
        let refused = edit(&["-    true", "+    false"]).apply(TEXT).unwrap_err();
        assert_eq!(refused, "a.rs: text found 2 times, at lines 2, 6");
        let overlapping = edit(&["-a", "-a"]).apply("a\na\na\n").unwrap_err();
        assert_eq!(overlapping, "a.rs: text found 2 times, at lines 1, 2");
    }

    #[test]
    fn what_is_not_there_is_refused_with_the_line_that_is_missing() {
        let refused = |lines: &[&str]| edit(lines).apply(TEXT).unwrap_err();
        assert_eq!(refused(&[" fn one() {", "-    false"]), "a.rs: text not found: false");
        // A part of a line is none.
        assert_eq!(refused(&["-fn one"]), "a.rs: text not found: fn one");
        assert_eq!(
            refused(&["-fn two() {", "-}"]),
            "a.rs: text not found: its lines are there, but not one after the other"
        );
        assert_eq!(refused(&["-        true"]), "a.rs: text not found: line 2 is indented otherwise: true");
    }

    #[test]
    fn an_edit_that_changes_nothing_or_stands_nowhere_is_refused() {
        let equal = "a.rs: the replacement is equal to what it replaces";
        assert_eq!(edit(&["-    true", "+    true"]).check().unwrap_err(), equal);
        assert_eq!(edit(&["     true"]).check().unwrap_err(), equal);
        let nothing = "a.rs: nothing to look for: an edit needs a line with '-' or ' '";
        assert_eq!(edit(&["+    true"]).check().unwrap_err(), nothing);
        assert_eq!(edit(&[]).check().unwrap_err(), nothing);
    }
}
