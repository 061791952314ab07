//! `clinch ls`: locks that are held, waited for or kept closed.

use crate::args::{Ls, Store};
use crate::connect::connect;
use crate::exit::Outcome;
use crate::output::{LockJson, json, show, table};

pub(crate) async fn run(store: &Store, ls: &Ls) -> Outcome {
    let locks = connect(store).await?.list(&ls.prefix).await?;
    if ls.json {
        show(&json(&locks.iter().map(LockJson::from).collect::<Vec<_>>())?)?;
    } else if !locks.is_empty() {
        show(&table(&locks))?;
    }
    Ok(0)
}
