//! `clinch show`: one lock, and by the exit code whether anybody holds it.

use crate::args::{Show, Store};
use crate::connect::ask;
use crate::exit::{NOBODY, Outcome};
use crate::output::{self, LockJson, describe, json, local};

pub(crate) async fn run(store: &Store, show: &Show) -> Outcome {
    let state = ask(store, async |locks| locks.state(&show.name).await).await?;
    if show.json {
        output::show(&json(&state.as_ref().map(LockJson::from))?)?;
    } else {
        let mut text = String::new();
        for claim in state.iter().flat_map(|state| &state.claims) {
            text += &format!("{}\n  claim {}, {}", describe(claim), claim.id, claim.mode);
            if let Some(token) = claim.token.filter(|_| claim.granted) {
                text += &format!(", token {token}");
            }
            if let Some(time) = claim.expires_in {
                text += &format!(", expires in {}", crate::output::short(time));
            }
            text.push('\n');
        }
        if let Some(until) = state.as_ref().and_then(|state| state.closed_until) {
            text += &format!("closed until {}\n", local(until));
        }
        if text.is_empty() {
            text.push_str("free\n");
        }
        output::show(&text)?;
    }
    let held = state.is_some_and(|state| state.claims.iter().any(|claim| claim.granted));
    Ok(if held { 0 } else { NOBODY })
}
