//! `clinch release`: the end of a lease of `clinch acquire`.

use clinch::Released;

use crate::args::{Release, Store};
use crate::connect::ask;
use crate::documents::{ResultJson, ResultWord, document};
use crate::exit::{Failure, LOST, Outcome};
use crate::output::answer;

pub(crate) async fn run(store: &Store, args: &Release) -> Outcome {
    let claim = args.claim.parse()?;
    let released = ask(store, async |locks| locks.release_detached(&args.name, claim).await).await?;
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
