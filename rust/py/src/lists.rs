//! Lists that cross the border: block ids and block hashes.

use lockstep_kv_core::hash::{BlockHash, BlockHashes};
use lockstep_kv_core::{BlockId, Error, GroupId, Result};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::args::{items, uint32, wrong_type};

/// A list of block ids from Python.
pub(crate) fn ids_of(value: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<BlockId>> {
    let items = items(value, name)?;
    items.iter().enumerate().map(|(at, item)| uint32(item, &format!("{name}[{at}]")).map(BlockId)).collect()
}

/// A list of block ids for Python.
pub(crate) fn list_of_ids<'py>(py: Python<'py>, blocks: &[BlockId]) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, blocks.iter().map(|block| block.0))
}

/// One list of block ids per group. Groups of one set get lists of their own, as callers may change them.
pub(crate) fn tuple_of_rows<'py, 'a>(
    py: Python<'py>,
    num_groups: usize,
    row: impl Fn(GroupId) -> &'a [BlockId],
) -> PyResult<Bound<'py, PyTuple>> {
    let lists: Vec<_> =
        (0_u32..).map(GroupId).take(num_groups).map(|group| list_of_ids(py, row(group))).collect::<PyResult<_>>()?;
    PyTuple::new(py, lists)
}

/// A Python list or tuple of block hashes, read one at a time.
#[derive(Debug)]
pub(crate) enum HashList<'a, 'py> {
    /// A list.
    List(&'a Bound<'py, PyList>),
    /// A tuple.
    Tuple(&'a Bound<'py, PyTuple>),
    /// The items of another sequence.
    Items(Vec<Bound<'py, PyAny>>),
}

impl<'a, 'py> HashList<'a, 'py> {
    pub(crate) fn new(value: &'a Bound<'py, PyAny>, name: &str) -> PyResult<Self> {
        if let Ok(list) = value.cast::<PyList>() {
            return Ok(Self::List(list));
        }
        if let Ok(tuple) = value.cast::<PyTuple>() {
            return Ok(Self::Tuple(tuple));
        }
        items(value, name).map(Self::Items)
    }
}

impl BlockHashes for HashList<'_, '_> {
    fn count(&self) -> usize {
        match self {
            Self::List(list) => list.len(),
            Self::Tuple(tuple) => tuple.len(),
            Self::Items(items) => items.len(),
        }
    }

    fn get(&self, at: usize) -> Result<BlockHash> {
        let item = match self {
            Self::List(list) => list.get_item(at),
            Self::Tuple(tuple) => tuple.get_item(at),
            Self::Items(items) => Ok(items[at].clone()),
        };
        let refused = |error: &dyn std::fmt::Display| Error::Config(format!("block_hashes[{at}]: {error}"));
        let item = item.map_err(|error| refused(&error))?;
        match item.cast::<PyBytes>() {
            Ok(bytes) => BlockHash::new(bytes.as_bytes()).map_err(|error| refused(&error)),
            Err(_) => Err(Error::Config(wrong_type(&format!("block_hashes[{at}]"), "bytes", &item).to_string())),
        }
    }
}
