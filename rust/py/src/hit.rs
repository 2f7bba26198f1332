//! A prefix found in the pool.

use lockstep_kv_core as core;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::args::wrong_type;
use crate::lists::tuple_of_rows;

/// A prefix found in the pool. It holds no references; using it after one of its blocks lost its keys raises
/// `StaleHitError`.
#[pyclass(frozen, eq, module = "lockstep_kv")]
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PrefixHit(pub(crate) core::PrefixHit);

#[pymethods]
impl PrefixHit {
    /// Tokens found; the same for every group.
    #[getter]
    fn num_tokens(&self) -> u64 {
        self.0.num_tokens()
    }

    /// Tokens behind the hit that a set which was looked up earlier has and a later one lacks; depends on the order of the
    /// groups.
    #[getter]
    fn num_uncached_tokens(&self) -> u64 {
        self.0.num_uncached_tokens()
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

/// The hit given as an argument, if one is.
pub(crate) fn hit_of<'a>(value: Option<&'a Bound<'_, PyAny>>) -> PyResult<Option<&'a core::PrefixHit>> {
    match value.map(|value| (value, value.cast::<PrefixHit>())) {
        None => Ok(None),
        Some((_, Ok(hit))) => Ok(Some(&hit.get().0)),
        Some((value, Err(_))) => Err(wrong_type("hit", "a PrefixHit", value)),
    }
}
