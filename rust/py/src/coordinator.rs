//! The coordinator.

use lockstep_kv_core as core;
use lockstep_kv_core::{BlockId, GroupId};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use crate::args::{Given, bytes, items, text, uint, uint32, wrong_type};
use crate::config::CoordinatorConfig;
use crate::errors::{config_error, raise};
use crate::events::list_of_events;
use crate::geometry::tuple_of_sets;
use crate::hit::{PrefixHit, hit_of};
use crate::lists::{HashList, ids_of, list_of_ids, tuple_of_lists};

/// Blocks for the requests of one engine, over one pool and any number of lockstep sets.
///
/// A call that raises has changed nothing. Raises `ConfigError` if the configuration cannot be used, a kind of group
/// that is not supported included.
#[pyclass(module = "lockstep_kv")]
#[derive(Debug)]
pub(crate) struct Coordinator(core::Coordinator);

/// Every call first reads its arguments, then borrows the coordinator and copies what it needs out of it, and only then
/// makes Python objects: making them may run finalizers, which may call the coordinator again.
impl Coordinator {
    fn num_groups(&self) -> usize {
        self.0.config().groups.len()
    }

    /// Allocates, and publishes if that is asked for. An empty tuple if nothing is new.
    fn slots<'py>(
        slf: &Bound<'py, Self>,
        ask: &core::AllocateRequest<'_>,
        publish: Option<(&HashList<'_, '_>, &core::coordinator::Publication)>,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let outcome = {
            let this = &mut *slf.try_borrow_mut()?;
            let num_groups = this.num_groups();
            let allocation = match publish {
                Some((hashes, publication)) => this.0.allocate_and_cache(ask, hashes, publication),
                None => this.0.allocate(ask),
            };
            allocation.map(|new| new.map(|new| new_rows(&new, num_groups)))
        };
        let rows = match (outcome, publish) {
            (Ok(rows), _) => rows,
            (Err(error), Some((hashes, _))) => return Err(hashes.raise(error)),
            (Err(error), None) => return Err(raise(error)),
        };
        rows.map(|rows| tuple_of_lists(slf.py(), &rows)).transpose()
    }
}

/// What an allocation added, one row per group. No rows if nothing is new, as is so for most calls of running requests.
fn new_rows(new: &core::coordinator::Allocation<'_>, num_groups: usize) -> Vec<Vec<BlockId>> {
    let groups = || (0_u32..).map(GroupId).take(num_groups);
    if groups().all(|group| new.new_ids(group).is_empty()) {
        return Vec::new();
    }
    groups().map(|group| new.new_ids(group).to_vec()).collect()
}

/// What is to be published, from Python's arguments.
fn publication(
    num_tokens: &Bound<'_, PyAny>,
    num_prompt_tokens: Option<&Bound<'_, PyAny>>,
    shared_prefix_boundary: Given<'_>,
) -> PyResult<core::coordinator::Publication> {
    Ok(core::coordinator::Publication {
        num_tokens: uint(num_tokens, "num_tokens")?,
        num_prompt_tokens: num_prompt_tokens.map(|value| uint(value, "num_prompt_tokens")).transpose()?,
        shared_prefix_boundary: shared_prefix_boundary.uint("shared_prefix_boundary", 0)?,
    })
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
    fn sets<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyTuple>> {
        let sets = slf.try_borrow()?.0.sets().to_vec();
        tuple_of_sets(slf.py(), &sets)
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
        slf: &Bound<'_, Self>,
        block_hashes: &Bound<'_, PyAny>,
        max_tokens: &Bound<'_, PyAny>,
    ) -> PyResult<PrefixHit> {
        let hashes = HashList::new(block_hashes, "block_hashes")?;
        let max_tokens = uint(max_tokens, "max_tokens")?;
        let found = slf.try_borrow_mut()?.0.find_longest_hit(&hashes, max_tokens);
        found.map(PrefixHit).map_err(|error| hashes.raise(error))
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
        slf: &Bound<'py, Self>,
        request_id: &Bound<'py, PyAny>,
        num_tokens: &Bound<'py, PyAny>,
        hit: Option<&Bound<'py, PyAny>>,
        num_external_tokens: Given<'py>,
        reserved_blocks: Given<'py>,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let ask = core::AllocateRequest {
            request_id: text(request_id, "request_id")?,
            num_tokens: uint(num_tokens, "num_tokens")?,
            hit: hit_of(hit)?,
            num_external_tokens: num_external_tokens.uint("num_external_tokens", 0)?,
            reserved_blocks: reserved_blocks.uint("reserved_blocks", 0)?,
            ..core::AllocateRequest::new("", 0)
        };
        let num_groups = slf.try_borrow()?.num_groups();
        let new = Self::slots(slf, &ask, None)?;
        match new {
            Some(new) if new.is_empty() => tuple_of_lists(slf.py(), &vec![Vec::new(); num_groups]).map(Some),
            new => Ok(new),
        }
    }

    /// `allocate` and then `cache`, in one call: slots for `num_tokens` tokens, and if they are there, publication of the
    /// first `cache_tokens` tokens (None = nothing) with `block_hashes`.
    ///
    /// `whole_tokens` (0 = do not ask) must fit as well, whatever is reserved, and `watermark_blocks` free blocks must be
    /// left over either way. What is not needed any more once `processed_tokens` are processed is given back first, and
    /// stays so even if the slots are not there. Returns what `allocate` returns, but an empty tuple if there is nothing new.
    #[pyo3(
        signature = (request_id, num_tokens, *, hit=None, num_external_tokens=Given::NO, reserved_blocks=Given::NO, watermark_blocks=Given::NO, whole_tokens=Given::NO, processed_tokens=Given::NO, block_hashes=None, cache_tokens=None, num_prompt_tokens=None, shared_prefix_boundary=Given::NO),
        text_signature = "($self, request_id, num_tokens, *, hit=None, num_external_tokens=0, reserved_blocks=0, watermark_blocks=0, whole_tokens=0, processed_tokens=0, block_hashes=None, cache_tokens=None, num_prompt_tokens=None, shared_prefix_boundary=0)"
    )]
    fn allocate_slots<'py>(
        slf: &Bound<'py, Self>,
        request_id: &Bound<'py, PyAny>,
        num_tokens: &Bound<'py, PyAny>,
        hit: Option<&Bound<'py, PyAny>>,
        num_external_tokens: Given<'py>,
        reserved_blocks: Given<'py>,
        watermark_blocks: Given<'py>,
        whole_tokens: Given<'py>,
        processed_tokens: Given<'py>,
        block_hashes: Option<&Bound<'py, PyAny>>,
        cache_tokens: Option<&Bound<'py, PyAny>>,
        num_prompt_tokens: Option<&Bound<'py, PyAny>>,
        shared_prefix_boundary: Given<'py>,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let ask = core::AllocateRequest {
            request_id: text(request_id, "request_id")?,
            num_tokens: uint(num_tokens, "num_tokens")?,
            hit: hit_of(hit)?,
            num_external_tokens: num_external_tokens.uint("num_external_tokens", 0)?,
            reserved_blocks: reserved_blocks.uint("reserved_blocks", 0)?,
            watermark_blocks: watermark_blocks.uint("watermark_blocks", 0)?,
            whole_tokens: whole_tokens.uint("whole_tokens", 0)?,
            processed_tokens: processed_tokens.uint("processed_tokens", 0)?,
        };
        let Some(cache_tokens) = cache_tokens else { return Self::slots(slf, &ask, None) };
        let Some(hashes) = block_hashes else { return Err(config_error("cache_tokens needs block_hashes".into())) };
        let hashes = HashList::new(hashes, "block_hashes")?;
        let publication = publication(cache_tokens, num_prompt_tokens, shared_prefix_boundary)?;
        Self::slots(slf, &ask, Some((&hashes, &publication)))
    }

    /// `allocate_slots` for a running request that nothing is reserved for: by far the most frequent call, with arguments by
    /// place because names take time.
    #[pyo3(signature = (request_id, num_tokens, processed_tokens, block_hashes, cache_tokens, num_prompt_tokens, shared_prefix_boundary, /))]
    fn grow<'py>(
        slf: &Bound<'py, Self>,
        request_id: &Bound<'py, PyAny>,
        num_tokens: &Bound<'py, PyAny>,
        processed_tokens: &Bound<'py, PyAny>,
        block_hashes: &Bound<'py, PyAny>,
        cache_tokens: &Bound<'py, PyAny>,
        num_prompt_tokens: &Bound<'py, PyAny>,
        shared_prefix_boundary: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let ask = core::AllocateRequest {
            processed_tokens: uint(processed_tokens, "processed_tokens")?,
            ..core::AllocateRequest::new(text(request_id, "request_id")?, uint(num_tokens, "num_tokens")?)
        };
        let hashes = HashList::new(block_hashes, "block_hashes")?;
        let publication = core::coordinator::Publication {
            num_tokens: uint(cache_tokens, "cache_tokens")?,
            num_prompt_tokens: Some(uint(num_prompt_tokens, "num_prompt_tokens")?),
            shared_prefix_boundary: uint(shared_prefix_boundary, "shared_prefix_boundary")?,
        };
        Self::slots(slf, &ask, Some((&hashes, &publication)))
    }

    /// How many free blocks a request would take to have slots for `num_tokens` tokens, idle blocks of a hit included.
    ///
    /// `computed_tokens`: what a new request finds or has loaded. `capped`: windows and chunks count for what they hold at
    /// most at a time.
    #[pyo3(
        signature = (request_id, num_tokens, *, hit=None, computed_tokens=Given::NO, capped=Given::NO),
        text_signature = "($self, request_id, num_tokens, *, hit=None, computed_tokens=0, capped=False)"
    )]
    fn blocks_needed(
        &self,
        request_id: &Bound<'_, PyAny>,
        num_tokens: &Bound<'_, PyAny>,
        hit: Option<&Bound<'_, PyAny>>,
        computed_tokens: Given<'_>,
        capped: Given<'_>,
    ) -> PyResult<usize> {
        let (num_tokens, capped) = (uint(num_tokens, "num_tokens")?, capped.flag("capped", false)?);
        let computed = computed_tokens.uint("computed_tokens", 0)?;
        let request_id = text(request_id, "request_id")?;
        self.0.blocks_needed(request_id, num_tokens, hit_of(hit)?, computed, capped).map_err(raise)
    }

    /// Publish the full blocks of the first `num_tokens` tokens of a request that are not published yet.
    ///
    /// With `num_prompt_tokens`, sets whose blocks span several hashes also publish the last whole hash of the prompt if
    /// it ends inside a block, as vLLM does. Windows that keep only some of their blocks keep those before the prompt's end
    /// and before `shared_prefix_boundary`.
    #[pyo3(
        signature = (request_id, block_hashes, num_tokens, *, num_prompt_tokens=None, shared_prefix_boundary=Given::NO),
        text_signature = "($self, request_id, block_hashes, num_tokens, *, num_prompt_tokens=None, shared_prefix_boundary=0)"
    )]
    fn cache(
        slf: &Bound<'_, Self>,
        request_id: &Bound<'_, PyAny>,
        block_hashes: &Bound<'_, PyAny>,
        num_tokens: &Bound<'_, PyAny>,
        num_prompt_tokens: Option<&Bound<'_, PyAny>>,
        shared_prefix_boundary: Given<'_>,
    ) -> PyResult<()> {
        let request_id = text(request_id, "request_id")?;
        let hashes = HashList::new(block_hashes, "block_hashes")?;
        let publication = publication(num_tokens, num_prompt_tokens, shared_prefix_boundary)?;
        let done = slf.try_borrow_mut()?.0.cache(request_id, &hashes, &publication);
        done.map_err(|error| hashes.raise(error))
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

    /// End a request, but leave a pin wherever its rows named a block: `unpin` gives the blocks back later. Returns the
    /// rows, one lockstep set after the other, with the null blocks in them.
    fn detach<'py>(slf: &Bound<'py, Self>, request_id: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let request_id = text(request_id, "request_id")?;
        let blocks = slf.try_borrow_mut()?.0.detach(request_id).map_err(raise)?;
        list_of_ids(slf.py(), &blocks)
    }

    /// The requests that hold blocks, in no order.
    fn request_ids<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyList>> {
        let names: Vec<String> = slf.try_borrow()?.0.request_ids().map(String::from).collect();
        PyList::new(slf.py(), names)
    }

    /// Leading blocks of a request that need not be published any more, per group.
    fn num_published<'py>(slf: &Bound<'py, Self>, request_id: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
        let request_id = text(request_id, "request_id")?;
        let counts = {
            let this = slf.try_borrow()?;
            let groups = (0_u32..).take(this.num_groups()).map(GroupId);
            let counts = groups.map(|group| this.0.num_published(request_id, group).map_err(raise));
            counts.collect::<PyResult<Vec<_>>>()?
        };
        PyTuple::new(slf.py(), counts)
    }

    /// Leading tokens of a request up to the last that some hash stands for, the fewest over all sets: an estimate of what a
    /// later request can hit.
    fn findable_tokens(&self, request_id: &Bound<'_, PyAny>) -> PyResult<u64> {
        self.0.findable_tokens(text(request_id, "request_id")?).map_err(raise)
    }

    /// A request's block ids, one list per group.
    fn block_ids<'py>(slf: &Bound<'py, Self>, request_id: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
        let request_id = text(request_id, "request_id")?;
        let rows = {
            let this = slf.try_borrow()?;
            let groups = (0_u32..).take(this.num_groups()).map(GroupId);
            let rows = groups.map(|group| this.0.block_ids(request_id, group).map(<[BlockId]>::to_vec).map_err(raise));
            rows.collect::<PyResult<Vec<_>>>()?
        };
        tuple_of_lists(slf.py(), &rows)
    }

    /// References to a block: one per row entry naming it, whatever the number of member groups, and one per pin.
    fn ref_count(&self, block_id: &Bound<'_, PyAny>) -> PyResult<u32> {
        self.0.pool().ref_count(BlockId(uint32(block_id, "block_id")?)).map_err(raise)
    }

    /// The free blocks in the order in which they will be taken.
    fn free_order<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyList>> {
        let blocks = slf.try_borrow()?.0.pool().free_order();
        list_of_ids(slf.py(), &blocks)
    }

    /// The block each group would find under this hash, or None if a group has none.
    fn lookup<'py>(slf: &Bound<'py, Self>, block_hash: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let hash = core::hash::BlockHash::new(bytes(block_hash, "block_hash")?).map_err(raise)?;
        let blocks = slf.try_borrow()?.0.lookup(&hash);
        blocks.map(|blocks| PyTuple::new(slf.py(), blocks.iter().map(|block| block.0).collect::<Vec<_>>())).transpose()
    }

    /// The first block published under this hash in the set of this group, or None.
    fn lookup_in_group(&self, block_hash: &Bound<'_, PyAny>, group: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
        let hash = core::hash::BlockHash::new(bytes(block_hash, "block_hash")?).map_err(raise)?;
        let found = self.0.lookup_in_group(&hash, GroupId(uint32(group, "group")?)).map_err(raise)?;
        Ok(found.map(|block| block.0))
    }

    /// The hashes a block is found by, each with the first group of its lockstep set, in the order of publication.
    fn hashes_of<'py>(slf: &Bound<'py, Self>, block_id: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let block = BlockId(uint32(block_id, "block_id")?);
        let hashes = slf.try_borrow()?.0.hashes_of(block).map_err(raise)?;
        let py = slf.py();
        PyList::new(py, hashes.iter().map(|(hash, group)| (PyBytes::new(py, hash), group.0)))
    }

    /// What each group would find by itself: one pair of block ids and tokens per group.
    fn find_hit_per_group<'py>(
        slf: &Bound<'py, Self>,
        block_hashes: &Bound<'py, PyAny>,
        max_tokens: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let hashes = HashList::new(block_hashes, "block_hashes")?;
        let max_tokens = uint(max_tokens, "max_tokens")?;
        let found = slf.try_borrow()?.0.find_hit_per_group(&hashes, max_tokens);
        let found = found.map_err(|error| hashes.raise(error))?;
        let pairs = found.iter().map(|(blocks, tokens)| Ok((list_of_ids(slf.py(), blocks)?, *tokens)));
        PyTuple::new(slf.py(), pairs.collect::<PyResult<Vec<_>>>()?)
    }

    /// A hit on blocks that the caller knows to hold a request's first `num_tokens` tokens, one list per group.
    fn hit_of(&self, block_ids: &Bound<'_, PyAny>, num_tokens: &Bound<'_, PyAny>) -> PyResult<PrefixHit> {
        let rows: Vec<Vec<BlockId>> = items(block_ids, "block_ids")?
            .iter()
            .enumerate()
            .map(|(group, row)| ids_of(row, &format!("block_ids[{group}]")))
            .collect::<PyResult<_>>()?;
        let rows: Vec<&[BlockId]> = rows.iter().map(Vec::as_slice).collect();
        self.0.hit_of(&rows, uint(num_tokens, "num_tokens")?).map(PrefixHit).map_err(raise)
    }

    /// Take `n` blocks that are pinned instead of being part of a request; their keys are forgotten.
    fn take_pinned<'py>(slf: &Bound<'py, Self>, n: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let count = usize::try_from(uint(n, "n")?).unwrap_or(usize::MAX);
        let blocks = slf.try_borrow_mut()?.0.take_pinned(count).map_err(raise)?;
        list_of_ids(slf.py(), &blocks)
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
    fn take_events<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyList>> {
        let events = slf.try_borrow_mut()?.0.take_events();
        list_of_events(slf.py(), events)
    }

    /// What the coordinator has done so far, and how its blocks stand: counts by name.
    fn stats<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyDict>> {
        let this = slf.try_borrow()?;
        let (stats, pool) = (this.0.stats(), this.0.pool());
        let counts = [
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
            ("requests", this.0.num_requests() as u64),
        ];
        drop(this);
        let dict = PyDict::new(slf.py());
        for (name, count) in counts {
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
