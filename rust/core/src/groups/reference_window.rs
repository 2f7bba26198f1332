//! Reference sliding window attention (R-SWA): to the whole prompt, and behind it to the last `window` tokens.
//!
//! * needs: the blocks of the prompt, and of the last `window` computed tokens behind it;
//! * may drop: the blocks of the gap between the two, those that lie in it whole;
//! * a hit requires: every block from the first token on, as for full attention, whose lookup it shares.

use std::ops::Range;

/// The places of the gap once `computed` tokens of a request with a prompt of `prompt` tokens are computed.
pub(super) fn gap(window: u64, span: u64, computed: u64, prompt: u64) -> Range<u64> {
    prompt.div_ceil(span)..prompt.max(computed.saturating_sub(window)) / span
}

#[cfg(test)]
mod tests {
    use super::gap;

    #[test]
    fn the_prompt_and_the_window_are_kept() {
        // Blocks of 4 tokens, a prompt that ends inside block 2, a window of 6.
        let dropped = |computed| gap(6, 4, computed, 10).collect::<Vec<_>>();
        assert_eq!(dropped(10), [0_u64; 0]);
        assert_eq!(dropped(21), [0_u64; 0], "15 tokens end inside block 3");
        assert_eq!(dropped(22), [3]);
        assert_eq!(dropped(30), [3, 4, 5]);
    }
}
