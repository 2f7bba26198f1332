//! The index of a host tier.

use lockstep_kv_core as core;
use lockstep_kv_core::offload::{Lookup, Policy};
use lockstep_kv_core::pool::Key;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::args::{Given, bytes, bytes_items, text, uint32};
use crate::errors::{config_error, raise};

/// The policies and their names.
const POLICIES: [(&str, Policy); 2] = [("lru", Policy::Lru), ("arc", Policy::Arc)];

fn policy_of(name: &Bound<'_, PyAny>) -> PyResult<Policy> {
    let name = text(name, "policy")?;
    let known = POLICIES.iter().find(|(known, _)| *known == name);
    known.map(|(_, policy)| *policy).ok_or_else(|| config_error(format!("policy must be 'lru' or 'arc', got {name:?}")))
}

/// A sequence of keys, each 1 to 40 bytes.
fn keys_of(value: &Bound<'_, PyAny>) -> PyResult<Vec<Key>> {
    let items = bytes_items(value, "keys")?;
    let key = |(at, item): (usize, &[u8])| Key::new(item).map_err(|error| config_error(format!("keys[{at}]: {error}")));
    items.iter().map(AsRef::as_ref).enumerate().map(key).collect()
}

fn list_of_keys<'py>(py: Python<'py>, keys: &[Key]) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, keys.iter().map(|key| PyBytes::new(py, key.as_bytes())))
}

/// What to store where: `slots[i]` is for `keys[i]`; `evicted` are the keys that made room, in this order.
#[pyclass(module = "lockstep_kv", frozen, eq)]
#[derive(Debug, PartialEq)]
pub(crate) struct StorePlan(core::StorePlan);

#[pymethods]
impl StorePlan {
    /// The keys to store, without those that were present.
    #[getter]
    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        list_of_keys(py, &self.0.keys)
    }

    /// A slot for each key.
    #[getter]
    fn slots<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, &self.0.slots)
    }

    /// The keys that were evicted to make room.
    #[getter]
    fn evicted<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        list_of_keys(py, &self.0.evicted)
    }

    fn __repr__(&self) -> String {
        format!("StorePlan({} keys, {} evicted)", self.0.keys.len(), self.0.evicted.len())
    }
}

/// The index of a tier of host memory: which key lies in which slot, and what is evicted.
///
/// Slots are rows of host memory, numbered from 0. `policy` is "lru" or "arc". Keys are 1 to 40 bytes. Transfers of one
/// key and kind are reported as complete in the order in which they were prepared. Raises `ConfigError` if `num_slots`
/// is not between 1 and 2**27.
#[pyclass(module = "lockstep_kv")]
#[derive(Debug)]
pub(crate) struct OffloadIndex(core::OffloadIndex);

#[pymethods]
impl OffloadIndex {
    #[new]
    #[pyo3(signature = (num_slots, policy=Given::NO), text_signature = "(num_slots, policy='lru')")]
    fn new(num_slots: &Bound<'_, PyAny>, policy: Given<'_>) -> PyResult<Self> {
        let policy = policy.value().map_or(Ok(Policy::Lru), |name| policy_of(&name))?;
        core::OffloadIndex::new(uint32(num_slots, "num_slots")?, policy).map(Self).map_err(raise)
    }

    /// All slots.
    #[getter]
    fn num_slots(&self) -> usize {
        self.0.num_slots()
    }

    /// Slots not in use.
    #[getter]
    fn num_free_slots(&self) -> usize {
        self.0.num_free_slots()
    }

    /// Keys present, being written or ready.
    #[getter]
    fn num_keys(&self) -> usize {
        self.0.num_keys()
    }

    /// How keys to evict are chosen: "lru" or "arc".
    #[getter]
    fn policy(&self) -> &'static str {
        match self.0.policy() {
            Policy::Lru => "lru",
            Policy::Arc => "arc",
        }
    }

    /// "hit" if the key can be loaded, "pending" while it is being stored, else "miss". Not a use of the key.
    fn lookup(&self, key: &Bound<'_, PyAny>) -> PyResult<&'static str> {
        let key = Key::new(bytes(key, "key")?).map_err(raise)?;
        Ok(match self.0.lookup(&key) {
            Lookup::Miss => "miss",
            Lookup::Pending => "pending",
            Lookup::Hit => "hit",
        })
    }

    /// Plan a store of those of the keys that are not present, evicting others if need be. Returns None, and changes
    /// nothing, if there are not enough slots even so.
    fn prepare_store(&mut self, keys: &Bound<'_, PyAny>) -> PyResult<Option<StorePlan>> {
        Ok(self.0.prepare_store(&keys_of(keys)?).map(StorePlan))
    }

    /// Report that a store of each key is complete: a key is then ready, or forgotten if `success` is false. Raises
    /// `DoubleFreeError` if a key has no store in flight or comes up more often than it has.
    #[pyo3(signature = (keys, success=Given::NO), text_signature = "($self, keys, success=True)")]
    fn complete_store(&mut self, keys: &Bound<'_, PyAny>, success: Given<'_>) -> PyResult<()> {
        let success = success.flag("success", true)?;
        self.0.complete_store(&keys_of(keys)?, success).map_err(raise)
    }

    /// Plan a load of each key and return its slot, which stays as it is until the load is complete. Raises
    /// `ConfigError` if a key is not ready.
    fn prepare_load<'py>(slf: &Bound<'py, Self>, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let keys = keys_of(keys)?;
        // Making a list may run finalizers, which may call the index again: it is not borrowed then.
        let slots = slf.try_borrow_mut()?.0.prepare_load(&keys).map_err(raise)?;
        PyList::new(slf.py(), slots)
    }

    /// Report that one load per occurrence of a key is complete. Raises `DoubleFreeError` if a key comes up more often
    /// than it has loads in flight.
    fn complete_load(&mut self, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.complete_load(&keys_of(keys)?).map_err(raise)
    }

    /// Make the keys that are ready recent, the first of them most. Others are ignored.
    fn touch(&mut self, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.touch(&keys_of(keys)?);
        Ok(())
    }

    /// Forget all keys. Slots with transfers in flight stay in use until those are complete.
    fn reset(&mut self) {
        self.0.reset();
    }

    /// Counters since the index was made, and what its slots are used for now.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.0.stats();
        let dict = PyDict::new(py);
        for (name, count) in [
            ("stored", stats.stored),
            ("evicted", stats.evicted),
            ("failed_stores", stats.failed_stores),
            ("dropped_stores", stats.dropped_stores),
            ("loads", stats.loads),
            ("free_slots", stats.free_slots as u64),
            ("writing_slots", stats.writing_slots as u64),
            ("idle_slots", stats.idle_slots as u64),
            ("reading_slots", stats.reading_slots as u64),
            ("draining_slots", stats.draining_slots as u64),
            ("keys", self.0.num_keys() as u64),
        ] {
            dict.set_item(name, count)?;
        }
        Ok(dict)
    }

    /// Check the invariants. Raises `InvariantError` naming the first that is broken.
    fn audit(&self) -> PyResult<()> {
        self.0.audit().map_err(raise)
    }

    /// A 64-bit digest of the state that later calls can observe, counters aside.
    fn state_digest(&self) -> u64 {
        self.0.state_digest()
    }

    fn __repr__(&self) -> String {
        format!("OffloadIndex({} slots, {} free)", self.0.num_slots(), self.0.num_free_slots())
    }
}
