//! Lists that cross the border: block ids and block hashes.

use std::cell::RefCell;

use lockstep_kv_core::hash::{BlockHash, BlockHashes};
use lockstep_kv_core::{BlockId, Error, GroupId, Result};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::args::{items, uint32, wrong_type};
use crate::errors::raise;

/// A list of block ids from Python.
pub(crate) fn ids_of(value: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<BlockId>> {
    let items = items(value, name)?;
    items.iter().enumerate().map(|(at, item)| uint32(item, &format!("{name}[{at}]")).map(BlockId)).collect()
}

/// A list of block ids for Python.
pub(crate) fn list_of_ids<'py>(py: Python<'py>, blocks: &[BlockId]) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, blocks.iter().map(|block| block.0))
}

/// One list of block ids per group.
pub(crate) fn tuple_of_lists<'py>(py: Python<'py>, rows: &[Vec<BlockId>]) -> PyResult<Bound<'py, PyTuple>> {
    tuple_of_rows(py, rows.len(), |group| &rows[group.0 as usize])
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
pub(crate) struct HashList<'a, 'py> {
    items: HashItems<'a, 'py>,
    /// An item of a wrong type and its place, for which the core has no error of its own.
    refused: RefCell<Option<(usize, Bound<'py, PyAny>)>>,
}

#[derive(Debug)]
enum HashItems<'a, 'py> {
    /// A list.
    List(&'a Bound<'py, PyList>),
    /// A tuple.
    Tuple(&'a Bound<'py, PyTuple>),
    /// The items of another sequence.
    Items(Vec<Bound<'py, PyAny>>),
}

impl<'a, 'py> HashList<'a, 'py> {
    pub(crate) fn new(value: &'a Bound<'py, PyAny>, name: &str) -> PyResult<Self> {
        let items = match (value.cast::<PyList>(), value.cast::<PyTuple>()) {
            (Ok(list), _) => HashItems::List(list),
            (_, Ok(tuple)) => HashItems::Tuple(tuple),
            _ => HashItems::Items(items(value, name)?),
        };
        Ok(Self { items, refused: RefCell::new(None) })
    }

    /// The exception for an error of a call that was given this list. It may run Python code, so the object that was called
    /// must not be borrowed any more.
    pub(crate) fn raise(&self, error: Error) -> PyErr {
        match self.refused.take() {
            Some((at, item)) => wrong_type(&format!("block_hashes[{at}]"), "bytes", &item),
            None => raise(error),
        }
    }
}

impl BlockHashes for HashList<'_, '_> {
    fn count(&self) -> usize {
        match &self.items {
            HashItems::List(list) => list.len(),
            HashItems::Tuple(tuple) => tuple.len(),
            HashItems::Items(items) => items.len(),
        }
    }

    fn get(&self, at: usize) -> Result<BlockHash> {
        let item = match &self.items {
            HashItems::List(list) => list.get_item(at),
            HashItems::Tuple(tuple) => tuple.get_item(at),
            HashItems::Items(items) => Ok(items[at].clone()),
        };
        let refused = |what: &str| Error::Config(format!("block_hashes[{at}]: {what}"));
        let item = item.map_err(|_| refused("the list has become shorter"))?;
        if let Ok(bytes) = item.cast::<PyBytes>() {
            return BlockHash::new(bytes.as_bytes()).map_err(|error| refused(&error.to_string()));
        }
        self.refused.replace(Some((at, item)));
        Err(refused("not bytes"))
    }
}
