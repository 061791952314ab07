//! `clinch completions`: a shell's completion script.
//!
//! For bash, zsh and fish it asks `clinch complete` at each key; what clap generates stands beside it for a clinch that does not know that.

use clap_complete::{Shell, generate};

use super::complete::visible;
use crate::args::Completions;
use crate::exit::{Failure, Outcome};
use crate::output::show;

/// What each shell asks, and how.
const BASH: &str = include_str!("completions/live.bash");
const ZSH: &str = include_str!("completions/live.zsh");
const FISH: &str = include_str!("completions/live.fish");

/// With what the generated script for zsh registers itself.
const ZSH_END: &str = "\nif [ \"$funcstack[1]\" = \"_clinch\" ]; then\n";

pub(crate) fn run(args: &Completions) -> Outcome {
    let mut script = Vec::new();
    generate(args.shell, &mut visible(), "clinch", &mut script);
    let script =
        String::from_utf8(script).map_err(|error| Failure::system("cannot write the script", error))?;
    show(&match args.shell {
        Shell::Bash => script + BASH,
        Shell::Zsh => script.split(ZSH_END).next().unwrap_or_default().to_owned() + ZSH,
        // Asked once, as its conditions are many.
        Shell::Fish => format!(
            "{FISH}if command clinch complete -- clinch '' >/dev/null 2>&1\n    complete -c clinch -f -a '(__clinch_live)'\n\
             else\n{script}end\n"
        ),
        _ => script,
    })?;
    Ok(0)
}
