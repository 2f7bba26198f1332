//! Attention of a decoder to the encoder's tokens.
//!
//! * needs: a block for every `tokens_per_block` tokens of the encoder, all of them before the first step;
//! * may drop: nothing;
//! * a hit requires: nothing, and brings nothing. The encoder's tokens are computed for one request; vLLM serves such models
//!   without prefix sharing, and so do we.

/// Places of a row for the encoder's tokens.
pub(super) fn row_length(span: u64, encoder_tokens: u64) -> u64 {
    encoder_tokens.div_ceil(span)
}
