//! Reading what a coordinator's requests and blocks stand for.

use lockstep_kv_core as core;
use lockstep_kv_core::{BlockId, GroupId};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use crate::args::{bytes, text, uint, uint32};
use crate::coordinator::Coordinator;
use crate::errors::raise;
use crate::lists::{HashList, list_of_ids, tuple_of_lists};

#[pymethods]
impl Coordinator {
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

    /// The state that a request's running step saves before its end in this group: the tokens before it, and its place in
    /// the row. None if there is none.
    fn checkpoint(&self, request_id: &Bound<'_, PyAny>, group: &Bound<'_, PyAny>) -> PyResult<Option<(u64, usize)>> {
        self.0.checkpoint(text(request_id, "request_id")?, GroupId(uint32(group, "group")?)).map_err(raise)
    }

    /// Leading tokens of a request up to the end of what a block's first hash stands for; 0 if it has none.
    fn key_tokens(&self, block_id: &Bound<'_, PyAny>) -> PyResult<u64> {
        self.0.key_tokens(BlockId(uint32(block_id, "block_id")?)).map_err(raise)
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
}
