//! `clinch completions`: a shell's completion script.

use clap::CommandFactory;

use crate::args::{Cli, Completions};
use crate::exit::{Failure, Outcome};
use crate::output::show;

pub(crate) fn run(args: &Completions) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "clinch", &mut script);
    show(&String::from_utf8(script).map_err(|error| Failure::system("cannot write the script", error))?)?;
    Ok(0)
}
