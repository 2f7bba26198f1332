//! Attention over the last `window` tokens, the current one included.
//!
//! * needs: the blocks of the last `window - 1` computed tokens, and of those to be computed;
//! * may drop: blocks whose tokens are all before that;
//! * a hit requires: the blocks of the `window - 1` tokens before its end. A prefix of a hit may be none.

use super::{Query, Reach};
use crate::error::Result;
use crate::hash::BlockHashes;
use crate::ids::BlockId;

pub(super) fn skipped_tokens(window: u64, computed: u64) -> u64 {
    computed.saturating_add(1).saturating_sub(window)
}

/// Blocks in a row that a hit needs at its end, the one that is left to a draft model included.
fn blocks_for_hit(window: u64, tokens_per_block: u64, drop_last_block: bool) -> u64 {
    (window - 1).div_ceil(tokens_per_block) + u64::from(drop_last_block)
}

pub(super) fn find_hit<H: BlockHashes + ?Sized>(
    window: u64,
    query: &Query<'_, H>,
    sets: &[u32],
    rows: &mut [Vec<BlockId>],
) -> Result<u64> {
    let &Query { tokens_per_block: span, alignment, drop_last_block, .. } = query;
    let wanted = query.max_blocks();
    let needed = blocks_for_hit(window, span, drop_last_block);
    for row in rows.iter_mut() {
        row.resize(wanted, BlockId::NULL);
    }

    // From the right, because the longest hit is wanted: the first run that is long enough, ending at a length that hits
    // may have. If there is none, the run that begins the request will do however short it is.
    let mut run = 0;
    let mut end = None;
    for at in (0..wanted).rev() {
        let hit_end = if drop_last_block { at } else { at + 1 } as u64 * span;
        if run == 0 && !hit_end.is_multiple_of(alignment) {
            // Only looked at to be left: whether it is there does not matter.
            continue;
        }
        if !query.find(at, sets, rows)? {
            run = 0;
            continue;
        }
        run += 1;
        if run as u64 >= needed {
            end = Some(at + run);
            break;
        }
    }
    let mut blocks = end.unwrap_or(run);
    let align = |blocks: &mut usize| {
        while !(*blocks as u64 * span).is_multiple_of(alignment) {
            *blocks -= 1;
        }
    };
    if end.is_none() {
        align(&mut blocks);
    }
    if drop_last_block && blocks > 0 {
        blocks -= 1;
        align(&mut blocks);
    }
    for row in rows.iter_mut() {
        row.truncate(blocks);
    }
    Ok(blocks as u64 * span)
}

/// Hits end at multiples of `alignment`, and each needs the blocks before its end: with a window that is shorter than the
/// distance of ends that are kept, blocks in between are never part of one.
pub(super) fn is_reachable(window: u64, at: u64, reach: &Reach) -> bool {
    let &Reach { tokens_per_block: span, alignment, drops_last_block, interval, boundaries } = reach;
    if !alignment.is_multiple_of(span) {
        return true;
    }
    let needed = blocks_for_hit(window, span, drops_last_block);
    let shift = u64::from(drops_last_block);
    let segment = interval.unwrap_or(alignment);
    if segment > 0 {
        let per_segment = segment / span;
        if needed >= per_segment || (at >= shift && (at - shift) % per_segment >= per_segment - needed) {
            return true;
        }
    }
    let before = |tokens: &u64| {
        let end = (tokens - tokens % alignment) / span + shift;
        (end.saturating_sub(needed)..end).contains(&at)
    };
    interval.is_some() && boundaries.iter().flatten().any(before)
}

/// The window need not begin with a block, so that it may reach into one more.
pub(super) fn most_blocks(window: u64, span: u64, in_flight: u64, max_model_len: u64) -> u64 {
    (window - 1).saturating_add(in_flight).min(max_model_len).div_ceil(span).saturating_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_next_token_does_not_see_is_skipped() {
        let skipped: Vec<u64> = (0..8).map(|computed| skipped_tokens(4, computed)).collect();
        assert_eq!(skipped, [0, 0, 0, 0, 1, 2, 3, 4]);
        assert_eq!(skipped_tokens(1, 5), 5);
    }

    #[test]
    fn only_the_end_of_each_segment_is_reachable() {
        // Blocks of 4 tokens, hits at multiples of 16, a window of 5 tokens: one block before each end.
        let reach = Reach {
            tokens_per_block: 4,
            alignment: 16,
            drops_last_block: false,
            interval: None,
            boundaries: [None; 3],
        };
        let reachable =
            |window, reach: Reach| (0..9).filter(|&at| is_reachable(window, at, &reach)).collect::<Vec<u64>>();
        assert_eq!(reachable(5, reach), [3, 7]);
        assert_eq!(reachable(5, Reach { drops_last_block: true, ..reach }), [3, 4, 7, 8]);
        assert_eq!(reachable(5, Reach { alignment: 4, ..reach }).len(), 9);
        assert_eq!(reachable(64, reach).len(), 9);
        // Only every second end, or only where requests resume.
        assert_eq!(reachable(5, Reach { interval: Some(32), ..reach }), [7]);
        assert_eq!(reachable(5, Reach { interval: Some(0), ..reach }), [0_u64; 0]);
        assert_eq!(reachable(5, Reach { interval: Some(0), boundaries: [Some(30), None, None], ..reach }), [3]);
        let at_start = Reach { interval: Some(0), boundaries: [Some(0), None, None], drops_last_block: true, ..reach };
        assert_eq!(reachable(5, at_start), [0]);
        assert_eq!(
            reachable(5, Reach { interval: None, boundaries: [Some(30), None, None], alignment: 32, ..reach }),
            [7]
        );
    }

    #[test]
    fn a_request_holds_its_window_and_what_is_in_flight() {
        assert_eq!(most_blocks(7, 4, 0, 1000), 3);
        assert_eq!(most_blocks(7, 4, 100, 1000), 28);
        assert_eq!(most_blocks(7, 4, 100, 16), 5);
    }
}
