//! `clinch release`: the end of a lease of `clinch acquire`.

use clinch::Released;

use crate::args::{Release, Store};
use crate::connect::ask;
use crate::exit::{Failure, LOST, Outcome};
use crate::output::{ResultJson, answer, json};

pub(crate) async fn run(store: &Store, args: &Release) -> Outcome {
    let claim = args.claim.parse()?;
    let released = ask(store, async |locks| locks.release_detached(&args.name, claim).await).await?;
    let result = if released == Released::Released { "released" } else { "lost" };
    if args.json {
        answer(&json(&ResultJson::new(&args.name, claim, result))?)?;
    }
    match released {
        Released::Released => Ok(0),
        Released::AlreadyLost(loss) => {
            Err(Failure::new(LOST, format!("lock \"{}\" was already lost: {loss}", args.name)))
        }
    }
}
