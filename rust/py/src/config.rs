//! What a coordinator is made from.

use lockstep_kv_core as core;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::args::{Given, uint, uint32};
use crate::errors::raise;
use crate::geometry::{GroupSpec, groups_of};

/// What a coordinator is made from.
///
/// `num_blocks` includes the null block. `dcp_world_size` is the number of decode-context-parallel ranks.
/// `hash_block_tokens` is the number of tokens per block hash (None = the greatest common divisor of all sets' tokens
/// per block). With `use_eagle`, groups marked `is_eagle` (all, if none is) leave the last block of a hit to be computed
/// again. `max_in_flight_tokens` (None = `max_model_len`) bounds what windows and chunks hold: tokens of one request that
/// are scheduled and whose results are not in yet, at most. With `retention_interval`, windows publish the blocks before every
/// so many tokens only, and before the ends of prompts (0 = only the latter, None = before every length that a hit can have).
///
/// Raises `ConfigError` naming the value that cannot be used.
#[pyclass(frozen, eq, module = "lockstep_kv")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CoordinatorConfig(pub(crate) core::CoordinatorConfig);

#[pymethods]
impl CoordinatorConfig {
    #[new]
    #[pyo3(
        signature = (groups, num_blocks, *, dcp_world_size=Given::NO, enable_caching=Given::NO, hash_block_tokens=None, max_model_len, use_eagle=Given::NO, enable_events=Given::NO, max_in_flight_tokens=None, retention_interval=None),
        text_signature = "(groups, num_blocks, *, dcp_world_size=1, enable_caching=True, hash_block_tokens=None, max_model_len, use_eagle=False, enable_events=False, max_in_flight_tokens=None, retention_interval=None)"
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
    ) -> PyResult<Self> {
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

    /// Windows publish the blocks before every so many tokens only, and before the ends of prompts; None = before every
    /// length that a hit can have.
    #[getter]
    fn retention_interval(&self) -> Option<u64> {
        self.0.retention_interval
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
