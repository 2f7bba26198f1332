//! Giving blocks back.

use super::Coordinator;
use crate::error::Result;
use crate::groups::Behaviour;
use crate::ids::BlockId;

impl Coordinator {
    /// Gives back what a request's groups no longer need once `num_computed_tokens` tokens are computed and processed.
    ///
    /// Full attention and MLA need all of it for as long as the request lives. Windows, chunks and states need less: null
    /// blocks take the places, and what is given back is released last block first. `num_prompt_tokens` is for kinds that keep
    /// the prompt longer than what follows; they give nothing back without it.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`](crate::Error::UnknownRequest).
    pub fn release_skipped(
        &mut self,
        request_id: &str,
        num_computed_tokens: u64,
        num_prompt_tokens: Option<u64>,
    ) -> Result<()> {
        let Self { geometry, requests, pool, .. } = self;
        for (set, row) in requests.get_mut(request_id)?.rows.iter_mut().enumerate() {
            let (behaviour, span) = (geometry.behaviour(set), geometry.span(set));
            if let Behaviour::AlignedState(_) = behaviour {
                row.states.retire(span, num_computed_tokens, &mut row.blocks, pool)?;
                continue;
            }
            let skipped = behaviour.skipped_blocks(span, num_computed_tokens, num_prompt_tokens);
            let end = skipped.end.min(row.blocks.len());
            if skipped.start >= end {
                continue;
            }
            // What earlier calls have given back stands in front.
            let earlier = row.blocks[skipped.start..end].iter().rposition(|block| block.is_null());
            let first = earlier.map_or(skipped.start, |at| skipped.start + at + 1);
            let freed = &mut row.blocks[first..end];
            pool.release_in_order(freed.iter().rev().copied())?;
            freed.fill(BlockId::NULL);
        }
        self.debug_audit();
        Ok(())
    }

    /// Ends a request: each set's row is released last block first, so that the longest prefixes are evicted first.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`](crate::Error::UnknownRequest).
    pub fn free(&mut self, request_id: &str) -> Result<()> {
        let request = self.requests.remove(request_id)?;
        for row in &request.rows {
            self.pool.release_in_order(row.blocks.iter().rev().copied().filter(|block| !block.is_null()))?;
        }
        self.withdraw_offers(request_id);
        self.requests.recycle(request);
        self.debug_audit();
        Ok(())
    }
}
