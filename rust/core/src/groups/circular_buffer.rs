//! A buffer of one block that a request writes round and round, such as the open group of a compressed cache.
//!
//! * needs: one block for as long as the request lives, however long that is;
//! * may drop: nothing;
//! * a hit requires: nothing, and brings nothing. What is in the buffer is never shared.

/// Blocks of a request.
pub(super) const BLOCKS: u64 = 1;
