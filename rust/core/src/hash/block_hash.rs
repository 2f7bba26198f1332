//! A block hash, and lists of them that are read one at a time.

use std::fmt;

use crate::error::{Error, Result};

/// The hash of a block's tokens and all tokens before them: 16 or 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockHash {
    bytes: [u8; 32],
    len: u8,
}

impl BlockHash {
    /// A block hash of these bytes.
    ///
    /// # Errors
    /// [`Error::Config`] unless there are 16 or 32.
    pub fn new(bytes: &[u8]) -> Result<Self> {
        let mut padded = [0; 32];
        match bytes.len() {
            16 | 32 => padded[..bytes.len()].copy_from_slice(bytes),
            other => return Err(Error::config(format!("a block hash must be 16 or 32 bytes long, got {other}"))),
        }
        #[allow(clippy::cast_possible_truncation, reason = "16 or 32")]
        Ok(Self { bytes: padded, len: bytes.len() as u8 })
    }

    /// The bytes.
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockHash(")?;
        self.as_bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        write!(f, ")")
    }
}

/// A request's block hashes in order. Operations read only those they need, so a list that lives elsewhere (in a
/// Python list, say) is not converted as a whole.
pub trait BlockHashes {
    /// How many there are.
    fn count(&self) -> usize;

    /// The hash at this place, which is less than `count`.
    ///
    /// # Errors
    /// [`Error::Config`] if what is there is not a block hash.
    fn get(&self, at: usize) -> Result<BlockHash>;
}

impl<T: AsRef<[u8]>> BlockHashes for [T] {
    fn count(&self) -> usize {
        self.len()
    }

    fn get(&self, at: usize) -> Result<BlockHash> {
        BlockHash::new(self[at].as_ref()).map_err(|error| Error::config(format!("block_hashes[{at}]: {error}")))
    }
}
