//! Lock names: parsed once, valid ever after.

use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::error::{Error, Result};

/// The name of a lock: 1 to 512 bytes of UTF-8 without NUL, compared byte for byte on every store.
///
/// Slashes, dots, percent signs, braces and spaces are ordinary characters: `a` and `a/b` are two locks that do not
/// touch, `Job` and `job` too, and so are the two Unicode spellings of `é`. Each backend encodes names so that this
/// stays true on a store that would fold them.
///
/// # Examples
///
/// ```
/// use clinch::LockName;
///
/// assert!(LockName::new("reports/daily").is_ok());
/// assert!(LockName::new("").is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LockName(Arc<str>);

impl LockName {
    /// The longest name, in bytes.
    pub const MAX_LEN: usize = 512;

    /// Checks a name.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) when it is empty, longer than [`LockName::MAX_LEN`] bytes or
    /// holds a NUL.
    pub fn new(name: impl AsRef<str>) -> Result<LockName> {
        let name = name.as_ref();
        if name.is_empty() {
            return Err(Error::invalid("a lock name must have at least 1 byte"));
        }
        if name.len() > LockName::MAX_LEN {
            return Err(Error::invalid(format!(
                "a lock name may have at most {} bytes; this one has {}",
                LockName::MAX_LEN,
                name.len()
            )));
        }
        if let Some(at) = name.bytes().position(|byte| byte == 0) {
            return Err(Error::invalid(format!("a lock name may not hold NUL; this one does at byte {at}")));
        }
        Ok(LockName(name.into()))
    }

    /// The name as it was given.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for LockName {
    fn borrow(&self) -> &str {
        self.as_str()
    }
}

impl fmt::Display for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for LockName {
    type Err = Error;

    fn from_str(name: &str) -> Result<LockName> {
        LockName::new(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_outside_the_bounds_are_refused_with_the_figures() {
        assert!(LockName::new("x".repeat(512)).is_ok());
        let long = LockName::new("x".repeat(513)).unwrap_err().to_string();
        assert!(long.contains("512") && long.contains("513"), "{long}");
        assert!(LockName::new("").is_err());
        assert!(LockName::new("a\0b").unwrap_err().to_string().contains("byte 1"));
    }

    #[test]
    fn names_that_look_alike_stay_apart() {
        let names =
            ["a", "A", "a/b", "a%2Fb", "..", "é", "e\u{301}"].map(|name| LockName::new(name).unwrap());
        for (i, one) in names.iter().enumerate() {
            assert!(names.iter().skip(i + 1).all(|other| one != other));
        }
    }
}
