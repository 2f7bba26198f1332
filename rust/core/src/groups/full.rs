//! Full attention, multi-head latent attention included.
//!
//! * needs: a block for every `tokens_per_block` tokens of the request, for as long as it lives;
//! * may drop: nothing;
//! * a hit requires: every block from the first token on. A prefix of a hit is a hit. Where hits may end inside a block, the
//!   last one may be a block that holds more than the hit; it is copied before the request writes to it.

use super::Query;
use crate::error::Result;
use crate::hash::BlockHashes;
use crate::ids::BlockId;

pub(super) fn find_hit<H: BlockHashes + ?Sized>(
    query: &Query<'_, H>,
    sets: &[u32],
    rows: &mut [Vec<BlockId>],
) -> Result<u64> {
    let &Query { tokens_per_block: span, alignment, .. } = query;
    let wanted = query.max_blocks();
    let mut matched = 0;
    while matched < wanted && query.find(matched, sets, rows)? {
        matched += 1;
    }
    // A set may have found its block where another had none.
    for row in rows.iter_mut() {
        row.truncate(matched);
    }
    let mut tokens = matched as u64 * span;

    if query.is_fine_grained() {
        // From the right, because the longest hit is wanted: an end inside the first block that was not found.
        let first = matched * query.hashes_per_block;
        let ends = query.max_hashes().min(first + query.hashes_per_block - 1);
        for end in (first + 1..=ends).rev() {
            if query.find_hash(end - 1, matched, sets, rows)? {
                tokens = end as u64 * alignment;
                break;
            }
            for row in rows.iter_mut() {
                row.truncate(matched);
            }
        }
    }

    if query.drop_last_block && tokens > 0 {
        tokens -= span.min(alignment);
    }
    tokens -= tokens % alignment;
    trim(rows, tokens, span);
    Ok(tokens)
}

/// Cuts rows of a hit to a shorter one.
pub(crate) fn trim(rows: &mut [Vec<BlockId>], tokens: u64, tokens_per_block: u64) {
    let blocks = usize::try_from(tokens.div_ceil(tokens_per_block)).unwrap_or(usize::MAX);
    for row in rows {
        row.truncate(blocks);
    }
}
