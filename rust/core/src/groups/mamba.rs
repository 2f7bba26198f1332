//! Recurrent state: one block holds the state behind some token, and stands for all tokens before it.
//!
//! * needs: the state behind the last computed token, and blocks for the states behind draft tokens;
//! * may drop: the states before that;
//! * a hit requires: one state, the one behind the hit's last token. It must not have been published in the same step, as
//!   it is written while that step runs. A prefix of a hit may be none.

use super::{Query, Reach};
use crate::error::Result;
use crate::hash::BlockHashes;
use crate::ids::BlockId;

pub(super) fn skipped_tokens(computed: u64) -> u64 {
    computed.saturating_sub(1)
}

pub(super) fn find_hit<H: BlockHashes + ?Sized>(
    query: &Query<'_, H>,
    sets: &[u32],
    rows: &mut [Vec<BlockId>],
) -> Result<u64> {
    let &Query { tokens_per_block: span, alignment, hashes_per_block, .. } = query;
    // From the right, because the longest hit is wanted.
    let (ends, unit) =
        if query.is_fine_grained() { (query.max_hashes(), alignment) } else { (query.max_blocks(), span) };
    for end in (1..=ends).rev() {
        let tokens = end as u64 * unit;
        if !tokens.is_multiple_of(alignment) {
            continue;
        }
        let (hash_at, block) = if query.is_fine_grained() {
            (end - 1, (end - 1) / hashes_per_block)
        } else {
            (end * hashes_per_block - 1, end - 1)
        };
        // Places before the state are null, the state itself is put behind them.
        for row in rows.iter_mut() {
            row.resize(block, BlockId::NULL);
        }
        if query.find_hash(hash_at, block, sets, rows)? {
            return Ok(tokens);
        }
    }
    rows.iter_mut().for_each(Vec::clear);
    Ok(0)
}

/// With an interval, only the states at its multiples and where requests resume are kept.
pub(super) fn is_reachable(at: u64, reach: &Reach) -> bool {
    let &Reach { tokens_per_block: span, alignment, interval, boundaries, .. } = reach;
    let Some(interval) = interval else { return true };
    let per_segment = interval / span;
    if interval > 0 && (per_segment <= 1 || (at + 1).is_multiple_of(per_segment)) {
        return true;
    }
    boundaries.iter().flatten().any(|tokens| (tokens - tokens % alignment) / span == at + 1)
}

/// One running state, and those behind drafts.
pub(super) fn planned_blocks(extra: u64) -> u64 {
    extra.saturating_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_state_is_needed() {
        assert_eq!([0, 1, 2, 9].map(skipped_tokens), [0, 0, 1, 8]);
    }

    #[test]
    fn an_interval_keeps_the_states_at_its_multiples_and_where_requests_resume() {
        let reach = Reach {
            tokens_per_block: 4,
            alignment: 4,
            drops_last_block: false,
            interval: Some(16),
            boundaries: [Some(30), None, None],
        };
        let reachable = |reach: Reach| (0..9).filter(|&at| is_reachable(at, &reach)).collect::<Vec<u64>>();
        assert_eq!(reachable(reach), [3, 6, 7]);
        assert_eq!(reachable(Reach { interval: Some(0), ..reach }), [6]);
        assert_eq!(reachable(Reach { interval: Some(4), ..reach }).len(), 9);
        assert_eq!(reachable(Reach { interval: None, ..reach }).len(), 9);
        assert_eq!(reachable(Reach { interval: Some(0), boundaries: [Some(3), None, None], ..reach }), [0_u64; 0]);
    }
}
