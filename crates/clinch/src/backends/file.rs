//! `file://`: locks of one host on byte ranges of files.

use crate::env::Env;
use crate::error::{Error, ErrorKind, Result};
use crate::url::StoreUrl;

/// Opens the store of a URL.
pub(crate) fn open(_url: &mut StoreUrl, _env: &Env) -> Result<std::sync::Arc<dyn crate::backend::Backend>> {
    Err(Error::new(ErrorKind::Unsupported, "not yet"))
}
