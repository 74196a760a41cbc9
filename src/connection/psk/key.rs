//! The key.

use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};

/// A secret that both ends of a connection were given, by whatever means; for
/// [`ConnectionBuilder::pre_shared_key`](crate::ConnectionBuilder::pre_shared_key).
///
/// It is not printed, by `Debug` neither, and not sent.
#[derive(Clone)]
pub struct PreSharedKey(Arc<[u8]>);

impl PreSharedKey {
    /// The shortest key, in bytes.
    pub const MIN_LEN: usize = 16;

    /// A key of these bytes, of which 32 random ones are a good choice: `head -c 32 /dev/urandom`.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`] when it is shorter than [`MIN_LEN`](Self::MIN_LEN).
    pub fn new(secret: impl AsRef<[u8]>) -> Result<Self> {
        let secret = secret.as_ref();
        if secret.len() < Self::MIN_LEN {
            return Err(Error::Limit {
                operation: "make a pre-shared key",
                what: "length",
                value: secret.len() as u64,
                limit: Self::MIN_LEN as u64,
                hint: "that is the shortest; take random bytes, 32 of them",
            });
        }
        Ok(Self(secret.into()))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for PreSharedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PreSharedKey(..)")
    }
}
