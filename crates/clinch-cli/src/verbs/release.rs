//! `clinch release`: the end of a lease of `clinch acquire`.

use clinch::{Loss, LossKind, Released};

use crate::args::{Release, Store};
use crate::connect::{close, insist, is_there};
use crate::documents::{ResultJson, ResultWord, document};
use crate::exit::{Failure, LOST, Outcome};
use crate::output::answer;

pub(crate) async fn run(store: &Store, args: &Release) -> Outcome {
    let claim = args.claim.parse()?;
    let released = match is_there(store)? {
        // A release repeats by itself what was not answered: a second one would call lost what the first has freed.
        true => {
            let (locks, released) = insist(store, async |locks| {
                Ok((locks.clone(), locks.release_detached(&args.name, claim).await))
            })
            .await?;
            // Servers that were not needed for the answer may have yet to be told. It stands in any case.
            let _ = close(&locks).await;
            released?
        }
        false => Released::AlreadyLost(Loss::new(LossKind::Deleted, "nobody has locked anything there")),
    };
    let result = if released == Released::Released { ResultWord::Released } else { ResultWord::Lost };
    if args.json {
        answer(&document(ResultJson::new(&args.name, claim, result))?)?;
    }
    match released {
        Released::Released => Ok(0),
        Released::AlreadyLost(loss) => {
            Err(Failure::new(LOST, format!("lock \"{}\" was already lost: {loss}", args.name)))
        }
    }
}
