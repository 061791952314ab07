//! `clinch man`: the manual page, as roff.

use clap::CommandFactory;

use crate::args::{Cli, Man};
use crate::exit::{Failure, Outcome};
use crate::output::show;

pub(crate) fn run(args: &Man) -> Outcome {
    // Help is not by a page of its own.
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    let command = match &args.verb {
        None => command,
        Some(verb) => {
            let found = command.find_subcommand(verb).filter(|verb| !verb.is_hide_set());
            let found = found.ok_or_else(|| Failure::usage(format!("there is no verb \"{verb}\"")))?;
            found.clone().name(format!("clinch-{verb}"))
        }
    };
    let mut page = Vec::new();
    clap_mangen::Man::new(command)
        .render(&mut page)
        .map_err(|error| Failure::system("cannot write the page", error))?;
    show(&with_examples(&String::from_utf8_lossy(&page)))?;
    Ok(0)
}

/// A page whose examples, lines that begin with two blanks, are not filled to a paragraph.
fn with_examples(page: &str) -> String {
    let (mut text, mut is_example) = (String::new(), false);
    for line in page.lines() {
        if std::mem::replace(&mut is_example, line.starts_with("  ")) != is_example {
            text += if is_example { ".nf\n" } else { ".fi\n" };
        }
        text += &format!("{line}\n");
    }
    text
}
