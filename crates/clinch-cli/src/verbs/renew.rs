//! `clinch renew`: a lease of `clinch acquire` lasts longer.

use crate::args::{Renew, Store};
use crate::connect::insist;
use crate::exit::Outcome;
use crate::output::{ResultJson, answer, json};

pub(crate) async fn run(store: &Store, args: &Renew) -> Outcome {
    let claim = args.claim.parse()?;
    insist(store, async |locks| {
        let ttl = args.ttl.unwrap_or(locks.lease_ttl());
        locks.renew_detached(&args.name, claim, ttl).await
    })
    .await?;
    if args.json {
        answer(&json(&ResultJson::new(&args.name, claim, "renewed"))?)?;
    }
    Ok(0)
}
