//! One file per cache kind: what a request needs of it, what it may drop, and what a prefix hit requires.

mod chunked_local;
mod circular_buffer;
mod cross_attention;
mod full;
pub(crate) mod mamba;
pub(crate) mod mamba_align;
mod reference_window;
mod sliding_window;

use std::ops::Range;

use crate::error::{Error, Result};
use crate::geometry::{GroupKind, GroupSpec, StateMode, StateSpec};
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
    /// Hits are multiples of this. Where it is less than a block, it is the tokens of a block hash, and hits may end inside
    /// a block.
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

    /// Hashes within the longest hit, where hits may end inside a block.
    fn max_hashes(&self) -> usize {
        let hashed = self.hashes.count();
        usize::try_from(self.max_tokens / self.alignment).map_or(hashed, |count| count.min(hashed))
    }

    /// Whether hits may end inside a block.
    fn is_fine_grained(&self) -> bool {
        self.alignment < self.tokens_per_block
    }

    /// Appends to each set's row, or puts in the place `at`, the set's block for the hash that ends with the block. False
    /// if a set has none.
    fn find(&self, at: usize, sets: &[u32], rows: &mut [Vec<BlockId>]) -> Result<bool> {
        self.find_hash((at + 1) * self.hashes_per_block - 1, at, sets, rows)
    }

    /// As [`Query::find`], for the hash number `hash_at`.
    fn find_hash(&self, hash_at: usize, at: usize, sets: &[u32], rows: &mut [Vec<BlockId>]) -> Result<bool> {
        let hash = self.hashes.get(hash_at)?;
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

/// How far a request is to have slots.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slots {
    /// Tokens in all, those behind what the model computes in this step included (drafts are written there).
    pub(crate) tokens: u64,
    /// Tokens that the model itself computes.
    pub(crate) main_tokens: u64,
    /// Tokens of the encoder.
    pub(crate) encoder_tokens: u64,
}

/// What a group's kind does with a request's row of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Behaviour {
    /// Keeps all.
    Full,
    /// Keeps the prompt, and the last so many tokens behind it.
    ReferenceWindow(u64),
    /// Keeps blocks while one of the last so many tokens, the next one included, is in them, or one of the `extra` before.
    Window { window: u64, extra: u64 },
    /// Keeps blocks while the next token is in the same chunk of so many tokens.
    Chunk(u64),
    /// Keeps the state behind the last token; `extra` blocks lie behind it for drafts.
    State { extra: u64 },
    /// As `State`, with a row that has blocks only where a step ends: see [`mamba_align`].
    AlignedState(StateSpec),
    /// One block for as long as the request lives.
    Ring,
    /// The encoder's tokens.
    Encoder,
}

impl Behaviour {
    /// What a group's kind asks for.
    pub(crate) fn of(group: &GroupSpec) -> Self {
        let window = u64::from(group.sliding_window.unwrap_or(1));
        match group.kind {
            GroupKind::Full | GroupKind::Mla => Self::Full,
            GroupKind::SlidingWindow => Self::Window { window, extra: u64::from(group.extra_retained_tokens) },
            GroupKind::ReferenceWindow => Self::ReferenceWindow(window),
            GroupKind::ChunkedLocal => Self::Chunk(u64::from(group.attention_chunk_size.unwrap_or(1))),
            GroupKind::Mamba if group.state.mode == StateMode::Align => Self::AlignedState(group.state),
            GroupKind::Mamba => Self::State { extra: u64::from(group.state.speculative_blocks) },
            GroupKind::CircularBuffer => Self::Ring,
            GroupKind::CrossAttention => Self::Encoder,
        }
    }

    /// Whether a prefix of a hit is a hit, so that one lookup is enough.
    pub(crate) fn is_downward_closed(self) -> bool {
        matches!(self, Self::Full | Self::ReferenceWindow(_))
    }

    /// Whether a hit can end inside a block.
    pub(crate) fn can_end_inside_a_block(self) -> bool {
        self.is_downward_closed() || self.is_state()
    }

    /// Whether a block holds a state that other requests of the same step cannot have yet.
    pub(crate) fn is_state(self) -> bool {
        matches!(self, Self::State { .. } | Self::AlignedState(_))
    }

    /// Whether a draft model's lookup matches one block more than it keeps. Draft models have no recurrent state.
    pub(crate) fn drops_last_block(self) -> bool {
        !self.is_state()
    }

    /// Places at a row's end that hold what drafts write.
    pub(crate) fn num_draft_places(self) -> usize {
        match self {
            Self::State { extra } => usize::try_from(extra).unwrap_or(usize::MAX),
            Self::AlignedState(spec) => spec.speculative_blocks as usize,
            _ => 0,
        }
    }

    /// Whether new blocks of this kind must be cleared before they are used, if any must.
    pub(crate) fn is_cleared(self) -> bool {
        !self.is_state() && self != Self::Ring
    }

    /// Whether a row's places stand for the request's tokens, so that a hit or what is loaded fills them.
    pub(crate) fn follows_tokens(self) -> bool {
        !matches!(self, Self::Ring | Self::Encoder)
    }

    /// Leading tokens that are not needed any more once `computed` tokens are computed.
    pub(crate) fn skipped_tokens(self, computed: u64) -> u64 {
        match self {
            Self::Full | Self::ReferenceWindow(_) | Self::Ring | Self::Encoder => 0,
            Self::Window { window, extra } => sliding_window::skipped_tokens(window.saturating_add(extra), computed),
            Self::Chunk(chunk) => chunked_local::skipped_tokens(chunk, computed),
            Self::State { .. } | Self::AlignedState(_) => mamba::skipped_tokens(computed),
        }
    }

    /// The blocks of a row that are not needed any more once `computed` tokens are computed of a request with this prompt,
    /// if that is known.
    pub(crate) fn skipped_blocks(self, span: u64, computed: u64, num_prompt_tokens: Option<u64>) -> Range<usize> {
        let blocks = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        match (self, num_prompt_tokens) {
            (Self::ReferenceWindow(window), Some(prompt)) => {
                let gap = reference_window::gap(window, span, computed, prompt);
                blocks(gap.start)..blocks(gap.end)
            }
            _ => 0..blocks(self.skipped_tokens(computed) / span),
        }
    }

    /// Leading blocks that a hit of so many tokens goes without. What a window keeps beyond itself is no part of a hit.
    pub(crate) fn skipped_by_hit(self, span: u64, tokens: u64) -> usize {
        let behaviour = if let Self::Window { window, .. } = self { Self::Window { window, extra: 0 } } else { self };
        behaviour.skipped_blocks(span, tokens, None).end
    }

    /// Places of a row that has slots for so many tokens. Rows of aligned states may be shorter.
    pub(crate) fn row_length(self, span: u64, slots: &Slots) -> u64 {
        match self {
            Self::State { extra } => slots.tokens.div_ceil(span).saturating_add(extra),
            Self::AlignedState(spec) => {
                slots.main_tokens.div_ceil(span).saturating_add(u64::from(spec.speculative_blocks))
            }
            Self::Ring => circular_buffer::BLOCKS,
            Self::Encoder => cross_attention::row_length(span, slots.encoder_tokens),
            _ => slots.tokens.div_ceil(span),
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
            Self::Full | Self::ReferenceWindow(_) => full::find_hit(query, sets, rows),
            Self::Window { window, .. } => sliding_window::find_hit(window, query, sets, rows),
            Self::Chunk(chunk) => chunked_local::find_hit(chunk, query, sets, rows),
            Self::State { .. } | Self::AlignedState(_) => mamba::find_hit(query, sets, rows),
            Self::Ring | Self::Encoder => Ok(0),
        }
    }

    /// Whether the block at this place of a row can ever be part of a hit.
    pub(crate) fn is_reachable(self, at: u64, reach: &Reach) -> bool {
        match self {
            Self::Window { window, .. } => sliding_window::is_reachable(window, at, reach),
            Self::State { .. } | Self::AlignedState(_) => mamba::is_reachable(at, reach),
            _ => true,
        }
    }

    /// The most blocks a request holds, if that is bounded by less than its length. `in_flight`: tokens scheduled whose
    /// results are not in yet.
    pub(crate) fn most_blocks(self, span: u64, in_flight: u64, max_model_len: u64) -> Option<u64> {
        match self {
            Self::Window { window, extra } => {
                Some(sliding_window::most_blocks(window.saturating_add(extra), span, in_flight, max_model_len))
            }
            Self::Chunk(chunk) => Some(chunked_local::most_blocks(chunk, span, in_flight, max_model_len)),
            _ => None,
        }
    }

    /// Blocks that a request of the greatest length is planned to hold.
    pub(crate) fn planned_blocks(self, span: u64, in_flight: u64, max_model_len: u64, max_encoder_tokens: u64) -> u64 {
        match self {
            Self::State { extra } => mamba::planned_blocks(extra),
            Self::AlignedState(spec) => mamba_align::planned_blocks(spec),
            Self::Ring => circular_buffer::BLOCKS,
            Self::Encoder => cross_attention::row_length(span, max_encoder_tokens),
            _ => {
                let most = self.most_blocks(span, in_flight, max_model_len);
                most.unwrap_or_else(|| max_model_len.div_ceil(span))
            }
        }
    }
}

/// Refuses groups that hold on other shards than their kind can.
pub(crate) fn check_supported(groups: &[GroupSpec], dcp_world_size: u32) -> Result<()> {
    for (at, group) in groups.iter().enumerate() {
        if matches!(group.kind, GroupKind::SlidingWindow | GroupKind::ChunkedLocal) {
            let shards = group.resolved_kv_shards(dcp_world_size)?;
            if shards > 1 {
                let kind = group.kind.name();
                return Err(Error::config(format!(
                    "group {at}: a group of kind {kind:?} is never sharded, got kv_shards {shards}"
                )));
            }
        }
    }
    let modes = || groups.iter().filter(|group| group.kind == GroupKind::Mamba).map(|group| group.state.mode);
    if let (Some(first), Some(other)) = (modes().next(), modes().find(|&mode| Some(mode) != modes().next())) {
        return Err(Error::config(format!(
            "mamba_cache_mode must be the same for all groups, got {:?} and {:?}",
            first.name(),
            other.name()
        )));
    }
    Ok(())
}
