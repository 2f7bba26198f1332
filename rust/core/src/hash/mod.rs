//! Block hashes.

mod block_hash;

pub use block_hash::{BlockHash, BlockHashes};
