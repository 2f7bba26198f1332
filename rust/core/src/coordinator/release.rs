//! Giving blocks back.

use super::Coordinator;
use crate::error::Result;
use crate::ids::BlockId;

impl Coordinator {
    /// Gives back what a request's groups no longer need once `num_computed_tokens` tokens are computed.
    ///
    /// Full attention and MLA need all of it for as long as the request lives. Windows and chunks need less: null blocks
    /// take the places, and what is given back is released last block first.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`](crate::Error::UnknownRequest).
    pub fn release_skipped(&mut self, request_id: &str, num_computed_tokens: u64) -> Result<()> {
        let Self { geometry, requests, pool, .. } = self;
        for (set, row) in requests.get_mut(request_id)?.rows.iter_mut().enumerate() {
            let skipped = geometry.skipped_blocks(set, num_computed_tokens).min(row.blocks.len());
            // What earlier calls have given back stands in front.
            let first = row.blocks[..skipped].iter().rposition(|block| block.is_null()).map_or(0, |at| at + 1);
            let freed = &mut row.blocks[first..skipped];
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
        self.requests.recycle(request);
        self.debug_audit();
        Ok(())
    }
}
