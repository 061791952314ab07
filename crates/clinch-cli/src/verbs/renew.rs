//! `clinch renew`: a lease of `clinch acquire` lasts longer.

use crate::args::{Renew, Store};
use crate::connect::{close, insist, is_there};
use crate::documents::{ResultJson, ResultWord, document};
use crate::exit::{Failure, LOST, Outcome};
use crate::output::answer;

pub(crate) async fn run(store: &Store, args: &Renew) -> Outcome {
    let claim = args.claim.parse()?;
    if !is_there(store)? {
        return Err(Failure::new(LOST, format!("nobody holds lock \"{}\" there", args.name)));
    }
    let locks = insist(store, async |locks| {
        let ttl = args.ttl.unwrap_or(locks.lease_ttl());
        locks.renew_detached(&args.name, claim, ttl).await.map(|()| locks.clone())
    })
    .await?;
    // Servers that were not needed for the answer may have yet to be told.
    let _ = close(&locks).await;
    if args.json {
        answer(&document(ResultJson::new(&args.name, claim, ResultWord::Renewed))?)?;
    }
    Ok(0)
}
