//! What a coordinator is made from.

use super::geometry::Geometry;
use crate::error::{Error, Result};
use crate::geometry::GroupSpec;
use crate::pool::MAX_BLOCKS;

/// What a coordinator is made from.
#[allow(clippy::struct_excessive_bools, reason = "switches that do not depend on each other")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoordinatorConfig {
    /// The groups.
    pub groups: Vec<GroupSpec>,
    /// Blocks in the pool, the null block included.
    pub num_blocks: u32,
    /// Ranks in the decode-context-parallel group.
    pub dcp_world_size: u32,
    /// Whether prefixes are shared.
    pub enable_caching: bool,
    /// Tokens per block hash; `None` = the greatest common divisor of all sets' tokens per block.
    pub hash_block_tokens: Option<u64>,
    /// Longest request, in tokens.
    pub max_model_len: u64,
    /// Whether a draft model reads the cache. If no group is marked `is_eagle`, all count as marked.
    pub use_eagle: bool,
    /// Whether events are noted.
    pub enable_events: bool,
    /// Tokens of one request that are scheduled and whose results are not in yet, at most; `None` = `max_model_len`. Bounds
    /// what windows and chunks hold.
    pub max_in_flight_tokens: Option<u64>,
    /// Windows and states publish the blocks before every so many tokens only, and before the ends of prompts; 0 = only the
    /// latter, `None` = before every length that a hit can have.
    pub retention_interval: Option<u64>,
    /// Tokens behind a prompt's chunk that a draft model of several modules reads: all but the first of them may be computed
    /// again, so that the blocks of the last ones are not final yet.
    pub num_prefill_lookahead: u64,
    /// Whether states are also published inside a block where a prefix ends that requests share, if a draft model reads the
    /// cache.
    pub publishes_shared_prefix: bool,
    /// Which groups are looked up together: per group a number, equal for those. `None` = groups of equal geometry.
    pub lookup_classes: Option<Vec<u32>>,
    /// Whether the blocks that must be cleared before they are used are noted.
    pub notes_new_blocks: bool,
    /// Whether the uses of blocks are noted.
    pub notes_uses: bool,
}

impl CoordinatorConfig {
    /// A configuration with prefix sharing, one rank, no draft model and no events.
    pub fn new(groups: Vec<GroupSpec>, num_blocks: u32, max_model_len: u64) -> Self {
        Self {
            groups,
            num_blocks,
            dcp_world_size: 1,
            enable_caching: true,
            hash_block_tokens: None,
            max_model_len,
            use_eagle: false,
            enable_events: false,
            max_in_flight_tokens: None,
            retention_interval: None,
            num_prefill_lookahead: 0,
            publishes_shared_prefix: false,
            lookup_classes: None,
            notes_new_blocks: false,
            notes_uses: false,
        }
    }

    /// Checks everything but whether the pool fits in memory.
    ///
    /// # Errors
    /// [`Error::Config`] naming the value that cannot be used.
    pub fn validate(&self) -> Result<()> {
        if self.num_blocks == 0 || self.num_blocks > MAX_BLOCKS {
            let got = self.num_blocks;
            return Err(Error::config(format!("num_blocks must be between 1 and {MAX_BLOCKS}, got {got}")));
        }
        Geometry::new(self).map(|_| ())
    }
}
