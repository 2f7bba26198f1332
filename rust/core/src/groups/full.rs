//! Full attention, multi-head latent attention included.
//!
//! * needs: a block for every `tokens_per_block` tokens of the request, for as long as it lives;
//! * may drop: nothing;
//! * a hit requires: every block from the first token on. A prefix of a hit is a hit.

use crate::error::Result;
use crate::hash::BlockHashes;
use crate::ids::BlockId;
use crate::pool::{BlockPool, Key};

/// What a lookup of one or more rows of equal geometry is asked for.
pub(crate) struct Query<'a, H: BlockHashes + ?Sized> {
    pub(crate) pool: &'a BlockPool,
    pub(crate) hashes: &'a H,
    /// Block hashes per block.
    pub(crate) hashes_per_block: usize,
    pub(crate) tokens_per_block: u64,
    /// No hit is longer.
    pub(crate) max_tokens: u64,
    /// Hits are multiples of this.
    pub(crate) alignment: u64,
    /// Leave the last block to be computed again, for a draft model that needs its hidden states.
    pub(crate) drop_last_block: bool,
}

/// The longest hit that all `sets` share, in tokens. Their blocks replace what is in `rows`, one row per set.
pub(crate) fn find_hit<H: BlockHashes + ?Sized>(
    query: &Query<'_, H>,
    sets: &[u32],
    rows: &mut [Vec<BlockId>],
) -> Result<u64> {
    rows.iter_mut().for_each(Vec::clear);
    let hashed_blocks = query.hashes.count() / query.hashes_per_block;
    let wanted = usize::try_from(query.max_tokens / query.tokens_per_block)
        .map_or(hashed_blocks, |blocks| blocks.min(hashed_blocks));

    let mut matched = 0;
    'blocks: while matched < wanted {
        let hash = query.hashes.get((matched + 1) * query.hashes_per_block - 1)?;
        for (&set, row) in sets.iter().zip(rows.iter_mut()) {
            let Some(block) = query.pool.lookup(&Key::of_block(hash.as_bytes(), set)) else { break 'blocks };
            row.push(block);
        }
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
