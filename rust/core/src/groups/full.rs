//! Full attention, multi-head latent attention included.
//!
//! * needs: a block for every `tokens_per_block` tokens of the request, for as long as it lives;
//! * may drop: nothing;
//! * a hit requires: every block from the first token on. A prefix of a hit is a hit.

use super::Query;
use crate::error::Result;
use crate::hash::BlockHashes;
use crate::ids::BlockId;

pub(super) fn find_hit<H: BlockHashes + ?Sized>(
    query: &Query<'_, H>,
    sets: &[u32],
    rows: &mut [Vec<BlockId>],
) -> Result<u64> {
    let wanted = query.max_blocks();
    let mut matched = 0;
    while matched < wanted && query.find(matched, sets, rows)? {
        matched += 1;
    }

    let mut tokens = matched as u64 * query.tokens_per_block;
    if query.drop_last_block && tokens > 0 {
        tokens -= query.tokens_per_block.min(query.alignment);
    }
    tokens -= tokens % query.alignment;
    trim(rows, tokens, query.tokens_per_block);
    Ok(tokens)
}

/// Cuts rows of a hit to a shorter one.
pub(crate) fn trim(rows: &mut [Vec<BlockId>], tokens: u64, tokens_per_block: u64) {
    let blocks = usize::try_from(tokens.div_ceil(tokens_per_block)).unwrap_or(usize::MAX);
    for row in rows {
        row.truncate(blocks);
    }
}
