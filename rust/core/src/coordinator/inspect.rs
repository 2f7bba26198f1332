//! Reading what requests and blocks stand for, for those that report it elsewhere.

use super::Coordinator;
use super::requests::Row;
use crate::error::Result;
use crate::hash::BlockHash;
use crate::ids::{BlockId, GroupId};
use crate::pool::Key;

impl Coordinator {
    /// The requests that hold blocks, in no order.
    pub fn request_ids(&self) -> impl Iterator<Item = &str> {
        self.requests.iter().map(|(name, _)| name)
    }

    /// How many leading blocks of a request's row in the set of this group need not be published any more.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`](crate::Error::UnknownRequest), or [`Error::Config`](crate::Error::Config) if there is no
    /// such group.
    pub fn num_published(&self, request_id: &str, group: GroupId) -> Result<usize> {
        Ok(self.requests.get(request_id)?.rows[self.set_of(group)?].num_published)
    }

    /// Leading tokens of a request up to the last that some hash stands for, the fewest over all sets. An estimate of what
    /// a later request can hit, as vLLM makes it: gaps, ends inside a block and draft models are not looked at.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`](crate::Error::UnknownRequest).
    pub fn findable_tokens(&self, request_id: &str) -> Result<u64> {
        let rows = self.requests.get(request_id)?.rows.iter().enumerate();
        let of_row = |(set, row): (usize, &Row)| {
            let last = row.blocks.iter().rposition(|&block| !block.is_null() && self.pool.has_keys(block));
            let span = self.geometry.span(set);
            match last.map(|at| at as u64) {
                Some(at) if row.tail.stands_alone && row.tail.tokens / span == at => row.tail.tokens,
                Some(at) => (at + 1).saturating_mul(span),
                None => 0,
            }
        };
        Ok(rows.map(of_row).min().unwrap_or(0))
    }

    /// The first block published under this hash in the set of this group.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) if there is no such group.
    pub fn lookup_in_group(&self, hash: &BlockHash, group: GroupId) -> Result<Option<BlockId>> {
        let set = self.set_of(group)?;
        #[allow(clippy::cast_possible_truncation, reason = "sets are numbered with 32 bits")]
        Ok(self.pool.lookup(&Key::of_block(hash.as_bytes(), set as u32)))
    }

    /// The block hashes by which a block can be found, each with the first group of its set, in the order of
    /// publication.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) if there is no such block.
    pub fn hashes_of(&self, block: BlockId) -> Result<Vec<(Vec<u8>, GroupId)>> {
        let keys = self.pool.keys_of(block)?;
        let of_key = |key: &Key| {
            let (hash, set) = key.split_block();
            (hash.to_vec(), self.geometry.sets[set as usize].group_ids[0])
        };
        Ok(keys.iter().map(of_key).collect())
    }
}
