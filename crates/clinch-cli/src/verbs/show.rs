//! `clinch show`: one lock, and by the exit code whether anybody holds it.

use crate::args::{Show, Store};
use crate::connect::ask;
use crate::exit::{NOBODY, Outcome};
use crate::output::{self, LockJson, describe, json, local, named, short};

pub(crate) async fn run(store: &Store, show: &Show) -> Outcome {
    let state = ask(store, async |locks| locks.state(&show.name).await).await?;
    if show.json {
        output::show(&json(&state.as_ref().map(LockJson::from))?)?;
    } else {
        let mut text = String::new();
        for claim in state.iter().flat_map(|state| &state.claims) {
            let id = named(claim.id).map(|id| format!("claim {id}, ")).unwrap_or_default();
            text += &format!("{}\n  {id}{}", describe(claim), claim.mode);
            if let Some(token) = claim.token.filter(|_| claim.granted) {
                text += &format!(", token {token}");
            }
            match claim.expires_in {
                Some(time) if time.is_zero() => text.push_str(", expired"),
                Some(time) => text += &format!(", expires in {}", short(time)),
                None => {}
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
