//! `clinch show`: one lock, and by the exit code whether anybody holds it.

use std::time::SystemTime;

use clinch::backend::{ClaimState, LockState};

use crate::args::{Show, Store};
use crate::connect::{insist, is_there};
use crate::documents::{LockJson, ShownJson, document, moment, named};
use crate::exit::{NOBODY, Outcome};
use crate::output::{self, closed_until, describe, short};
use crate::turn;

pub(crate) async fn run(store: &Store, show: &Show) -> Outcome {
    let (state, turn) = match is_there(store)? {
        true => look(store, &show.name).await?,
        false => (None, Ok(None)),
    };
    // A lock is shown also where others keep its turn to themselves.
    let (turn, unread) = turn.map_or_else(|why| (None, Some(why)), |turn| (turn, None));
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
        if text.is_empty() && unread.is_none() {
            text.push_str("free\n");
        }
        output::show(&text)?;
    }
    if let Some(why) = unread {
        return Err(why.into());
    }
    Ok(if claims().any(|claim| claim.granted) { 0 } else { NOBODY })
}

/// One lock, and its turn.
async fn look(
    store: &Store,
    name: &str,
) -> clinch::Result<(Option<LockState>, clinch::Result<Option<SystemTime>>)> {
    insist(store, async |locks| {
        let (state, turn) = tokio::join!(locks.state(name), turn::closed_until(locks, name));
        Ok((state?, turn))
    })
    .await
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
