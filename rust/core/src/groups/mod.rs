//! One file per cache kind: what a request needs of it, what it may drop, and what a prefix hit requires.

mod chunked_local;
mod full;
mod sliding_window;

use crate::error::{Error, Result};
use crate::geometry::{GroupKind, GroupSpec};
use crate::hash::BlockHashes;
use crate::ids::BlockId;
use crate::pool::{BlockPool, Key};

pub(crate) use full::trim;

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

impl<H: BlockHashes + ?Sized> Query<'_, H> {
    /// Blocks that may be part of a hit: those within the longest hit that have a hash.
    fn max_blocks(&self) -> usize {
        let hashed = self.hashes.count() / self.hashes_per_block;
        usize::try_from(self.max_tokens / self.tokens_per_block).map_or(hashed, |blocks| blocks.min(hashed))
    }

    /// Appends to each set's row, or puts in the place `at`, the set's block for this hash. False if a set has none.
    fn find(&self, at: usize, sets: &[u32], rows: &mut [Vec<BlockId>]) -> Result<bool> {
        let hash = self.hashes.get((at + 1) * self.hashes_per_block - 1)?;
        for (&set, row) in sets.iter().zip(rows.iter_mut()) {
            let Some(block) = self.pool.lookup(&Key::of_block(hash.as_bytes(), set)) else { return Ok(false) };
            match row.get_mut(at) {
                Some(place) => *place = block,
                None => row.push(block),
            }
        }
        Ok(true)
    }
}

/// Where hits can end, for those kinds that publish only what a hit can need.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reach {
    pub(crate) tokens_per_block: u64,
    /// Hits are multiples of this.
    pub(crate) alignment: u64,
    pub(crate) drops_last_block: bool,
    /// Ends at every so many tokens are kept, and `boundaries`; 0 = only those, `None` = every end.
    pub(crate) interval: Option<u64>,
    /// Lengths at which a later request is expected to resume.
    pub(crate) boundaries: [Option<u64>; 3],
}

/// How long a group keeps its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retention {
    /// As long as the request lives.
    Full,
    /// While one of the last so many tokens, the next one included, is in them.
    Window(u64),
    /// While the next token is in the same chunk of so many tokens.
    Chunk(u64),
}

impl Retention {
    /// What a group's kind asks for. Kinds that are not supported count as full attention here.
    pub(crate) fn of(group: &GroupSpec) -> Self {
        match (group.kind, group.sliding_window, group.attention_chunk_size) {
            (GroupKind::SlidingWindow, Some(window), _) => Self::Window(u64::from(window)),
            (GroupKind::ChunkedLocal, _, Some(chunk)) => Self::Chunk(u64::from(chunk)),
            _ => Self::Full,
        }
    }

    /// Whether a prefix of a hit is a hit, so that one lookup is enough.
    pub(crate) fn is_downward_closed(self) -> bool {
        self == Self::Full
    }

    /// Leading tokens that are not needed any more once `computed` tokens are computed.
    pub(crate) fn skipped_tokens(self, computed: u64) -> u64 {
        match self {
            Self::Full => 0,
            Self::Window(window) => sliding_window::skipped_tokens(window, computed),
            Self::Chunk(chunk) => chunked_local::skipped_tokens(chunk, computed),
        }
    }

    /// The longest hit that all `sets` share, in tokens. Their blocks replace what is in `rows`, one row per set; null
    /// blocks stand where nothing is needed.
    pub(crate) fn find_hit<H: BlockHashes + ?Sized>(
        self,
        query: &Query<'_, H>,
        sets: &[u32],
        rows: &mut [Vec<BlockId>],
    ) -> Result<u64> {
        rows.iter_mut().for_each(Vec::clear);
        match self {
            Self::Full => full::find_hit(query, sets, rows),
            Self::Window(window) => sliding_window::find_hit(window, query, sets, rows),
            Self::Chunk(chunk) => chunked_local::find_hit(chunk, query, sets, rows),
        }
    }

    /// Whether the block at this place of a row can ever be part of a hit.
    pub(crate) fn is_reachable(self, at: u64, reach: &Reach) -> bool {
        match self {
            Self::Full | Self::Chunk(_) => true,
            Self::Window(window) => sliding_window::is_reachable(window, at, reach),
        }
    }

    /// The most blocks a request can hold, if that is bounded by less than its length. `in_flight`: tokens scheduled whose
    /// results are not in yet.
    pub(crate) fn most_blocks(self, tokens_per_block: u64, in_flight: u64, max_model_len: u64) -> Option<u64> {
        match self {
            Self::Full => None,
            Self::Window(window) => {
                Some(sliding_window::most_blocks(window, tokens_per_block, in_flight, max_model_len))
            }
            Self::Chunk(chunk) => Some(chunked_local::most_blocks(chunk, tokens_per_block, in_flight, max_model_len)),
        }
    }
}

/// Refuses groups of kinds that have no file here.
pub(crate) fn check_supported(groups: &[GroupSpec], dcp_world_size: u32) -> Result<()> {
    for (at, group) in groups.iter().enumerate() {
        let kind = group.kind.name();
        match group.kind {
            GroupKind::Full | GroupKind::Mla => {}
            GroupKind::SlidingWindow | GroupKind::ChunkedLocal => {
                let shards = group.resolved_kv_shards(dcp_world_size)?;
                if shards > 1 {
                    return Err(Error::config(format!(
                        "group {at}: a group of kind {kind:?} is never sharded, got kv_shards {shards}"
                    )));
                }
            }
            GroupKind::Mamba | GroupKind::CrossAttention => {
                return Err(Error::config(format!(
                    "group {at}: kind {kind:?} is not supported; supported: full, mla, sliding_window, chunked_local"
                )));
            }
        }
    }
    Ok(())
}
