//! Giving blocks back.

use super::Coordinator;
use crate::error::Result;

impl Coordinator {
    /// Gives back what a request's groups no longer need once `num_computed_tokens` tokens are computed.
    ///
    /// Full attention and MLA need all of it for as long as the request lives.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`](crate::Error::UnknownRequest).
    pub fn release_skipped(&mut self, request_id: &str, num_computed_tokens: u64) -> Result<()> {
        let _ = num_computed_tokens;
        self.requests.get(request_id).map(|_| ())
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
