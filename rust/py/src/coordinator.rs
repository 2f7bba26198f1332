//! The coordinator.

use lockstep_kv_core as core;
use lockstep_kv_core::{BlockId, GroupId};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::args::{Given, items, text, uint, uint32, wrong_type};
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
pub(crate) struct Coordinator(pub(crate) core::Coordinator);

/// Every call first reads its arguments, then borrows the coordinator and copies what it needs out of it, and only then
/// makes Python objects: making them may run finalizers, which may call the coordinator again.
impl Coordinator {
    pub(crate) fn num_groups(&self) -> usize {
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
    if new.is_empty() {
        return Vec::new();
    }
    (0_u32..).map(GroupId).take(num_groups).map(|group| new.new_ids(group).collect()).collect()
}

/// What is to be published, from Python's arguments.
fn publication(
    num_tokens: &Bound<'_, PyAny>,
    num_prompt_tokens: Option<&Bound<'_, PyAny>>,
    shared_prefix_boundary: Given<'_>,
    computed_tokens: Given<'_>,
) -> PyResult<core::coordinator::Publication> {
    Ok(core::coordinator::Publication {
        num_tokens: uint(num_tokens, "num_tokens")?,
        num_prompt_tokens: num_prompt_tokens.map(|value| uint(value, "num_prompt_tokens")).transpose()?,
        shared_prefix_boundary: shared_prefix_boundary.uint("shared_prefix_boundary", 0)?,
        computed_tokens: computed_tokens.uint("computed_tokens", 0)?,
    })
}

/// An optional number.
fn optional_uint(value: Option<&Bound<'_, PyAny>>, name: &str) -> PyResult<Option<u64>> {
    value.map(|value| uint(value, name)).transpose()
}

/// Groups by number.
fn group_ids(value: Option<&Bound<'_, PyAny>>, name: &str) -> PyResult<Vec<GroupId>> {
    let Some(value) = value else { return Ok(Vec::new()) };
    let groups = items(value, name)?;
    groups.iter().enumerate().map(|(at, group)| uint32(group, &format!("{name}[{at}]")).map(GroupId)).collect()
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

    /// Whether hits may end inside blocks, at any block hash.
    #[getter]
    fn has_fine_grained_hits(&self) -> bool {
        self.0.has_fine_grained_hits()
    }

    /// Whether states are published where a shared prefix ends inside a block: if that was asked for and can be.
    #[getter]
    fn publishes_shared_prefix(&self) -> bool {
        self.0.publishes_shared_prefix()
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
    /// the hit that an external tier will load) be given. `num_encoder_tokens` are those of an encoder, for cross attention.
    /// `reserved_blocks` free blocks must be left over. Returns the new ids per group, those of the hit and of external tokens
    /// left out, or None if too few blocks are free, or if the hit ends with a state that this step has yet to write.
    #[pyo3(
        signature = (request_id, num_tokens, *, hit=None, num_external_tokens=Given::NO, reserved_blocks=Given::NO, num_encoder_tokens=Given::NO),
        text_signature = "($self, request_id, num_tokens, *, hit=None, num_external_tokens=0, reserved_blocks=0, num_encoder_tokens=0)"
    )]
    fn allocate<'py>(
        slf: &Bound<'py, Self>,
        request_id: &Bound<'py, PyAny>,
        num_tokens: &Bound<'py, PyAny>,
        hit: Option<&Bound<'py, PyAny>>,
        num_external_tokens: Given<'py>,
        reserved_blocks: Given<'py>,
        num_encoder_tokens: Given<'py>,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let ask = core::AllocateRequest {
            hit: hit_of(hit)?,
            num_external_tokens: num_external_tokens.uint("num_external_tokens", 0)?,
            reserved_blocks: reserved_blocks.uint("reserved_blocks", 0)?,
            encoder_tokens: num_encoder_tokens.uint("num_encoder_tokens", 0)?,
            ..core::AllocateRequest::new(text(request_id, "request_id")?, uint(num_tokens, "num_tokens")?)
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
    /// `main_tokens` (None = `num_tokens`) leaves out what a draft model writes behind the model's own tokens: states are kept
    /// for these only. `whole_tokens` (0 = do not ask) must fit as well, whatever is reserved, and `watermark_blocks` free
    /// blocks must be left over either way. What is not needed any more once `processed_tokens` are processed is given back
    /// first, and stays so even if the slots are not there. `computed_tokens` are those before this step, `prefill_end` is where
    /// the prefill ends (0 = not known), and blocks that are loaded need not be cleared in `uncleared_groups`. Returns what
    /// `allocate` returns, but an empty tuple if there is nothing new.
    #[pyo3(
        signature = (request_id, num_tokens, *, main_tokens=None, num_encoder_tokens=Given::NO, hit=None, num_external_tokens=Given::NO, uncleared_groups=None, reserved_blocks=Given::NO, watermark_blocks=Given::NO, whole_tokens=Given::NO, processed_tokens=Given::NO, computed_tokens=Given::NO, prefill_end=Given::NO, block_hashes=None, cache_tokens=None, num_prompt_tokens=None, shared_prefix_boundary=Given::NO),
        text_signature = "($self, request_id, num_tokens, *, main_tokens=None, num_encoder_tokens=0, hit=None, num_external_tokens=0, uncleared_groups=None, reserved_blocks=0, watermark_blocks=0, whole_tokens=0, processed_tokens=0, computed_tokens=0, prefill_end=0, block_hashes=None, cache_tokens=None, num_prompt_tokens=None, shared_prefix_boundary=0)"
    )]
    fn allocate_slots<'py>(
        slf: &Bound<'py, Self>,
        request_id: &Bound<'py, PyAny>,
        num_tokens: &Bound<'py, PyAny>,
        main_tokens: Option<&Bound<'py, PyAny>>,
        num_encoder_tokens: Given<'py>,
        hit: Option<&Bound<'py, PyAny>>,
        num_external_tokens: Given<'py>,
        uncleared_groups: Option<&Bound<'py, PyAny>>,
        reserved_blocks: Given<'py>,
        watermark_blocks: Given<'py>,
        whole_tokens: Given<'py>,
        processed_tokens: Given<'py>,
        computed_tokens: Given<'py>,
        prefill_end: Given<'py>,
        block_hashes: Option<&Bound<'py, PyAny>>,
        cache_tokens: Option<&Bound<'py, PyAny>>,
        num_prompt_tokens: Option<&Bound<'py, PyAny>>,
        shared_prefix_boundary: Given<'py>,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let uncleared_groups = group_ids(uncleared_groups, "uncleared_groups")?;
        let num_prompt_tokens = optional_uint(num_prompt_tokens, "num_prompt_tokens")?;
        let ask = core::AllocateRequest {
            request_id: text(request_id, "request_id")?,
            num_tokens: uint(num_tokens, "num_tokens")?,
            main_tokens: optional_uint(main_tokens, "main_tokens")?,
            encoder_tokens: num_encoder_tokens.uint("num_encoder_tokens", 0)?,
            hit: hit_of(hit)?,
            num_external_tokens: num_external_tokens.uint("num_external_tokens", 0)?,
            uncleared_groups: &uncleared_groups,
            reserved_blocks: reserved_blocks.uint("reserved_blocks", 0)?,
            watermark_blocks: watermark_blocks.uint("watermark_blocks", 0)?,
            whole_tokens: whole_tokens.uint("whole_tokens", 0)?,
            processed_tokens: processed_tokens.uint("processed_tokens", 0)?,
            computed_tokens: computed_tokens.uint("computed_tokens", 0)?,
            num_prompt_tokens,
            prefill_end: prefill_end.uint("prefill_end", 0)?,
        };
        let Some(cache_tokens) = cache_tokens else { return Self::slots(slf, &ask, None) };
        let Some(hashes) = block_hashes else { return Err(config_error("cache_tokens needs block_hashes".into())) };
        let hashes = HashList::new(hashes, "block_hashes")?;
        let publication = core::coordinator::Publication {
            num_tokens: uint(cache_tokens, "cache_tokens")?,
            num_prompt_tokens,
            shared_prefix_boundary: shared_prefix_boundary.uint("shared_prefix_boundary", 0)?,
            computed_tokens: ask.computed_tokens,
        };
        Self::slots(slf, &ask, Some((&hashes, &publication)))
    }

    /// `allocate_slots` for a running request that nothing is reserved for, and that keeps no states: by far the most
    /// frequent call, with arguments by place because names take time.
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
        let num_prompt_tokens = Some(uint(num_prompt_tokens, "num_prompt_tokens")?);
        let ask = core::AllocateRequest {
            processed_tokens: uint(processed_tokens, "processed_tokens")?,
            num_prompt_tokens,
            ..core::AllocateRequest::new(text(request_id, "request_id")?, uint(num_tokens, "num_tokens")?)
        };
        let hashes = HashList::new(block_hashes, "block_hashes")?;
        let publication = core::coordinator::Publication {
            num_tokens: uint(cache_tokens, "cache_tokens")?,
            num_prompt_tokens,
            shared_prefix_boundary: uint(shared_prefix_boundary, "shared_prefix_boundary")?,
            computed_tokens: 0,
        };
        Self::slots(slf, &ask, Some((&hashes, &publication)))
    }

    /// How many free blocks a request must find to have slots for `num_tokens` tokens, idle blocks of a hit included.
    ///
    /// `main_tokens` and `num_encoder_tokens` as for `allocate_slots`; `computed_tokens`: what is computed, found or loaded;
    /// `capped`: windows and chunks count for what they hold at most at a time.
    #[pyo3(
        signature = (request_id, num_tokens, *, main_tokens=None, num_encoder_tokens=Given::NO, hit=None, computed_tokens=Given::NO, prefill_end=Given::NO, capped=Given::NO),
        text_signature = "($self, request_id, num_tokens, *, main_tokens=None, num_encoder_tokens=0, hit=None, computed_tokens=0, prefill_end=0, capped=False)"
    )]
    fn blocks_needed(
        &self,
        request_id: &Bound<'_, PyAny>,
        num_tokens: &Bound<'_, PyAny>,
        main_tokens: Option<&Bound<'_, PyAny>>,
        num_encoder_tokens: Given<'_>,
        hit: Option<&Bound<'_, PyAny>>,
        computed_tokens: Given<'_>,
        prefill_end: Given<'_>,
        capped: Given<'_>,
    ) -> PyResult<usize> {
        let ask = core::AllocateRequest {
            main_tokens: optional_uint(main_tokens, "main_tokens")?,
            encoder_tokens: num_encoder_tokens.uint("num_encoder_tokens", 0)?,
            hit: hit_of(hit)?,
            computed_tokens: computed_tokens.uint("computed_tokens", 0)?,
            prefill_end: prefill_end.uint("prefill_end", 0)?,
            ..core::AllocateRequest::new(text(request_id, "request_id")?, uint(num_tokens, "num_tokens")?)
        };
        self.0.blocks_needed(&ask, capped.flag("capped", false)?).map_err(raise)
    }

    /// Publish the full blocks of the first `num_tokens` tokens of a request that are not published yet.
    ///
    /// With `num_prompt_tokens`, sets whose blocks span several hashes also publish the last whole hash of the prompt if
    /// it ends inside a block, as vLLM does. Windows and states that keep only some of their blocks keep those before the
    /// prompt's end and before `shared_prefix_boundary`. `computed_tokens` are those before this step.
    #[pyo3(
        signature = (request_id, block_hashes, num_tokens, *, num_prompt_tokens=None, shared_prefix_boundary=Given::NO, computed_tokens=Given::NO),
        text_signature = "($self, request_id, block_hashes, num_tokens, *, num_prompt_tokens=None, shared_prefix_boundary=0, computed_tokens=0)"
    )]
    fn cache(
        slf: &Bound<'_, Self>,
        request_id: &Bound<'_, PyAny>,
        block_hashes: &Bound<'_, PyAny>,
        num_tokens: &Bound<'_, PyAny>,
        num_prompt_tokens: Option<&Bound<'_, PyAny>>,
        shared_prefix_boundary: Given<'_>,
        computed_tokens: Given<'_>,
    ) -> PyResult<()> {
        let request_id = text(request_id, "request_id")?;
        let hashes = HashList::new(block_hashes, "block_hashes")?;
        let publication = publication(num_tokens, num_prompt_tokens, shared_prefix_boundary, computed_tokens)?;
        let done = slf.try_borrow_mut()?.0.cache(request_id, &hashes, &publication);
        done.map_err(|error| hashes.raise(error))
    }

    /// Give back what a request's groups no longer need once `num_computed_tokens` tokens are computed. Groups that keep the
    /// prompt longer than what follows need `num_prompt_tokens` for that.
    #[pyo3(signature = (request_id, num_computed_tokens, *, num_prompt_tokens=None))]
    fn release_skipped(
        &mut self,
        request_id: &Bound<'_, PyAny>,
        num_computed_tokens: &Bound<'_, PyAny>,
        num_prompt_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let num_computed_tokens = uint(num_computed_tokens, "num_computed_tokens")?;
        let num_prompt_tokens = optional_uint(num_prompt_tokens, "num_prompt_tokens")?;
        self.0.release_skipped(text(request_id, "request_id")?, num_computed_tokens, num_prompt_tokens).map_err(raise)
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

    /// Change the retention interval for what is published from now on. Raises `ConfigError` if hits cannot end at its
    /// multiples.
    fn set_retention_interval(&mut self, interval: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        self.0.set_retention_interval(optional_uint(interval, "interval")?).map_err(raise)
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
