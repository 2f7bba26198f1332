//! The coordinator.

use lockstep_kv_core as core;
use lockstep_kv_core::{BlockId, GroupId};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::args::{Given, bytes, text, uint, uint32, wrong_type};
use crate::errors::raise;
use crate::events::list_of_events;
use crate::geometry::{GroupSpec, groups_of, tuple_of_sets};
use crate::lists::{HashList, ids_of, list_of_ids, tuple_of_rows};

/// What a coordinator is made from.
///
/// `num_blocks` includes the null block. `dcp_world_size` is the number of decode-context-parallel ranks.
/// `hash_block_tokens` is the number of tokens per block hash (None = the greatest common divisor of all sets' tokens
/// per block). With `use_eagle`, groups marked `is_eagle` (all, if none is) leave the last block of a hit to be computed
/// again.
///
/// Raises `ConfigError` naming the value that cannot be used.
#[pyclass(frozen, eq, module = "lockstep_kv")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CoordinatorConfig(core::CoordinatorConfig);

#[pymethods]
impl CoordinatorConfig {
    #[new]
    #[pyo3(
        signature = (groups, num_blocks, *, dcp_world_size=Given::NO, enable_caching=Given::NO, hash_block_tokens=None, max_model_len, use_eagle=Given::NO, enable_events=Given::NO),
        text_signature = "(groups, num_blocks, *, dcp_world_size=1, enable_caching=True, hash_block_tokens=None, max_model_len, use_eagle=False, enable_events=False)"
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

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
        let options = PyDict::new(py);
        options.set_item("dcp_world_size", self.0.dcp_world_size)?;
        options.set_item("enable_caching", self.0.enable_caching)?;
        options.set_item("hash_block_tokens", self.0.hash_block_tokens)?;
        options.set_item("max_model_len", self.0.max_model_len)?;
        options.set_item("use_eagle", self.0.use_eagle)?;
        options.set_item("enable_events", self.0.enable_events)?;
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

/// A prefix found in the pool. It holds no references; using it after one of its blocks lost its keys raises
/// `StaleHitError`.
#[pyclass(frozen, eq, module = "lockstep_kv")]
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PrefixHit(core::PrefixHit);

#[pymethods]
impl PrefixHit {
    /// Tokens found; the same for every group.
    #[getter]
    fn num_tokens(&self) -> u64 {
        self.0.num_tokens()
    }

    /// One list of block ids per group, in the order of the tokens.
    #[getter]
    fn block_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        tuple_of_rows(py, self.0.num_groups(), |group| self.0.block_ids(group))
    }

    fn __repr__(&self) -> String {
        format!("PrefixHit(num_tokens={})", self.0.num_tokens())
    }
}

/// Blocks for the requests of one engine, over one pool and any number of lockstep sets.
///
/// A call that raises has changed nothing. Raises `ConfigError` if the configuration cannot be used, a kind of group
/// that is not supported included.
#[pyclass(module = "lockstep_kv")]
#[derive(Debug)]
pub(crate) struct Coordinator(core::Coordinator);

impl Coordinator {
    fn num_groups(&self) -> usize {
        self.0.config().groups.len()
    }
}

#[pymethods]
impl Coordinator {
    #[new]
    fn new(config: &Bound<'_, PyAny>) -> PyResult<Self> {
        let Ok(config) = config.cast::<CoordinatorConfig>() else {
            return Err(wrong_type("config", "a CoordinatorConfig", config));
        };
        core::Coordinator::new(config.get().0.clone()).map(Self).map_err(raise)
    }

    /// What the coordinator was made from.
    #[getter]
    fn config(&self) -> CoordinatorConfig {
        CoordinatorConfig(self.0.config().clone())
    }

    /// The lockstep sets, in the order of their first groups.
    #[getter]
    fn sets<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        tuple_of_sets(py, self.0.sets())
    }

    /// Tokens per block hash.
    #[getter]
    fn hash_block_tokens(&self) -> u64 {
        self.0.hash_block_tokens()
    }

    /// Blocks, the null block included.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.0.pool().num_blocks()
    }

    /// Blocks that can be taken.
    #[getter]
    fn num_free_blocks(&self) -> usize {
        self.0.pool().num_free_blocks()
    }

    /// Requests that hold blocks.
    #[getter]
    fn num_requests(&self) -> usize {
        self.0.num_requests()
    }

    /// Share of the blocks in use, between 0 and 1.
    #[getter]
    fn usage(&self) -> f64 {
        self.0.usage()
    }

    /// The longest prefix of at most `max_tokens` tokens whose blocks all sets have.
    ///
    /// `block_hashes` holds one hash of 16 or 32 bytes per `hash_block_tokens` tokens. As the last token of a prompt must
    /// be computed to go on from it, pass the number of tokens less one.
    fn find_longest_hit(
        &mut self,
        block_hashes: &Bound<'_, PyAny>,
        max_tokens: &Bound<'_, PyAny>,
    ) -> PyResult<PrefixHit> {
        let hashes = HashList::new(block_hashes, "block_hashes")?;
        let max_tokens = uint(max_tokens, "max_tokens")?;
        self.0.find_longest_hit(&hashes, max_tokens).map(PrefixHit).map_err(|error| hashes.raise(error))
    }

    /// Give a request slots for `num_tokens` tokens in all, speculative ones included.
    ///
    /// A name that holds no blocks starts a new request; only then may a `hit` and `num_external_tokens` (tokens behind
    /// the hit that an external tier will load) be given. `reserved_blocks` free blocks must be left over. Returns the new
    /// ids per group, those of the hit and of external tokens left out, or None if too few blocks are free.
    #[pyo3(
        signature = (request_id, num_tokens, *, hit=None, num_external_tokens=Given::NO, reserved_blocks=Given::NO),
        text_signature = "($self, request_id, num_tokens, *, hit=None, num_external_tokens=0, reserved_blocks=0)"
    )]
    fn allocate<'py>(
        &mut self,
        py: Python<'py>,
        request_id: &Bound<'py, PyAny>,
        num_tokens: &Bound<'py, PyAny>,
        hit: Option<&Bound<'py, PyAny>>,
        num_external_tokens: Given<'py>,
        reserved_blocks: Given<'py>,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let hit = match hit.map(|hit| (hit, hit.cast::<PrefixHit>())) {
            None => None,
            Some((_, Ok(hit))) => Some(&hit.get().0),
            Some((value, Err(_))) => return Err(wrong_type("hit", "a PrefixHit", value)),
        };
        let ask = core::AllocateRequest {
            request_id: text(request_id, "request_id")?,
            num_tokens: uint(num_tokens, "num_tokens")?,
            hit,
            num_external_tokens: num_external_tokens.uint("num_external_tokens", 0)?,
            reserved_blocks: reserved_blocks.uint("reserved_blocks", 0)?,
        };
        let num_groups = self.num_groups();
        match self.0.allocate(&ask).map_err(raise)? {
            Some(allocation) => tuple_of_rows(py, num_groups, |group| allocation.new_ids(group)).map(Some),
            None => Ok(None),
        }
    }

    /// Publish the full blocks of the first `num_tokens` tokens of a request that are not published yet.
    ///
    /// With `num_prompt_tokens`, sets whose blocks span several hashes also publish the last whole hash of the prompt if
    /// it ends inside a block, as vLLM does.
    #[pyo3(signature = (request_id, block_hashes, num_tokens, *, num_prompt_tokens=None))]
    fn cache(
        &mut self,
        request_id: &Bound<'_, PyAny>,
        block_hashes: &Bound<'_, PyAny>,
        num_tokens: &Bound<'_, PyAny>,
        num_prompt_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let request_id = text(request_id, "request_id")?;
        let hashes = HashList::new(block_hashes, "block_hashes")?;
        let num_prompt_tokens = num_prompt_tokens.map(|value| uint(value, "num_prompt_tokens")).transpose()?;
        let num_tokens = uint(num_tokens, "num_tokens")?;
        self.0.cache(request_id, &hashes, num_tokens, num_prompt_tokens).map_err(|error| hashes.raise(error))
    }

    /// Give back what a request's groups no longer need once `num_computed_tokens` tokens are computed.
    fn release_skipped(
        &mut self,
        request_id: &Bound<'_, PyAny>,
        num_computed_tokens: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let num_computed_tokens = uint(num_computed_tokens, "num_computed_tokens")?;
        self.0.release_skipped(text(request_id, "request_id")?, num_computed_tokens).map_err(raise)
    }

    /// End a request: its blocks are given back last first, so that the longest prefixes are evicted first.
    fn free(&mut self, request_id: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.free(text(request_id, "request_id")?).map_err(raise)
    }

    /// A request's block ids, one list per group.
    fn block_ids<'py>(&self, py: Python<'py>, request_id: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
        let request_id = text(request_id, "request_id")?;
        let rows: Vec<_> = (0_u32..)
            .map(GroupId)
            .take(self.num_groups())
            .map(|group| self.0.block_ids(request_id, group).map_err(raise))
            .collect::<PyResult<_>>()?;
        tuple_of_rows(py, rows.len(), |group| rows[group.0 as usize])
    }

    /// References to a block: one per row entry naming it, whatever the number of member groups, and one per pin.
    fn ref_count(&self, block_id: &Bound<'_, PyAny>) -> PyResult<u32> {
        self.0.pool().ref_count(BlockId(uint32(block_id, "block_id")?)).map_err(raise)
    }

    /// The free blocks in the order in which they will be taken.
    fn free_order<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        list_of_ids(py, &self.0.pool().free_order())
    }

    /// The block each group would find under this hash, or None if a group has none.
    fn lookup<'py>(&self, py: Python<'py>, block_hash: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let hash = core::hash::BlockHash::new(bytes(block_hash, "block_hash")?).map_err(raise)?;
        match self.0.lookup(&hash) {
            Some(blocks) => PyTuple::new(py, blocks.iter().map(|block| block.0).collect::<Vec<_>>()).map(Some),
            None => Ok(None),
        }
    }

    /// Add a pin per occurrence: a pinned block is not handed out, whoever gives it up.
    fn pin(&mut self, block_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.pin(&ids_of(block_ids, "block_ids")?).map_err(raise)
    }

    /// Give back a pin per occurrence. Raises `DoubleFreeError` if a block has fewer pins.
    fn unpin(&mut self, block_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.unpin(&ids_of(block_ids, "block_ids")?).map_err(raise)
    }

    /// Forget the keys of these blocks. References, and the place in the queue, stay as they are.
    fn evict(&mut self, block_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.evict(&ids_of(block_ids, "block_ids")?).map_err(raise)
    }

    /// Forget all keys, if no block is held. Returns whether it did; if not, nothing has changed.
    fn reset_prefix_cache(&mut self) -> bool {
        self.0.reset_prefix_cache()
    }

    /// Hand out the events since the last call, oldest first. Always empty unless events were switched on.
    fn take_events<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        list_of_events(py, self.0.take_events())
    }

    /// What the coordinator has done so far, and how its blocks stand: counts by name.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.0.stats();
        let pool = self.0.pool();
        let dict = PyDict::new(py);
        for (name, count) in [
            ("lookups", stats.lookups),
            ("lookup_tokens", stats.lookup_tokens),
            ("hit_tokens", stats.hit_tokens),
            ("allocations", stats.allocations),
            ("refusals", stats.refusals),
            ("taken_blocks", stats.pool.taken),
            ("evicted_blocks", stats.pool.evicted),
            ("published_keys", stats.pool.published),
            ("peak_held_blocks", stats.pool.peak_held as u64),
            ("held_blocks", pool.num_held_blocks() as u64),
            ("free_blocks", pool.num_free_blocks() as u64),
            ("keys", pool.num_keys() as u64),
            ("requests", self.0.num_requests() as u64),
        ] {
            dict.set_item(name, count)?;
        }
        Ok(dict)
    }

    /// Check the invariants over the whole state. Raises `InvariantError` naming the first that is broken.
    fn audit(&self) -> PyResult<()> {
        self.0.audit().map_err(raise)
    }

    /// A 64-bit digest of the state that later calls can observe, counters aside.
    fn state_digest(&self) -> u64 {
        self.0.state_digest()
    }

    fn __repr__(&self) -> String {
        let pool = self.0.pool();
        let (requests, free) = (self.0.num_requests(), pool.num_free_blocks());
        format!("Coordinator({requests} requests, {free} of {} blocks free)", pool.num_blocks() - 1)
    }
}
