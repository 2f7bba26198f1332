//! The configuration with everything that follows from it once and for all.

use super::classes::{LookupClass, has_fine_grained_hits, lookup_classes};
use super::{CoordinatorConfig, PrefixHit};
use crate::error::{Error, Result};
use crate::geometry::{GroupKind, LockstepSet, form_sets};
use crate::groups::{self, Behaviour, Slots};
use crate::ids::BlockId;
use crate::pool::MAX_BLOCKS;

/// The configuration with everything that follows from it.
#[derive(Clone, Debug)]
pub(super) struct Geometry {
    pub(super) sets: Vec<LockstepSet>,
    /// Per group: its set.
    pub(super) set_of_group: Vec<usize>,
    /// The classes of sets whose blocks can be found. Those of which a prefix of a hit is a hit come first: they are looked
    /// up once, and bound the others.
    pub(super) classes: Vec<LookupClass>,
    /// Per set: its class; `None` if its blocks are never shared.
    class_of_set: Vec<Option<usize>>,
    behaviours: Vec<Behaviour>,
    /// Tokens per block hash.
    pub(super) hash_block_tokens: u64,
    /// Least common multiple of all sets' tokens per block.
    pub(super) common_span: u64,
    /// Hits across sets are multiples of this: `common_span`, or the tokens per block hash where hits may end inside blocks.
    pub(super) alignment: u64,
    /// Whether hits may end inside blocks.
    pub(super) is_fine_grained: bool,
    /// Whether a draft model reads any group.
    has_draft: bool,
    /// Whether states are published where a shared prefix ends inside a block. A draft model of several modules excludes it:
    /// the end of a step is not what it publishes then.
    pub(super) publishes_shared_prefix: bool,
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
        let first_group = |set: &LockstepSet| &config.groups[set.group_ids[0].0 as usize];
        let is_found = |set: &LockstepSet| config.enable_caching && first_group(set).is_cacheable();
        if let Some(group) = config.groups.iter().find(|group| group.kind == GroupKind::CrossAttention)
            && config.enable_caching
        {
            let kind = group.kind.name();
            return Err(Error::config(format!(
                "a group of kind {kind:?} cannot be cached: set enable_caching to False"
            )));
        }

        let mut common = 0;
        let mut common_span = 1_u64;
        for set in &sets {
            let span = set.tokens_per_block;
            if first_group(set).is_cacheable() {
                common = greatest_common_divisor(common, span);
            }
            common_span =
                (common_span / greatest_common_divisor(common_span, span)).checked_mul(span).ok_or_else(|| {
                    let spans = spans(&sets);
                    Error::config(format!(
                        "the least common multiple of the sets' tokens per block {spans:?} overflows"
                    ))
                })?;
        }
        // Nothing that is cached: any number will do.
        common = if common == 0 { common_span } else { common };
        let hash_block_tokens = config.hash_block_tokens.unwrap_or(common);
        let divides = !config.enable_caching || common.is_multiple_of(hash_block_tokens);
        if hash_block_tokens == 0 || !divides {
            let spans = spans(&sets);
            return Err(Error::config(format!(
                "hash_block_tokens must divide the tokens per block of every set {spans:?}, got {hash_block_tokens}"
            )));
        }

        let mut set_of_group = vec![0; config.groups.len()];
        for (at, set) in sets.iter().enumerate() {
            set.group_ids.iter().for_each(|group| set_of_group[group.0 as usize] = at);
        }
        let found: Vec<bool> = sets.iter().map(is_found).collect();
        let (classes, class_of_set) = lookup_classes(config, &sets, &found)?;
        let behaviours: Vec<Behaviour> = sets.iter().map(|set| Behaviour::of(first_group(set))).collect();
        let is_fine_grained = has_fine_grained_hits(config, &classes, hash_block_tokens);
        let has_draft = config.use_eagle || config.groups.iter().any(|group| group.is_eagle);
        let geometry = Self {
            set_of_group,
            classes,
            class_of_set,
            behaviours,
            hash_block_tokens,
            common_span,
            alignment: if is_fine_grained { hash_block_tokens } else { common_span },
            is_fine_grained,
            has_draft,
            publishes_shared_prefix: config.publishes_shared_prefix
                && has_draft
                && is_fine_grained
                && config.num_prefill_lookahead <= 1,
            sets,
        };
        geometry.check(config)?;
        Ok(geometry)
    }

    /// Refuses what does not go together.
    pub(super) fn check(&self, config: &CoordinatorConfig) -> Result<()> {
        let &Self { common_span, alignment, .. } = self;
        if let Some(interval) = config.retention_interval
            && !interval.is_multiple_of(common_span)
        {
            return Err(Error::config(format!(
                "retention_interval must be a multiple of {common_span}, got {interval}"
            )));
        }
        let lookahead = config.num_prefill_lookahead;
        if config.enable_caching && self.has_draft && common_span < lookahead {
            return Err(Error::config(format!(
                "num_prefill_lookahead must be at most the least common multiple of the tokens per block {common_span}, \
                 got {lookahead}"
            )));
        }
        for (set, behaviour) in self.behaviours.iter().enumerate() {
            // Rows with null blocks are longer than what the pool can give.
            let places = config.max_model_len.div_ceil(self.span(set));
            if !behaviour.is_downward_closed() && behaviour.follows_tokens() && places > u64::from(MAX_BLOCKS) {
                let longest = config.max_model_len;
                return Err(Error::config(format!(
                    "max_model_len {longest} needs rows of {places} places: at most {MAX_BLOCKS} can be had"
                )));
            }
        }
        for class in &self.classes {
            let Behaviour::Chunk(chunk) = class.behaviour else { continue };
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
        Ok(())
    }

    /// Tokens per block of a set.
    pub(super) fn span(&self, set: usize) -> u64 {
        self.sets[set].tokens_per_block
    }

    /// What a set does with its rows.
    pub(super) fn behaviour(&self, set: usize) -> Behaviour {
        self.behaviours[set]
    }

    /// Whether blocks of the set can be found.
    pub(super) fn is_found(&self, set: usize) -> bool {
        self.class_of_set[set].is_some()
    }

    /// Whether a draft model reads the set or one that is looked up with it.
    pub(super) fn drops_last_block(&self, set: usize) -> bool {
        self.class_of_set[set].is_some_and(|class| self.classes[class].drops_last_block)
    }

    /// Leading blocks of a set that are not needed any more once `computed` tokens are computed.
    fn skipped_blocks(&self, set: usize, computed: u64) -> usize {
        self.behaviour(set).skipped_blocks(self.span(set), computed, None).end
    }

    /// Leading tokens of which a set can publish blocks, where `num_tokens` are final.
    ///
    /// Hits across groups are multiples of the alignment, so blocks behind the last multiple cannot be hit; a draft model's
    /// group needs one more, which its lookups match and drop.
    pub(super) fn publishable(&self, config: &CoordinatorConfig, set: usize, num_tokens: u64) -> u64 {
        let last = num_tokens.saturating_sub(config.num_prefill_lookahead.saturating_sub(1));
        if config.groups.len() == 1 {
            return last;
        }
        let align = |tokens: u64| if self.is_fine_grained { tokens } else { tokens - tokens % self.common_span };
        let aligned = align(num_tokens);
        if self.drops_last_block(set) && aligned > 0 {
            last.min(align(last).saturating_add(self.span(set)))
        } else {
            aligned
        }
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
        if !self.has_draft {
            return [resent, None, shared];
        }
        let before = |tokens: u64| (tokens - tokens % self.common_span).saturating_sub(self.common_span);
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
        if !self.behaviour(set).follows_tokens() {
            return (0, &[]);
        }
        let skipped = self.skipped_blocks(set, computed);
        (skipped, hit.and_then(|hit| hit.row(set).get(skipped..)).unwrap_or(&[]))
    }

    /// The place of the block that a row's hit ends inside: `hit_row` is what the row starts with of it.
    pub(super) fn shared_place(&self, set: usize, hit: Option<&PrefixHit>, hit_row: &[BlockId]) -> Option<usize> {
        let tokens = hit.filter(|_| !hit_row.is_empty())?.num_tokens();
        if tokens.is_multiple_of(self.span(set)) { None } else { usize::try_from(tokens / self.span(set)).ok() }
    }

    /// Blocks that a new request's row gets for tokens which an external tier will load; `computed` includes them, `length`
    /// is what the row has already.
    pub(super) fn external_blocks(&self, set: usize, computed: u64, external: u64, length: usize) -> usize {
        match self.behaviour(set) {
            Behaviour::Encoder => 0,
            Behaviour::Ring => usize::from(external > 0),
            behaviour if external > 0 && behaviour.skipped_tokens(computed) < computed => {
                usize::try_from(computed.div_ceil(self.span(set))).unwrap_or(usize::MAX).saturating_sub(length)
            }
            _ => 0,
        }
    }

    /// Places of a set's row that has slots for so many tokens.
    pub(super) fn row_length(&self, set: usize, slots: &Slots) -> usize {
        // Callers keep tokens within max_model_len, whose blocks are bounded by what a row can hold.
        usize::try_from(self.behaviour(set).row_length(self.span(set), slots)).unwrap_or(usize::MAX)
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
