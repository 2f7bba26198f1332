//! What a cache group is, and the one formula: `tokens_per_block = block_size * kv_shards`.
//!
//! Nothing else in this code base multiplies or divides by the number of context-parallel ranks.

use crate::error::{Error, Result};

/// The kinds of cache a group can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupKind {
    /// Full attention: every token of the request is kept.
    Full,
    /// Multi-head latent attention, its indexer included: kept like full attention, may form lockstep sets.
    Mla,
    /// Attention over the last `sliding_window` tokens.
    SlidingWindow,
    /// Attention to the whole prompt, and behind it to the last `sliding_window` tokens (R-SWA).
    ReferenceWindow,
    /// Attention inside chunks of `attention_chunk_size` tokens.
    ChunkedLocal,
    /// Recurrent state.
    Mamba,
    /// One block per request that is written round and round.
    CircularBuffer,
    /// Attention to the encoder's tokens.
    CrossAttention,
}

impl GroupKind {
    /// All kinds, in the order of their names in messages.
    pub const ALL: [Self; 8] = [
        Self::Full,
        Self::Mla,
        Self::SlidingWindow,
        Self::ReferenceWindow,
        Self::ChunkedLocal,
        Self::Mamba,
        Self::CircularBuffer,
        Self::CrossAttention,
    ];

    /// The kind's name in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Mla => "mla",
            Self::SlidingWindow => "sliding_window",
            Self::ReferenceWindow => "reference_window",
            Self::ChunkedLocal => "chunked_local",
            Self::Mamba => "mamba",
            Self::CircularBuffer => "circular_buffer",
            Self::CrossAttention => "cross_attention",
        }
    }

    /// The kind with this name.
    ///
    /// # Errors
    /// [`Error::Config`] for any other name.
    pub fn from_name(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|kind| kind.name()).collect();
            Error::config(format!("unknown group kind {name:?}; known kinds: {}", known.join(", ")))
        })
    }

    /// Whether the context-parallel ranks can each hold a part of this kind's tokens. Recurrent state, buffers and the
    /// encoder's tokens are whole on every rank.
    const fn can_be_sharded(self) -> bool {
        !matches!(self, Self::Mamba | Self::CircularBuffer | Self::CrossAttention)
    }

    /// Whether the kind has a `sliding_window`.
    const fn has_window(self) -> bool {
        matches!(self, Self::SlidingWindow | Self::ReferenceWindow)
    }
}

/// Which recurrent states a request keeps, as vLLM's `mamba_cache_mode` names them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StateMode {
    /// One running state; nothing is shared.
    #[default]
    None,
    /// A state for every block of tokens.
    All,
    /// The running state, and those at the ends of blocks at which the scheduler made a step end.
    Align,
}

impl StateMode {
    /// All modes, in the order of their names in messages.
    pub const ALL: [Self; 3] = [Self::None, Self::All, Self::Align];

    /// The mode's name in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::All => "all",
            Self::Align => "align",
        }
    }

    /// The mode with this name.
    ///
    /// # Errors
    /// [`Error::Config`] for any other name.
    pub fn from_name(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|mode| mode.name()).collect();
            Error::config(format!("unknown mamba_cache_mode {name:?}; known modes: {}", known.join(", ")))
        })
    }
}

/// What only groups of kind [`GroupKind::Mamba`] have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct StateSpec {
    /// Which states a request keeps.
    pub mode: StateMode,
    /// Blocks for the states behind draft tokens.
    pub speculative_blocks: u32,
    /// The backend can save a state in the middle of a step, so many tokens or a multiple behind its start; `None` = only
    /// at the end of a step.
    pub checkpoint_alignment: Option<u32>,
}

/// One layer of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    /// The layer's name, unique among all groups.
    pub name: String,
    /// Bytes of one block of this layer on one rank.
    pub page_bytes: u64,
}

impl LayerSpec {
    /// A layer with pages of `page_bytes` bytes.
    ///
    /// # Errors
    /// [`Error::Config`] if `page_bytes` is 0.
    pub fn new(name: impl Into<String>, page_bytes: u64) -> Result<Self> {
        let name = name.into();
        if page_bytes == 0 {
            return Err(Error::config(format!("layer {name:?}: page_bytes must be at least 1, got 0")));
        }
        Ok(Self { name, page_bytes })
    }
}

/// A list of layers with one cache geometry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSpec {
    /// What the group caches.
    pub kind: GroupKind,
    /// Tokens whose records lie in one block on one rank.
    pub block_size: u32,
    /// The layers. Their `page_bytes` may differ.
    pub layers: Vec<LayerSpec>,
    /// How many distinct shards of the group exist across the context-parallel ranks; `None` = one per rank.
    pub kv_shards: Option<u32>,
    /// Window in tokens, for [`GroupKind::SlidingWindow`] and [`GroupKind::ReferenceWindow`].
    pub sliding_window: Option<u32>,
    /// Tokens behind a sliding window that are kept although nothing attends to them.
    pub extra_retained_tokens: u32,
    /// Whether blocks can be shared. A sliding window that is computed anew for every request is not; neither are circular
    /// buffers and the encoder's tokens, whatever is said here.
    pub prefix_cacheable: bool,
    /// Chunk in tokens, for [`GroupKind::ChunkedLocal`].
    pub attention_chunk_size: Option<u32>,
    /// For [`GroupKind::Mamba`].
    pub state: StateSpec,
    /// Whether a draft model reads this group, so that a hit must leave its last block to be computed again.
    pub is_eagle: bool,
}

impl GroupSpec {
    /// A group with defaults: one shard per rank, no window, no chunk, not read by a draft model.
    pub fn new(kind: GroupKind, block_size: u32, layers: Vec<LayerSpec>) -> Self {
        Self {
            kind,
            block_size,
            layers,
            kv_shards: None,
            sliding_window: None,
            extra_retained_tokens: 0,
            prefix_cacheable: true,
            attention_chunk_size: None,
            state: StateSpec::default(),
            is_eagle: false,
        }
    }

    /// Sets `kv_shards`.
    #[must_use]
    pub fn with_kv_shards(mut self, kv_shards: u32) -> Self {
        self.kv_shards = Some(kv_shards);
        self
    }

    /// Checks what can be checked without knowing the number of ranks.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field and its value.
    pub fn validate(&self) -> Result<()> {
        let kind = self.kind.name();
        if self.block_size == 0 {
            return Err(Error::config(format!("{kind} group: block_size must be at least 1, got 0")));
        }
        match self.kv_shards {
            Some(0) => return Err(Error::config(format!("{kind} group: kv_shards must be at least 1, got 0"))),
            Some(shards) if shards > 1 && !self.kind.can_be_sharded() => {
                return Err(Error::config(format!("{kind} group: its state is never sharded, got kv_shards {shards}")));
            }
            _ => {}
        }
        let windowed = self.kind.has_window();
        let chunked = self.kind == GroupKind::ChunkedLocal;
        for (field, value, belongs, owners) in [
            ("sliding_window", self.sliding_window, windowed, "sliding_window and reference_window"),
            ("attention_chunk_size", self.attention_chunk_size, chunked, "chunked_local"),
        ] {
            match value {
                Some(0) => return Err(Error::config(format!("{kind} group: {field} must be at least 1, got 0"))),
                Some(tokens) if !belongs => {
                    return Err(Error::config(format!("{kind} group: {field} is for {owners}, got {tokens}")));
                }
                None if belongs => return Err(Error::config(format!("{kind} group: {field} is missing"))),
                _ => {}
            }
        }
        if self.kind != GroupKind::SlidingWindow {
            if self.extra_retained_tokens > 0 {
                let extra = self.extra_retained_tokens;
                return Err(Error::config(format!(
                    "{kind} group: extra_retained_tokens is for sliding_window, got {extra}"
                )));
            }
            if !self.prefix_cacheable {
                return Err(Error::config(format!("{kind} group: prefix_cacheable=False is for sliding_window")));
            }
        }
        if self.kind != GroupKind::Mamba && self.state != StateSpec::default() {
            return Err(Error::config(format!(
                "{kind} group: mamba_cache_mode, num_speculative_blocks and checkpoint_alignment are for mamba"
            )));
        }
        match (self.state.mode, self.state.checkpoint_alignment) {
            (_, Some(0)) => Err(Error::config(format!("{kind} group: checkpoint_alignment must be at least 1, got 0"))),
            (StateMode::None | StateMode::All, Some(tokens)) => Err(Error::config(format!(
                "{kind} group: checkpoint_alignment is for mamba_cache_mode \"align\", got {tokens}"
            ))),
            _ => Ok(()),
        }
    }

    /// Whether blocks of the group can be found by their content.
    pub fn is_cacheable(&self) -> bool {
        self.prefix_cacheable && !matches!(self.kind, GroupKind::CircularBuffer | GroupKind::CrossAttention)
    }

    /// How many distinct shards of this group exist across `dcp_world_size` ranks.
    ///
    /// # Errors
    /// [`Error::Config`] if `kv_shards` does not divide `dcp_world_size`.
    pub fn resolved_kv_shards(&self, dcp_world_size: u32) -> Result<u32> {
        if dcp_world_size == 0 {
            return Err(Error::config("dcp_world_size must be at least 1, got 0"));
        }
        if !self.kind.can_be_sharded() {
            return Ok(1);
        }
        let shards = self.kv_shards.unwrap_or(dcp_world_size);
        if shards == 0 || !dcp_world_size.is_multiple_of(shards) {
            return Err(Error::config(format!(
                "kv_shards must be a positive divisor of dcp_world_size {dcp_world_size}, got {shards}"
            )));
        }
        Ok(shards)
    }

    /// Tokens one block id of this group stands for, over all ranks: `block_size * kv_shards`.
    ///
    /// # Errors
    /// As [`GroupSpec::resolved_kv_shards`].
    pub fn tokens_per_block(&self, dcp_world_size: u32) -> Result<u64> {
        Ok(u64::from(self.block_size) * u64::from(self.resolved_kv_shards(dcp_world_size)?))
    }

    /// Bytes of one block of all layers on one rank.
    ///
    /// # Errors
    /// [`Error::Config`] if the sum does not fit in 64 bits.
    pub fn bytes_per_block(&self) -> Result<u64> {
        let sum = self.layers.iter().try_fold(0_u64, |sum, layer| sum.checked_add(layer.page_bytes));
        sum.ok_or_else(|| Error::config(format!("{} group: the sum of page_bytes overflows", self.kind.name())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_formula_scales_attention_by_its_shards_and_nothing_else() -> Result<()> {
        let mla = GroupSpec::new(GroupKind::Mla, 64, vec![]);
        assert_eq!(mla.tokens_per_block(1)?, 64);
        assert_eq!(mla.tokens_per_block(8)?, 512);
        assert_eq!(mla.clone().with_kv_shards(4).tokens_per_block(8)?, 256);
        assert_eq!(mla.clone().with_kv_shards(1).tokens_per_block(8)?, 64);
        assert_eq!(GroupSpec::new(GroupKind::Mamba, 16, vec![]).tokens_per_block(2)?, 16);
        Ok(())
    }

    #[test]
    fn only_divisors_are_shard_counts() {
        for shards in [0, 3, 5, 6, 7, 9, 16] {
            let spec = GroupSpec::new(GroupKind::Mla, 64, vec![]).with_kv_shards(shards);
            let error = spec.tokens_per_block(8).expect_err("not a divisor").to_string();
            assert!(error.contains("positive divisor") && error.contains(&shards.to_string()), "{error}");
        }
    }

    #[test]
    fn windows_and_chunks_belong_to_their_kinds() {
        let mut spec = GroupSpec::new(GroupKind::SlidingWindow, 16, vec![]);
        assert!(spec.validate().is_err());
        spec.sliding_window = Some(0);
        assert!(spec.validate().is_err());
        spec.sliding_window = Some(128);
        assert_eq!(spec.validate(), Ok(()));
        spec.kind = GroupKind::Full;
        assert!(spec.validate().is_err());
    }

    #[test]
    fn names_round_trip() -> Result<()> {
        for kind in GroupKind::ALL {
            assert_eq!(GroupKind::from_name(kind.name())?, kind);
        }
        assert!(GroupKind::from_name("dense").is_err());
        Ok(())
    }
}
