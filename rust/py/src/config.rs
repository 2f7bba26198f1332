//! What a coordinator is made from.

use lockstep_kv_core as core;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::args::{Given, items, uint, uint32};
use crate::errors::raise;
use crate::geometry::{GroupSpec, groups_of};

/// What a coordinator is made from.
///
/// `num_blocks` includes the null block. `dcp_world_size` is the number of decode-context-parallel ranks.
/// `hash_block_tokens` is the number of tokens per block hash (None = the greatest common divisor of all sets' tokens
/// per block). With `use_eagle`, groups marked `is_eagle` (all, if none is) leave the last block of a hit to be computed
/// again. `max_in_flight_tokens` (None = `max_model_len`) bounds what windows and chunks hold: tokens of one request that
/// are scheduled and whose results are not in yet, at most. With `retention_interval`, windows and states publish the blocks
/// before every so many tokens only, and before the ends of prompts (0 = only the latter, None = before every length that a hit
/// can have). `num_prefill_lookahead` tokens behind a prompt's chunk are read by a draft model of several modules: all but the
/// first may be computed again, so that the last blocks are not final yet. With `publishes_shared_prefix`, states of mode
/// "align" are published where a shared prefix ends, even inside a block. `lookup_classes` holds a number per group, equal for
/// those that are looked up together (None = groups of equal geometry). With `notes_new_blocks`, `take_new_blocks` tells which
/// blocks must be cleared, and with `notes_uses`, `take_uses` how blocks are used.
///
/// Raises `ConfigError` naming the value that cannot be used.
#[pyclass(frozen, eq, module = "lockstep_kv")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CoordinatorConfig(pub(crate) core::CoordinatorConfig);

#[pymethods]
impl CoordinatorConfig {
    #[new]
    #[pyo3(
        signature = (groups, num_blocks, *, dcp_world_size=Given::NO, enable_caching=Given::NO, hash_block_tokens=None, max_model_len, use_eagle=Given::NO, enable_events=Given::NO, max_in_flight_tokens=None, retention_interval=None, num_prefill_lookahead=Given::NO, publishes_shared_prefix=Given::NO, lookup_classes=None, notes_new_blocks=Given::NO, notes_uses=Given::NO),
        text_signature = "(groups, num_blocks, *, dcp_world_size=1, enable_caching=True, hash_block_tokens=None, max_model_len, use_eagle=False, enable_events=False, max_in_flight_tokens=None, retention_interval=None, num_prefill_lookahead=0, publishes_shared_prefix=False, lookup_classes=None, notes_new_blocks=False, notes_uses=False)"
    )]
    fn new(
        groups: &Bound<'_, PyAny>,
        num_blocks: &Bound<'_, PyAny>,
        dcp_world_size: Given<'_>,
        enable_caching: Given<'_>,
        hash_block_tokens: Option<&Bound<'_, PyAny>>,
        max_model_len: &Bound<'_, PyAny>,
        use_eagle: Given<'_>,
        enable_events: Given<'_>,
        max_in_flight_tokens: Option<&Bound<'_, PyAny>>,
        retention_interval: Option<&Bound<'_, PyAny>>,
        num_prefill_lookahead: Given<'_>,
        publishes_shared_prefix: Given<'_>,
        lookup_classes: Option<&Bound<'_, PyAny>>,
        notes_new_blocks: Given<'_>,
        notes_uses: Given<'_>,
    ) -> PyResult<Self> {
        let class = |(at, number): (usize, &Bound<'_, PyAny>)| uint32(number, &format!("lookup_classes[{at}]"));
        let classes_of =
            |value| items(value, "lookup_classes")?.iter().enumerate().map(class).collect::<PyResult<Vec<_>>>();
        let config = core::CoordinatorConfig {
            groups: groups_of(groups)?,
            num_blocks: uint32(num_blocks, "num_blocks")?,
            dcp_world_size: dcp_world_size.uint32("dcp_world_size", 1)?,
            enable_caching: enable_caching.flag("enable_caching", true)?,
            hash_block_tokens: hash_block_tokens.map(|value| uint(value, "hash_block_tokens")).transpose()?,
            max_model_len: uint(max_model_len, "max_model_len")?,
            use_eagle: use_eagle.flag("use_eagle", false)?,
            enable_events: enable_events.flag("enable_events", false)?,
            max_in_flight_tokens: max_in_flight_tokens.map(|value| uint(value, "max_in_flight_tokens")).transpose()?,
            retention_interval: retention_interval.map(|value| uint(value, "retention_interval")).transpose()?,
            num_prefill_lookahead: num_prefill_lookahead.uint("num_prefill_lookahead", 0)?,
            publishes_shared_prefix: publishes_shared_prefix.flag("publishes_shared_prefix", false)?,
            lookup_classes: lookup_classes.map(classes_of).transpose()?,
            notes_new_blocks: notes_new_blocks.flag("notes_new_blocks", false)?,
            notes_uses: notes_uses.flag("notes_uses", false)?,
        };
        config.validate().map_err(raise)?;
        Ok(Self(config))
    }

    /// The groups.
    #[getter]
    fn groups<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.groups.iter().cloned().map(GroupSpec).collect::<Vec<_>>())
    }

    /// Blocks in the pool, the null block included.
    #[getter]
    fn num_blocks(&self) -> u32 {
        self.0.num_blocks
    }

    /// Ranks in the decode-context-parallel group.
    #[getter]
    fn dcp_world_size(&self) -> u32 {
        self.0.dcp_world_size
    }

    /// Whether prefixes are shared.
    #[getter]
    fn enable_caching(&self) -> bool {
        self.0.enable_caching
    }

    /// Tokens per block hash as given; None = the greatest common divisor of all sets' tokens per block.
    #[getter]
    fn hash_block_tokens(&self) -> Option<u64> {
        self.0.hash_block_tokens
    }

    /// Longest request, in tokens.
    #[getter]
    fn max_model_len(&self) -> u64 {
        self.0.max_model_len
    }

    /// Whether a draft model reads the cache.
    #[getter]
    fn use_eagle(&self) -> bool {
        self.0.use_eagle
    }

    /// Whether events are noted.
    #[getter]
    fn enable_events(&self) -> bool {
        self.0.enable_events
    }

    /// Tokens of one request that are scheduled and whose results are not in yet, at most; None = max_model_len.
    #[getter]
    fn max_in_flight_tokens(&self) -> Option<u64> {
        self.0.max_in_flight_tokens
    }

    /// Windows and states publish the blocks before every so many tokens only, and before the ends of prompts; None = before
    /// every length that a hit can have.
    #[getter]
    fn retention_interval(&self) -> Option<u64> {
        self.0.retention_interval
    }

    /// Tokens behind a prompt's chunk that a draft model reads.
    #[getter]
    fn num_prefill_lookahead(&self) -> u64 {
        self.0.num_prefill_lookahead
    }

    /// Whether states are published where a shared prefix ends inside a block.
    #[getter]
    fn publishes_shared_prefix(&self) -> bool {
        self.0.publishes_shared_prefix
    }

    /// A number per group, equal for those that are looked up together; None = groups of equal geometry.
    #[getter]
    fn lookup_classes(&self) -> Option<Vec<u32>> {
        self.0.lookup_classes.clone()
    }

    /// Whether blocks that must be cleared are noted.
    #[getter]
    fn notes_new_blocks(&self) -> bool {
        self.0.notes_new_blocks
    }

    /// Whether the uses of blocks are noted.
    #[getter]
    fn notes_uses(&self) -> bool {
        self.0.notes_uses
    }

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
        let options = PyDict::new(py);
        options.set_item("dcp_world_size", self.0.dcp_world_size)?;
        options.set_item("enable_caching", self.0.enable_caching)?;
        options.set_item("hash_block_tokens", self.0.hash_block_tokens)?;
        options.set_item("max_model_len", self.0.max_model_len)?;
        options.set_item("use_eagle", self.0.use_eagle)?;
        options.set_item("enable_events", self.0.enable_events)?;
        options.set_item("max_in_flight_tokens", self.0.max_in_flight_tokens)?;
        options.set_item("retention_interval", self.0.retention_interval)?;
        options.set_item("num_prefill_lookahead", self.0.num_prefill_lookahead)?;
        options.set_item("publishes_shared_prefix", self.0.publishes_shared_prefix)?;
        options.set_item("lookup_classes", self.0.lookup_classes.clone())?;
        options.set_item("notes_new_blocks", self.0.notes_new_blocks)?;
        options.set_item("notes_uses", self.0.notes_uses)?;
        Ok(((self.groups(py)?, self.0.num_blocks).into_pyobject(py)?, options))
    }

    fn __repr__(&self) -> String {
        let config = &self.0;
        format!(
            "CoordinatorConfig({} groups, {} blocks, dcp_world_size={}, max_model_len={})",
            config.groups.len(),
            config.num_blocks,
            config.dcp_world_size,
            config.max_model_len
        )
    }
}
