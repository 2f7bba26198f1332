//! Attention inside chunks of `chunk` tokens.
//!
//! * needs: the blocks of the chunk that the next token is in;
//! * may drop: blocks of earlier chunks;
//! * a hit requires: the blocks from the start of the chunk that its end is in. A prefix of a hit may be none.

use super::Query;
use crate::error::Result;
use crate::hash::BlockHashes;
use crate::ids::BlockId;

pub(super) fn skipped_tokens(chunk: u64, computed: u64) -> u64 {
    computed - computed % chunk
}

pub(super) fn find_hit<H: BlockHashes + ?Sized>(
    chunk: u64,
    query: &Query<'_, H>,
    sets: &[u32],
    rows: &mut [Vec<BlockId>],
) -> Result<u64> {
    let wanted = query.max_blocks();
    let start = skipped_tokens(chunk, query.max_tokens) / query.tokens_per_block;
    let mut blocks = usize::try_from(start).unwrap_or(usize::MAX).min(wanted);
    for row in rows.iter_mut() {
        row.resize(blocks, BlockId::NULL);
    }
    while blocks < wanted && query.find(blocks, sets, rows)? {
        blocks += 1;
    }
    // A set may have found its block where another had none.
    for row in rows.iter_mut() {
        row.truncate(blocks);
    }
    Ok(blocks as u64 * query.tokens_per_block)
}

pub(super) fn most_blocks(chunk: u64, span: u64, in_flight: u64, max_model_len: u64) -> u64 {
    chunk.saturating_add(in_flight).min(max_model_len).div_ceil(span)
}
