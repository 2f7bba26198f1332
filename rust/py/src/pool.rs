//! The block pool on its own.

use lockstep_kv_core as core;
use lockstep_kv_core::BlockId;
use lockstep_kv_core::pool::Key;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::args::{Given, bytes, uint, uint32};
use crate::errors::raise;
use crate::lists::{ids_of, list_of_ids};

/// Blocks with reference counts, a queue of free ones, and the keys their content is found by.
///
/// `num_blocks` includes block 0, the null block, which is never taken, referenced, released or published. Raises
/// `ConfigError` if it is not between 1 and 2**27.
#[pyclass(module = "lockstep_kv")]
#[derive(Debug)]
pub(crate) struct BlockPool(core::BlockPool);

// As the coordinator's: arguments are read before the pool is borrowed, and Python objects are made afterwards.
#[pymethods]
impl BlockPool {
    #[new]
    #[pyo3(
        signature = (num_blocks, enable_caching=Given::NO),
        text_signature = "(num_blocks, enable_caching=True)"
    )]
    fn new(num_blocks: &Bound<'_, PyAny>, enable_caching: Given<'_>) -> PyResult<Self> {
        let enable_caching = enable_caching.flag("enable_caching", true)?;
        core::BlockPool::new(uint32(num_blocks, "num_blocks")?, enable_caching).map(Self).map_err(raise)
    }

    /// Blocks, the null block included.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.0.num_blocks()
    }

    /// Blocks that can be taken.
    #[getter]
    fn num_free_blocks(&self) -> usize {
        self.0.num_free_blocks()
    }

    /// Take `n` blocks with one reference each; their keys are forgotten. Raises `PoolExhaustedError` if fewer are free.
    fn take<'py>(slf: &Bound<'py, Self>, n: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let count = usize::try_from(uint(n, "n")?).unwrap_or(usize::MAX);
        let blocks = slf.try_borrow_mut()?.0.take(count).map_err(raise)?;
        list_of_ids(slf.py(), &blocks)
    }

    /// Add one reference per occurrence; a free block leaves the queue and keeps its keys.
    fn add_ref(&mut self, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.add_ref(&ids_of(ids, "ids")?).map_err(raise)
    }

    /// Give back one reference per occurrence. Of the blocks that become free, those without a key go to the head of the
    /// queue as one batch in this order, those with a key to its tail. Raises `DoubleFreeError` if one is given back more
    /// often than it is held.
    fn release(&mut self, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.release(&ids_of(ids, "ids")?).map_err(raise)
    }

    /// Make a held block findable by `key`, 1 to 40 bytes, beside the keys it has already.
    fn publish(&mut self, id: &Bound<'_, PyAny>, key: &Bound<'_, PyAny>) -> PyResult<()> {
        let key = Key::new(bytes(key, "key")?).map_err(raise)?;
        self.0.publish(BlockId(uint32(id, "id")?), key).map_err(raise)
    }

    /// The first block published under `key` that still carries it, or None.
    fn lookup(&self, key: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
        let key = Key::new(bytes(key, "key")?).map_err(raise)?;
        Ok(self.0.lookup(&key).map(|block| block.0))
    }

    /// Forget the keys of these blocks. References, and the place in the queue, stay as they are.
    fn evict(&mut self, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.evict(&ids_of(ids, "ids")?).map_err(raise)
    }

    /// Forget all keys, if no block is held. Returns whether it did.
    fn reset(&mut self) -> bool {
        self.0.reset()
    }

    /// The free blocks in the order in which they will be taken.
    fn free_order<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyList>> {
        let blocks = slf.try_borrow()?.0.free_order();
        list_of_ids(slf.py(), &blocks)
    }

    /// References to a block.
    fn ref_count(&self, id: &Bound<'_, PyAny>) -> PyResult<u32> {
        self.0.ref_count(BlockId(uint32(id, "id")?)).map_err(raise)
    }

    /// The keys a block carries, in the order of publication.
    fn keys_of<'py>(slf: &Bound<'py, Self>, id: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let block = BlockId(uint32(id, "id")?);
        let keys = slf.try_borrow()?.0.keys_of(block).map_err(raise)?;
        let py = slf.py();
        PyList::new(py, keys.iter().map(|key| PyBytes::new(py, key.as_bytes())))
    }

    /// Check the invariants. Raises `InvariantError` naming the first that is broken.
    fn audit(&self) -> PyResult<()> {
        self.0.audit().map_err(raise)
    }

    /// A 64-bit digest of the state that later calls can observe.
    fn state_digest(&self) -> u64 {
        self.0.state_digest()
    }

    fn __repr__(&self) -> String {
        format!("BlockPool({} blocks, {} free)", self.0.num_blocks(), self.0.num_free_blocks())
    }
}
