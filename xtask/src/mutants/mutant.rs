//! A mutant as it is written in `mutants/`: why it is wrong, which test sees it, and its edits.

use std::path::Path;

use super::edit::Edit;
use crate::shell::Result;

/// What the name of a mutant's file ends with.
pub(super) const ENDING: &str = ".mutant";

/// A known way to get a lock wrong.
#[derive(Debug)]
pub(super) struct Mutant {
    pub(super) name: String,
    /// What goes wrong with it.
    pub(super) reason: String,
    /// Chooses the executable of the test that catches it, from the whole workspace.
    pub(super) target: Vec<String>,
    /// The test's whole name.
    pub(super) test: String,
    /// The words with which the test fails.
    pub(super) with: String,
    edits: Vec<Edit>,
}

/// A file that a mutant changes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Change {
    /// From the workspace's root.
    pub(super) file: String,
    pub(super) sound: String,
    pub(super) mutated: String,
}

impl Mutant {
    /// Reads the text of the mutant with this name.
    pub(super) fn parse(name: &str, text: &str) -> Result<Mutant> {
        let of = |failure: String| format!("mutants/{name}{ENDING}: {failure}");
        let (mut reason, mut caught_by, mut with) = (Vec::new(), None, None);
        let mut edits: Vec<Edit> = Vec::new();
        for (line, number) in text.lines().zip(1..) {
            if let Some(file) = line.strip_prefix("in:") {
                edits.push(Edit::of(file.trim()));
            } else if let Some(edit) = edits.last_mut() {
                edit.add(line).map_err(|failure| of(format!("line {number}: {failure}")))?;
            } else if let Some(value) = line.strip_prefix("caught-by:") {
                caught_by = Some(value);
            } else if let Some(value) = line.strip_prefix("with:") {
                with = Some(value.trim());
            } else if !line.trim().is_empty() {
                reason.push(line);
            }
        }
        let missing = |what: &str| of(format!("no line \"{what} ...\""));
        if reason.is_empty() {
            return Err(of("the first line says what goes wrong with it".to_owned()));
        }
        let (target, test) = test(caught_by.ok_or_else(|| missing("caught-by:"))?).map_err(of)?;
        let with = with.filter(|with| !with.is_empty()).ok_or_else(|| missing("with:"))?;
        if edits.is_empty() {
            return Err(missing("in:"));
        }
        edits.iter().try_for_each(Edit::check).map_err(of)?;
        let (name, reason, with) = (name.to_owned(), reason.join(" "), with.to_owned());
        Ok(Mutant { name, reason, target, test, with, edits })
    }

    /// What the mutant makes of the files in this tree, which stay as they are. Each edit is looked for in what those before
    /// it have left.
    pub(super) fn changes(&self, tree: &Path) -> Result<Vec<Change>> {
        let mut changes: Vec<Change> = Vec::new();
        for edit in &self.edits {
            let of = |failure: String| format!("mutants/{}{ENDING}: {failure}", self.name);
            if let Some(change) = changes.iter_mut().find(|change| change.file == edit.file) {
                change.mutated = edit.apply(&change.mutated).map_err(of)?;
                continue;
            }
            let sound = std::fs::read_to_string(tree.join(&edit.file))
                .map_err(|error| of(format!("{}: {error}", edit.file)))?;
            let mutated = edit.apply(&sound).map_err(of)?;
            changes.push(Change { file: edit.file.clone(), sound, mutated });
        }
        Ok(changes)
    }
}

/// Splits what chooses a test: its executable, and its name in there.
fn test(caught_by: &str) -> Result<(Vec<String>, String)> {
    let words: Vec<&str> = caught_by.split_whitespace().collect();
    match words[..] {
        ["--lib", test] => Ok((vec!["--lib".to_owned()], test.to_owned())),
        [kind @ ("--test" | "--bin"), executable, test] => {
            Ok((vec![kind.to_owned(), executable.to_owned()], test.to_owned()))
        }
        _ => Err(format!(
            "\"caught-by:\" is \"--lib TEST\", \"--test NAME TEST\" or \"--bin NAME TEST\", not \"{}\"",
            caught_by.trim()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
The deadline counts from the answer,
not from the request.

caught-by: --test memory conformance::time::deadline
with: the deadline is

in: src/a.rs
-one
+two

in: b.lua
 head
+more

in: src/a.rs
-two
-three
+four
";

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let tree = tempfile::tempdir().unwrap();
        std::fs::create_dir(tree.path().join("src")).unwrap();
        for (file, text) in files {
            std::fs::write(tree.path().join(file), text).unwrap();
        }
        tree
    }

    fn refused(from: &str, to: &str) -> String {
        assert!(TEXT.contains(from));
        let refused = Mutant::parse("late", &TEXT.replace(from, to)).unwrap_err();
        refused.strip_prefix("mutants/late.mutant: ").unwrap().to_owned()
    }

    #[test]
    fn its_head_says_why_it_is_wrong_and_which_test_sees_it() {
        let mutant = Mutant::parse("late", TEXT).unwrap();
        assert_eq!(mutant.reason, "The deadline counts from the answer, not from the request.");
        assert_eq!(mutant.target, ["--test", "memory"]);
        assert_eq!(mutant.test, "conformance::time::deadline");
        assert_eq!(mutant.with, "the deadline is");
    }

    #[test]
    fn edits_of_one_file_follow_each_other_and_the_tree_stays_as_it_is() {
        let tree = tree(&[("src/a.rs", "one\nthree\n"), ("b.lua", "head\n")]);
        let changes = Mutant::parse("late", TEXT).unwrap().changes(tree.path()).unwrap();
        let change = |file: &str, sound: &str, mutated: &str| Change {
            file: file.to_owned(),
            sound: sound.to_owned(),
            mutated: mutated.to_owned(),
        };
        let expected =
            [change("src/a.rs", "one\nthree\n", "four\n"), change("b.lua", "head\n", "head\nmore\n")];
        assert_eq!(changes, expected);
        assert_eq!(std::fs::read_to_string(tree.path().join("src/a.rs")).unwrap(), "one\nthree\n");
    }

    #[test]
    fn a_missing_file_and_a_missing_text_are_told_with_the_mutants_name() {
        let failure =
            |tree: &tempfile::TempDir| Mutant::parse("late", TEXT).unwrap().changes(tree.path()).unwrap_err();
        let without = failure(&tree(&[("src/a.rs", "one\nthree\n")]));
        assert!(without.starts_with("mutants/late.mutant: b.lua: No such file"), "{without}");
        let other = failure(&tree(&[("src/a.rs", "one\nthree\n"), ("b.lua", "foot\n")]));
        assert_eq!(other, "mutants/late.mutant: b.lua: text not found: head");
    }

    #[test]
    fn a_mutant_that_lacks_something_is_refused() {
        assert_eq!(
            refused("The deadline counts from the answer,\nnot from the request.\n", ""),
            "the first line says what goes wrong with it"
        );
        assert_eq!(refused("caught-by: ", "caught by "), "no line \"caught-by: ...\"");
        assert_eq!(refused("with: the deadline is", "with:"), "no line \"with: ...\"");
        assert_eq!(TEXT.split("in: ").next().map(|head| refused(TEXT, head)).unwrap(), "no line \"in: ...\"");
        assert_eq!(refused("+two", "+one"), "src/a.rs: the replacement is equal to what it replaces");
        assert_eq!(refused("+two", "two"), "line 9: a line of an edit begins with ' ', '-' or '+': two");
    }

    #[test]
    fn a_test_is_chosen_by_its_executable_and_its_whole_name() {
        for (caught_by, target) in [
            ("--lib a::tests::b", &["--lib"][..]),
            ("--bin clinch b", &["--bin", "clinch"]),
            ("--test file b", &["--test", "file"]),
        ] {
            assert_eq!(test(caught_by).unwrap().0, target);
        }
        for other in ["", "b", "--lib", "--test file", "--package clinch --lib b", "--test file -- --exact b"]
        {
            assert!(test(other).unwrap_err().ends_with(&format!("not \"{other}\"")), "{other}");
        }
    }
}
