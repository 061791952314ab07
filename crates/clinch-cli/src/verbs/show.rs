//! `clinch show`: one lock, and by the exit code whether anybody holds it.

use clinch::backend::ClaimState;

use crate::args::{Show, Store};
use crate::connect::ask;
use crate::documents::{LockJson, ShownJson, document, moment, named};
use crate::exit::{NOBODY, Outcome};
use crate::output::{self, closed_until, describe, short};
use crate::turn;

pub(crate) async fn run(store: &Store, show: &Show) -> Outcome {
    let (state, turn) = ask(store, async |locks| {
        tokio::try_join!(locks.state(&show.name), turn::closed_until(&locks, &show.name))
    })
    .await?;
    let claims = || state.iter().flat_map(|state| &state.claims);
    if show.json {
        let lock = state.as_ref().map_or_else(|| LockJson::free(&show.name), LockJson::from);
        output::show(&document(ShownJson { lock, once_per_until: moment(turn) })?)?;
    } else {
        let mut text: String = claims().map(at_length).collect();
        if let Some(until) = state.as_ref().and_then(|state| state.closed_until) {
            text += &format!("{}\n", closed_until(until));
        }
        if let Some(until) = turn {
            text += &format!("to --once-per {}\n", closed_until(until));
        }
        if text.is_empty() {
            text.push_str("free\n");
        }
        output::show(&text)?;
    }
    Ok(if claims().any(|claim| claim.granted) { 0 } else { NOBODY })
}

fn at_length(claim: &ClaimState) -> String {
    let id = named(claim.id).map(|id| format!("claim {id}, ")).unwrap_or_default();
    let mut text = format!("{}\n  {id}{}", describe(claim), claim.mode);
    if let Some(token) = claim.token.filter(|_| claim.granted) {
        text += &format!(", token {token}");
    }
    match claim.expires_in {
        Some(time) if time.is_zero() => text.push_str(", expired"),
        Some(time) => text += &format!(", expires in {}", short(time)),
        None => {}
    }
    text + "\n"
}
