//! One file per verb.

pub(crate) mod acquire;
mod break_;
mod complete;
mod completions;
mod hold;
mod ls;
mod man;
mod release;
mod renew;
mod run;
mod show;

use crate::args::{Cli, Verb};
use crate::connect::block_on;
use crate::exit::Outcome;

/// Does what was asked for.
pub(crate) fn dispatch(cli: Cli) -> Outcome {
    let store = &cli.store;
    match cli.verb {
        Verb::Run(run) => run::run(store, &run),
        Verb::Ls(ls) => block_on(ls::run(store, &ls)),
        Verb::Show(show) => block_on(show::run(store, &show)),
        Verb::Acquire(acquire) => block_on(acquire::run(store, &acquire)),
        Verb::Renew(renew) => block_on(renew::run(store, &renew)),
        Verb::Release(release) => block_on(release::run(store, &release)),
        Verb::Break(break_) => block_on(break_::run(store, &break_)),
        Verb::Completions(completions) => completions::run(&completions),
        Verb::Complete(complete) => complete::run(&complete),
        Verb::Man(man) => man::run(&man),
        Verb::EndJob(end) => crate::job::end::run(&end),
        Verb::Hold(hold) => block_on(hold::run(store, &hold)),
    }
}
