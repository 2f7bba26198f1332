//! Layers, groups, lockstep sets and layouts.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use lockstep_kv_core as core;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::args::{Given, items, text, uint, uint32, wrong_type};
use crate::errors::raise;

/// One layer of a group: its name and the bytes of one of its blocks on one rank.
///
/// Raises `ConfigError` if `page_bytes` is not at least 1.
#[pyclass(frozen, eq, hash, module = "lockstep_kv")]
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LayerSpec {
    name: String,
    page_bytes: u64,
}

#[pymethods]
impl LayerSpec {
    #[new]
    fn new(name: &Bound<'_, PyAny>, page_bytes: &Bound<'_, PyAny>) -> PyResult<Self> {
        let spec = core::LayerSpec::new(text(name, "name")?, uint(page_bytes, "page_bytes")?).map_err(raise)?;
        Ok(Self { name: spec.name, page_bytes: spec.page_bytes })
    }

    /// The layer's name, unique among all groups.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Bytes of one block of this layer on one rank.
    #[getter]
    fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    fn __getnewargs__(&self) -> (&str, u64) {
        (&self.name, self.page_bytes)
    }

    fn __repr__(&self) -> String {
        format!("LayerSpec({:?}, {})", self.name, self.page_bytes)
    }
}

/// A list of layers with one cache geometry.
///
/// `kind` is "full", "mla", "sliding_window", "reference_window", "chunked_local", "mamba", "circular_buffer" or
/// "cross_attention"; `block_size` the tokens of one block on one rank; `kv_shards` how many distinct shards exist across the
/// context-parallel ranks (None = one per rank, 1 = replicated); `is_eagle` whether a draft model reads the group.
/// A sliding window keeps `extra_retained_tokens` more than it attends to, and is not shared with `prefix_cacheable=False`.
/// For mamba, `mamba_cache_mode` ("none", "all" or "align") says which states are kept, `num_speculative_blocks` how many lie
/// behind the running one for drafts, and `checkpoint_alignment` at which distances from its start a step can save a state
/// (None = only at its end).
///
/// Raises `ConfigError` naming the field that does not fit the kind.
#[pyclass(frozen, eq, module = "lockstep_kv")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupSpec(pub(crate) core::GroupSpec);

#[pymethods]
impl GroupSpec {
    #[new]
    #[pyo3(
        signature = (kind, block_size, layers, *, kv_shards=None, sliding_window=None, extra_retained_tokens=Given::NO, prefix_cacheable=Given::NO, attention_chunk_size=None, mamba_cache_mode=None, num_speculative_blocks=Given::NO, checkpoint_alignment=None, is_eagle=Given::NO),
        text_signature = "(kind, block_size, layers, *, kv_shards=None, sliding_window=None, extra_retained_tokens=0, prefix_cacheable=True, attention_chunk_size=None, mamba_cache_mode=None, num_speculative_blocks=0, checkpoint_alignment=None, is_eagle=False)"
    )]
    fn new(
        kind: &Bound<'_, PyAny>,
        block_size: &Bound<'_, PyAny>,
        layers: &Bound<'_, PyAny>,
        kv_shards: Option<&Bound<'_, PyAny>>,
        sliding_window: Option<&Bound<'_, PyAny>>,
        extra_retained_tokens: Given<'_>,
        prefix_cacheable: Given<'_>,
        attention_chunk_size: Option<&Bound<'_, PyAny>>,
        mamba_cache_mode: Option<&Bound<'_, PyAny>>,
        num_speculative_blocks: Given<'_>,
        checkpoint_alignment: Option<&Bound<'_, PyAny>>,
        is_eagle: Given<'_>,
    ) -> PyResult<Self> {
        let optional = |value: Option<&Bound<'_, PyAny>>, name| value.map(|value| uint32(value, name)).transpose();
        let mode = match mamba_cache_mode {
            Some(name) => core::StateMode::from_name(text(name, "mamba_cache_mode")?).map_err(raise)?,
            None => core::StateMode::None,
        };
        let spec = core::GroupSpec {
            kind: core::GroupKind::from_name(text(kind, "kind")?).map_err(raise)?,
            block_size: uint32(block_size, "block_size")?,
            layers: layers_of(layers)?,
            kv_shards: optional(kv_shards, "kv_shards")?,
            sliding_window: optional(sliding_window, "sliding_window")?,
            extra_retained_tokens: extra_retained_tokens.uint32("extra_retained_tokens", 0)?,
            prefix_cacheable: prefix_cacheable.flag("prefix_cacheable", true)?,
            attention_chunk_size: optional(attention_chunk_size, "attention_chunk_size")?,
            state: core::StateSpec {
                mode,
                speculative_blocks: num_speculative_blocks.uint32("num_speculative_blocks", 0)?,
                checkpoint_alignment: optional(checkpoint_alignment, "checkpoint_alignment")?,
            },
            is_eagle: is_eagle.flag("is_eagle", false)?,
        };
        spec.validate().map_err(raise)?;
        Ok(Self(spec))
    }

    /// What the group caches.
    #[getter]
    fn kind(&self) -> &'static str {
        self.0.kind.name()
    }

    /// Tokens of one block on one rank.
    #[getter]
    fn block_size(&self) -> u32 {
        self.0.block_size
    }

    /// The layers.
    #[getter]
    fn layers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let layers =
            self.0.layers.iter().map(|layer| LayerSpec { name: layer.name.clone(), page_bytes: layer.page_bytes });
        PyTuple::new(py, layers.collect::<Vec<_>>())
    }

    /// Distinct shards across the ranks as given; None = one per rank.
    #[getter]
    fn kv_shards(&self) -> Option<u32> {
        self.0.kv_shards
    }

    /// Window in tokens.
    #[getter]
    fn sliding_window(&self) -> Option<u32> {
        self.0.sliding_window
    }

    /// Tokens behind a sliding window that are kept although nothing attends to them.
    #[getter]
    fn extra_retained_tokens(&self) -> u32 {
        self.0.extra_retained_tokens
    }

    /// Whether blocks can be shared, as given. Circular buffers and cross attention are never shared.
    #[getter]
    fn prefix_cacheable(&self) -> bool {
        self.0.prefix_cacheable
    }

    /// Which states are kept; None for other kinds than mamba.
    #[getter]
    fn mamba_cache_mode(&self) -> Option<&'static str> {
        (self.0.kind == core::GroupKind::Mamba).then(|| self.0.state.mode.name())
    }

    /// Blocks for the states behind draft tokens.
    #[getter]
    fn num_speculative_blocks(&self) -> u32 {
        self.0.state.speculative_blocks
    }

    /// At which distances from its start a step can save a state; None = only at its end.
    #[getter]
    fn checkpoint_alignment(&self) -> Option<u32> {
        self.0.state.checkpoint_alignment
    }

    /// Chunk in tokens.
    #[getter]
    fn attention_chunk_size(&self) -> Option<u32> {
        self.0.attention_chunk_size
    }

    /// Whether a draft model reads the group.
    #[getter]
    fn is_eagle(&self) -> bool {
        self.0.is_eagle
    }

    /// Bytes of one block of all layers on one rank.
    #[getter]
    fn bytes_per_block(&self) -> PyResult<u64> {
        self.0.bytes_per_block().map_err(raise)
    }

    /// Distinct shards across `dcp_world_size` ranks.
    fn resolved_kv_shards(&self, dcp_world_size: &Bound<'_, PyAny>) -> PyResult<u32> {
        self.0.resolved_kv_shards(uint32(dcp_world_size, "dcp_world_size")?).map_err(raise)
    }

    /// Tokens one block id stands for, over all ranks: `block_size * kv_shards`.
    fn tokens_per_block(&self, dcp_world_size: &Bound<'_, PyAny>) -> PyResult<u64> {
        self.0.tokens_per_block(uint32(dcp_world_size, "dcp_world_size")?).map_err(raise)
    }

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
        let options = PyDict::new(py);
        options.set_item("kv_shards", self.0.kv_shards)?;
        options.set_item("sliding_window", self.0.sliding_window)?;
        options.set_item("extra_retained_tokens", self.0.extra_retained_tokens)?;
        options.set_item("prefix_cacheable", self.0.prefix_cacheable)?;
        options.set_item("attention_chunk_size", self.0.attention_chunk_size)?;
        options.set_item("mamba_cache_mode", self.mamba_cache_mode())?;
        options.set_item("num_speculative_blocks", self.0.state.speculative_blocks)?;
        options.set_item("checkpoint_alignment", self.0.state.checkpoint_alignment)?;
        options.set_item("is_eagle", self.0.is_eagle)?;
        let positional = (self.kind(), self.block_size(), self.layers(py)?).into_pyobject(py)?;
        Ok((positional, options))
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.0.kind, self.0.block_size, self.0.kv_shards, self.0.layers.len()).hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        let spec = &self.0;
        let layers: Vec<_> =
            spec.layers.iter().map(|layer| format!("LayerSpec({:?}, {})", layer.name, layer.page_bytes)).collect();
        let positive = |number: u32| (number > 0).then_some(number);
        let numbers = [
            ("kv_shards", spec.kv_shards),
            ("sliding_window", spec.sliding_window),
            ("extra_retained_tokens", positive(spec.extra_retained_tokens)),
            ("attention_chunk_size", spec.attention_chunk_size),
            ("num_speculative_blocks", positive(spec.state.speculative_blocks)),
            ("checkpoint_alignment", spec.state.checkpoint_alignment),
        ];
        let given = numbers.iter().filter_map(|(name, value)| value.map(|value| format!(", {name}={value}")));
        let mode = self.mamba_cache_mode().map(|mode| format!(", mamba_cache_mode={mode:?}"));
        let private = (!spec.prefix_cacheable).then(|| ", prefix_cacheable=False".to_owned());
        let eagle = spec.is_eagle.then(|| ", is_eagle=True".to_owned());
        let extra = given.chain(mode).chain(private).chain(eagle).collect::<String>();
        format!("GroupSpec({:?}, {}, [{}]{extra})", spec.kind.name(), spec.block_size, layers.join(", "))
    }
}

fn layers_of(value: &Bound<'_, PyAny>) -> PyResult<Vec<core::LayerSpec>> {
    let layers = items(value, "layers")?;
    let layer = |(at, item): (usize, &Bound<'_, PyAny>)| match item.cast::<LayerSpec>() {
        Ok(layer) => Ok(core::LayerSpec { name: layer.get().name.clone(), page_bytes: layer.get().page_bytes }),
        Err(_) => Err(wrong_type(&format!("layers[{at}]"), "a LayerSpec", item)),
    };
    layers.iter().enumerate().map(layer).collect()
}

/// The groups of a sequence of `GroupSpec`.
pub(crate) fn groups_of(value: &Bound<'_, PyAny>) -> PyResult<Vec<core::GroupSpec>> {
    let groups = items(value, "groups")?;
    let group = |(at, item): (usize, &Bound<'_, PyAny>)| match item.cast::<GroupSpec>() {
        Ok(group) => Ok(group.get().0.clone()),
        Err(_) => Err(wrong_type(&format!("groups[{at}]"), "a GroupSpec", item)),
    };
    groups.iter().enumerate().map(group).collect()
}

/// One or more groups that share one row of block ids per request.
#[pyclass(frozen, eq, module = "lockstep_kv")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LockstepSet(core::LockstepSet);

#[pymethods]
impl LockstepSet {
    /// The member groups, ascending.
    #[getter]
    fn group_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.group_ids.iter().map(|group| group.0).collect::<Vec<_>>())
    }

    /// Tokens one block id stands for, over all ranks; the same for every member.
    #[getter]
    fn tokens_per_block(&self) -> u64 {
        self.0.tokens_per_block
    }

    /// Whether the set has several members.
    #[getter]
    fn is_lockstep(&self) -> bool {
        self.0.is_lockstep()
    }

    /// Why a group that holds its tokens on other shards than some MLA group is not in lockstep with it.
    #[getter]
    fn why_separate(&self) -> Option<&str> {
        self.0.why_separate.as_deref()
    }

    fn __repr__(&self) -> String {
        let ids: Vec<_> = self.0.group_ids.iter().map(|group| group.0.to_string()).collect();
        let comma = if ids.len() == 1 { "," } else { "" };
        format!("LockstepSet(group_ids=({}{comma}), tokens_per_block={})", ids.join(", "), self.0.tokens_per_block)
    }
}

/// A tuple of sets.
pub(crate) fn tuple_of_sets<'py>(py: Python<'py>, sets: &[core::LockstepSet]) -> PyResult<Bound<'py, PyTuple>> {
    PyTuple::new(py, sets.iter().cloned().map(LockstepSet).collect::<Vec<_>>())
}

/// Where the pages of one layer lie in the backing allocation of one rank, in bytes.
#[pyclass(frozen, eq, module = "lockstep_kv")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LayoutTensor(core::geometry::PageRegion);

#[pymethods]
impl LayoutTensor {
    /// The layer's name.
    #[getter]
    fn layer(&self) -> &str {
        &self.0.layer
    }

    /// The layer's group.
    #[getter]
    fn group_id(&self) -> u32 {
        self.0.group_id.0
    }

    /// Offset of the page of block 0.
    #[getter]
    fn offset(&self) -> u64 {
        self.0.offset
    }

    /// Bytes of all pages of the layer.
    #[getter]
    fn size(&self) -> u64 {
        self.0.size
    }

    /// Bytes of one page.
    #[getter]
    fn page(&self) -> u64 {
        self.0.page
    }

    /// Bytes from one block's page to the next block's: `page` where the layer's pages are contiguous.
    #[getter]
    fn block_stride(&self) -> u64 {
        self.0.block_stride
    }

    fn __repr__(&self) -> String {
        let core::geometry::PageRegion { layer, group_id, offset, size, page, block_stride } = &self.0;
        format!(
            "LayoutTensor(layer={layer:?}, group_id={}, offset={offset}, size={size}, page={page}, \
             block_stride={block_stride})",
            group_id.0
        )
    }
}

/// A planned layout of one rank.
#[pyclass(frozen, eq, module = "lockstep_kv")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout(core::Layout);

#[pymethods]
impl Layout {
    /// The lockstep sets.
    #[getter]
    fn sets<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        tuple_of_sets(py, &self.0.sets)
    }

    /// Blocks, the null block included.
    #[getter]
    fn num_blocks(&self) -> u64 {
        self.0.num_blocks
    }

    /// Bytes one block id stands for on one rank: the largest set's sum of pages.
    #[getter]
    fn bytes_per_block(&self) -> u64 {
        self.0.bytes_per_block
    }

    /// Bytes of the backing allocation of one rank.
    #[getter]
    fn total_bytes(&self) -> u64 {
        self.0.total_bytes()
    }

    /// Blocks a request of `max_model_len` tokens holds, over all sets.
    #[getter]
    fn blocks_per_request(&self) -> u64 {
        self.0.blocks_per_request
    }

    /// Longest request, in tokens.
    #[getter]
    fn max_model_len(&self) -> u64 {
        self.0.max_model_len
    }

    /// Requests of `max_model_len` tokens that fit at once. Like vLLM's figure it counts the null block.
    #[getter]
    fn max_concurrency(&self) -> f64 {
        self.0.max_concurrency()
    }

    /// Tokens that fit: `max_concurrency * max_model_len`, rounded down.
    #[getter]
    fn capacity_tokens(&self) -> u64 {
        self.0.capacity_tokens()
    }

    /// One entry per layer, in the order of groups and layers.
    #[getter]
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.regions.iter().cloned().map(LayoutTensor).collect::<Vec<_>>())
    }

    fn __repr__(&self) -> String {
        format!(
            "Layout(num_blocks={}, bytes_per_block={}, capacity_tokens={}, layers={})",
            self.0.num_blocks,
            self.0.bytes_per_block,
            self.0.capacity_tokens(),
            self.0.regions.len()
        )
    }
}

/// Plan where the pages of all groups lie on one rank.
///
/// Give `available_bytes` (bytes for the cache on one rank), `num_blocks` (the null block included) or both; then the
/// blocks must fit. Raises `ConfigError` if a group is not valid or of a kind that is not supported, if layer names
/// repeat, or if a request of `max_model_len` tokens does not fit. `max_in_flight_tokens` (None = `max_model_len`) bounds what
/// windows and chunks hold, and `max_encoder_tokens` what cross attention holds, which cannot be planned without.
#[pyfunction]
#[pyo3(
    signature = (groups, *, dcp_world_size, available_bytes=None, num_blocks=None, max_model_len, max_in_flight_tokens=None, max_encoder_tokens=Given::NO),
    text_signature = "(groups, *, dcp_world_size, available_bytes=None, num_blocks=None, max_model_len, max_in_flight_tokens=None, max_encoder_tokens=0)"
)]
pub(crate) fn plan_layout(
    groups: &Bound<'_, PyAny>,
    dcp_world_size: &Bound<'_, PyAny>,
    available_bytes: Option<&Bound<'_, PyAny>>,
    num_blocks: Option<&Bound<'_, PyAny>>,
    max_model_len: &Bound<'_, PyAny>,
    max_in_flight_tokens: Option<&Bound<'_, PyAny>>,
    max_encoder_tokens: Given<'_>,
) -> PyResult<Layout> {
    let groups = groups_of(groups)?;
    let request = core::geometry::LayoutRequest {
        groups: &groups,
        dcp_world_size: uint32(dcp_world_size, "dcp_world_size")?,
        available_bytes: available_bytes.map(|value| uint(value, "available_bytes")).transpose()?,
        num_blocks: num_blocks.map(|value| uint(value, "num_blocks")).transpose()?,
        max_model_len: uint(max_model_len, "max_model_len")?,
        max_in_flight_tokens: max_in_flight_tokens.map(|value| uint(value, "max_in_flight_tokens")).transpose()?,
        max_encoder_tokens: max_encoder_tokens.uint("max_encoder_tokens", 0)?,
    };
    core::plan_layout(&request).map(Layout).map_err(raise)
}
