//! What a coordinator is made from, and what follows from it once and for all.

use super::PrefixHit;
use crate::error::{Error, Result};
use crate::geometry::{GroupSpec, LockstepSet, form_sets};
use crate::groups::{self, Retention};
use crate::ids::{BlockId, GroupId};
use crate::pool::MAX_BLOCKS;

/// What a coordinator is made from.
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
    /// Windows publish the blocks before every so many tokens only, and before the ends of prompts; 0 = only the latter,
    /// `None` = before every length that a hit can have.
    pub retention_interval: Option<u64>,
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

/// Sets of equal geometry, looked up together: a block is a hit only if all of them have it, and if one is read by a
/// draft model, all leave their last block.
#[derive(Clone, Debug)]
pub(super) struct LookupClass {
    /// Members, as indices of sets.
    pub(super) sets: Vec<u32>,
    pub(super) tokens_per_block: u64,
    pub(super) drops_last_block: bool,
    pub(super) retention: Retention,
}

/// The configuration with everything that follows from it.
#[derive(Clone, Debug)]
pub(super) struct Geometry {
    pub(super) sets: Vec<LockstepSet>,
    /// Per group: its set.
    pub(super) set_of_group: Vec<usize>,
    /// Those of which a prefix of a hit is a hit come first: they are looked up once, and bound the others.
    pub(super) classes: Vec<LookupClass>,
    /// Per set: its class.
    pub(super) class_of_set: Vec<usize>,
    /// Tokens per block hash.
    pub(super) hash_block_tokens: u64,
    /// Least common multiple of all sets' tokens per block: hits across sets are multiples of it.
    pub(super) alignment: u64,
}

impl Geometry {
    /// # Errors
    /// [`Error::Config`] naming the value that cannot be used.
    pub(super) fn new(config: &CoordinatorConfig) -> Result<Self> {
        let sets = form_sets(&config.groups, config.dcp_world_size)?;
        groups::check_supported(&config.groups, config.dcp_world_size)?;
        if config.max_model_len == 0 {
            return Err(Error::config("max_model_len must be at least 1, got 0"));
        }

        let mut common = 0;
        let mut alignment = 1_u64;
        for set in &sets {
            let span = set.tokens_per_block;
            common = greatest_common_divisor(common, span);
            alignment = (alignment / greatest_common_divisor(alignment, span)).checked_mul(span).ok_or_else(|| {
                let spans = spans(&sets);
                Error::config(format!("the least common multiple of the sets' tokens per block {spans:?} overflows"))
            })?;
        }
        let hash_block_tokens = config.hash_block_tokens.unwrap_or(common);
        if hash_block_tokens == 0 || !common.is_multiple_of(hash_block_tokens) {
            let spans = spans(&sets);
            return Err(Error::config(format!(
                "hash_block_tokens must divide the tokens per block of every set {spans:?}, got {hash_block_tokens}"
            )));
        }

        let mut set_of_group = vec![0; config.groups.len()];
        for (at, set) in sets.iter().enumerate() {
            set.group_ids.iter().for_each(|group| set_of_group[group.0 as usize] = at);
        }
        if let Some(interval) = config.retention_interval
            && !interval.is_multiple_of(alignment)
        {
            return Err(Error::config(format!("retention_interval must be a multiple of {alignment}, got {interval}")));
        }
        let (classes, class_of_set) = lookup_classes(config, &sets);
        for class in &classes {
            let Retention::Chunk(chunk) = class.retention else { continue };
            // Otherwise a hit could end inside a chunk whose first block it lacks.
            if !chunk.is_multiple_of(class.tokens_per_block) {
                return Err(Error::config(format!(
                    "attention_chunk_size must be a multiple of the tokens per block {}, got {chunk}",
                    class.tokens_per_block
                )));
            }
            if class.tokens_per_block != alignment {
                return Err(Error::config(format!(
                    "chunked_local groups must have the tokens per block of all groups: {alignment}, got {}",
                    class.tokens_per_block
                )));
            }
            if class.drops_last_block {
                return Err(Error::config("chunked_local groups cannot be read by a draft model"));
            }
        }
        Ok(Self { sets, set_of_group, classes, class_of_set, hash_block_tokens, alignment })
    }

    /// Tokens per block of a set.
    pub(super) fn span(&self, set: usize) -> u64 {
        self.sets[set].tokens_per_block
    }

    /// How long a set keeps its blocks.
    pub(super) fn retention(&self, set: usize) -> Retention {
        self.classes[self.class_of_set[set]].retention
    }

    /// Leading blocks of a set that are not needed any more once `computed` tokens are computed.
    pub(super) fn skipped_blocks(&self, set: usize, computed: u64) -> usize {
        usize::try_from(self.retention(set).skipped_tokens(computed) / self.span(set)).unwrap_or(usize::MAX)
    }

    /// Where a later request can resume: one that sends the same prompt, and has its last token computed again; one that
    /// goes on from it; and one that shares a prefix which some set has lost. Draft models leave a block before that.
    pub(super) fn resume_points(
        &self,
        num_prompt_tokens: Option<u64>,
        shared_prefix_boundary: u64,
    ) -> [Option<u64>; 3] {
        let shared = (shared_prefix_boundary > 0).then_some(shared_prefix_boundary);
        let resent = num_prompt_tokens.map(|prompt| prompt.saturating_sub(1));
        if !self.classes.iter().any(|class| class.drops_last_block) {
            return [resent, None, shared];
        }
        let before = |tokens: u64| (tokens - tokens % self.alignment).saturating_sub(self.alignment);
        [resent.map(before), num_prompt_tokens.map(before), shared]
    }

    /// How a new request's row in a set starts, of which `computed` tokens are hit or will be loaded: so many null blocks
    /// where it needs nothing, and then what is left of the hit.
    pub(super) fn start_of_row<'a>(
        &self,
        set: usize,
        hit: Option<&'a PrefixHit>,
        computed: u64,
    ) -> (usize, &'a [BlockId]) {
        let skipped = self.skipped_blocks(set, computed);
        (skipped, hit.and_then(|hit| hit.row(set).get(skipped..)).unwrap_or(&[]))
    }

    /// Whether a set needs blocks for tokens that an external tier will load: `computed` includes them.
    pub(super) fn has_external(&self, set: usize, computed: u64, external: u64) -> bool {
        external > 0 && self.retention(set).skipped_tokens(computed) < computed
    }

    /// Blocks of a set that `tokens` tokens take up.
    pub(super) fn blocks_for(&self, set: usize, tokens: u64) -> usize {
        // Callers keep tokens within max_model_len, whose blocks are bounded by what a row can hold.
        usize::try_from(tokens.div_ceil(self.span(set))).unwrap_or(usize::MAX)
    }

    /// Block hashes per block of a set.
    pub(super) fn hashes_per_block(&self, set: usize) -> usize {
        usize::try_from(self.span(set) / self.hash_block_tokens).unwrap_or(usize::MAX)
    }
}

/// Tokens per block of each set.
fn spans(sets: &[LockstepSet]) -> Vec<u64> {
    sets.iter().map(|set| set.tokens_per_block).collect()
}

/// Euclid's algorithm; `(0, n)` gives n.
fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// The classes, and the class of each set.
fn lookup_classes(config: &CoordinatorConfig, sets: &[LockstepSet]) -> (Vec<LookupClass>, Vec<usize>) {
    let group = |id: &GroupId| &config.groups[id.0 as usize];
    let all_marked = config.use_eagle && !config.groups.iter().any(|group| group.is_eagle);
    let mut classes: Vec<LookupClass> = Vec::new();
    let mut class_of_set = Vec::with_capacity(sets.len());
    for (number, set) in (0_u32..).zip(sets) {
        let marked = all_marked || set.group_ids.iter().any(|id| group(id).is_eagle);
        let same_geometry = |class: &LookupClass| {
            let other = &sets[class.sets[0] as usize];
            !set.is_lockstep()
                && !other.is_lockstep()
                && set.tokens_per_block == other.tokens_per_block
                && is_same_geometry(group(&set.group_ids[0]), group(&other.group_ids[0]))
        };
        let at = classes.iter().position(same_geometry).unwrap_or(classes.len());
        if at == classes.len() {
            let tokens_per_block = set.tokens_per_block;
            let retention = Retention::of(group(&set.group_ids[0]));
            classes.push(LookupClass { sets: Vec::new(), tokens_per_block, drops_last_block: false, retention });
        }
        classes[at].sets.push(number);
        classes[at].drops_last_block |= marked;
        class_of_set.push(at);
    }
    let closed = |class: &LookupClass| class.retention.is_downward_closed();
    let mut order: Vec<usize> = (0..classes.len()).collect();
    order.sort_by_key(|&at| !closed(&classes[at]));
    let place_of = |class: usize| order.iter().position(|&at| at == class).unwrap_or(class);
    let class_of_set = class_of_set.into_iter().map(place_of).collect();
    (order.iter().map(|&at| classes[at].clone()).collect(), class_of_set)
}

/// Whether two groups cache the same kind of pages. As in vLLM the first layer stands for its group.
fn is_same_geometry(a: &GroupSpec, b: &GroupSpec) -> bool {
    let page = |group: &GroupSpec| group.layers.first().map(|layer| layer.page_bytes);
    a.kind == b.kind
        && a.block_size == b.block_size
        && a.sliding_window == b.sliding_window
        && a.attention_chunk_size == b.attention_chunk_size
        && page(a) == page(b)
}
