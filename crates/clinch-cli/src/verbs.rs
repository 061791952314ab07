//! One file per verb.

pub(crate) mod acquire;
pub(crate) mod break_;
mod complete;
mod completions;
mod doctor;
mod hold;
mod ls;
mod man;
mod release;
mod renew;
mod run;
mod schema;
mod show;
mod top;
mod watch;

use crate::args::{Cli, Verb};
use crate::connect::block_on;
use crate::exit::Outcome;

/// Does what was asked for.
pub(crate) fn dispatch(cli: Cli) -> Outcome {
    let store = &cli.store;
    match cli.verb {
        Verb::Run(run) => run::run(store, &run),
        Verb::Ls(ls) => block_on(ls::run(store, &ls)),
        Verb::Top(_) => block_on(top::run(store)),
        Verb::Show(show) => block_on(show::run(store, &show)),
        Verb::Acquire(acquire) => block_on(acquire::run(store, &acquire)),
        Verb::Renew(renew) => block_on(renew::run(store, &renew)),
        Verb::Release(release) => block_on(release::run(store, &release)),
        Verb::Break(break_) => block_on(break_::run(store, &break_)),
        Verb::Doctor(doctor) => block_on(doctor::run(store, &doctor)),
        Verb::Completions(completions) => completions::run(&completions),
        Verb::Complete(complete) => complete::run(&complete),
        Verb::Man(man) => man::run(&man),
        Verb::Schema(schema) => schema::run(&schema),
        Verb::EndJob(end) => crate::job::end::run(store, &end),
        Verb::Hold(hold) => block_on(hold::run(store, &hold)),
    }
}
