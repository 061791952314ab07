//! `clinch renew`: a lease of `clinch acquire` lasts longer.

use crate::args::{Renew, Store};
use crate::connect::{insist, is_there};
use crate::documents::{ResultJson, ResultWord, document};
use crate::exit::{Failure, LOST, Outcome};
use crate::output::answer;

pub(crate) async fn run(store: &Store, args: &Renew) -> Outcome {
    let claim = args.claim.parse()?;
    if !is_there(store)? {
        return Err(Failure::new(LOST, format!("nobody holds lock \"{}\" there", args.name)));
    }
    insist(store, async |locks| {
        let ttl = args.ttl.unwrap_or(locks.lease_ttl());
        locks.renew_detached(&args.name, claim, ttl).await
    })
    .await?;
    if args.json {
        answer(&document(ResultJson::new(&args.name, claim, ResultWord::Renewed))?)?;
    }
    Ok(0)
}
