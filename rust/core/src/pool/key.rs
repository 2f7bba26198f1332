//! The key a block's content is found by: opaque bytes of fixed capacity, so that a key never needs the heap.

use std::fmt;

use crate::error::{Error, Result};

/// Longest key in bytes: a 32-byte block hash and a 4-byte set number, with room to spare.
pub const MAX_KEY_BYTES: usize = 40;

/// 1 to 40 opaque bytes. Unused bytes are zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    bytes: [u8; MAX_KEY_BYTES],
    len: u8,
}

impl Key {
    /// A key of these bytes.
    ///
    /// # Errors
    /// [`Error::Config`] if there are none or more than [`MAX_KEY_BYTES`].
    pub fn new(bytes: &[u8]) -> Result<Self> {
        match u8::try_from(bytes.len()) {
            Ok(len @ 1..=40) => {
                let mut padded = [0; MAX_KEY_BYTES];
                padded[..bytes.len()].copy_from_slice(bytes);
                Ok(Self { bytes: padded, len })
            }
            _ => Err(Error::config(format!("a key must be 1 to {MAX_KEY_BYTES} bytes long, got {}", bytes.len()))),
        }
    }

    /// The key of a block hash inside a numbered set: the hash followed by the number, big endian. `hash` must not be
    /// longer than 36 bytes.
    #[inline]
    pub(crate) fn of_block(hash: &[u8], set: u32) -> Self {
        let mut bytes = [0; MAX_KEY_BYTES];
        let end = hash.len() + 4;
        bytes[..hash.len()].copy_from_slice(hash);
        bytes[hash.len()..end].copy_from_slice(&set.to_be_bytes());
        #[allow(clippy::cast_possible_truncation, reason = "at most 40")]
        Self { bytes, len: end as u8 }
    }

    /// The block hash and the set number of a key made by [`Key::of_block`].
    pub(crate) fn split_block(&self) -> (&[u8], u32) {
        let (hash, set) = self.as_bytes().split_at(usize::from(self.len).saturating_sub(4));
        (hash, set.iter().fold(0, |number, byte| (number << 8) | u32::from(*byte)))
    }

    /// The bytes.
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// The padded bytes as five words, for hashing.
    #[inline]
    pub(crate) fn words(&self) -> [u64; 5] {
        let mut words = [0; 5];
        for (word, bytes) in words.iter_mut().zip(self.bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        words
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key(")?;
        self.as_bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        write!(f, ")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_outside_the_range_are_refused() {
        assert!(Key::new(&[]).is_err());
        assert!(Key::new(&[7; 41]).is_err());
        for len in 1..=40 {
            assert_eq!(Key::new(&vec![7; len]).expect("in range").as_bytes(), vec![7; len]);
        }
    }

    #[test]
    fn padding_does_not_make_keys_equal() {
        assert_ne!(Key::new(&[1]), Key::new(&[1, 0]));
    }

    #[test]
    fn a_block_key_gives_back_its_parts() {
        for hash in [vec![9; 16], vec![9; 32]] {
            let key = Key::of_block(&hash, 0x0102_0304);
            assert_eq!(key.split_block(), (hash.as_slice(), 0x0102_0304));
        }
    }
}
