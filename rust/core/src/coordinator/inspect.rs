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
        let rows = rows.filter(|&(set, _)| self.geometry.is_found(set));
        let of_row = |row: &Row| row.blocks.iter().map(|&block| self.pool.key_tokens(block)).max().unwrap_or(0);
        Ok(rows.map(|(_, row)| of_row(row)).min().unwrap_or(0))
    }

    /// The state that a request's running step saves before its end: the tokens before it, and its place in the row.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`](crate::Error::UnknownRequest), or [`Error::Config`](crate::Error::Config) if there is no
    /// such group.
    pub fn checkpoint(&self, request_id: &str, group: GroupId) -> Result<Option<(u64, usize)>> {
        let checkpoint = self.requests.get(request_id)?.rows[self.set_of(group)?].states.checkpoint;
        Ok(checkpoint.map(|checkpoint| (checkpoint.tokens, checkpoint.place)))
    }

    /// Leading tokens of a request up to the end of what the block's first hash stands for; 0 if it has none.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) if there is no such block.
    pub fn key_tokens(&self, block: BlockId) -> Result<u64> {
        self.pool.ref_count(block)?;
        Ok(self.pool.key_tokens(block))
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
