//! KV events as Python objects.

use lockstep_kv_core::coordinator::Event;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

/// The blocks of a range of a request's tokens became findable in one group, those that can be part of a hit.
#[pyclass(frozen, eq, module = "lockstep_kv")]
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BlockStored {
    group_id: u32,
    request_id: Box<str>,
    block_hashes: Vec<Box<[u8]>>,
    block_starts: Vec<u64>,
    parent_block_hash: Option<Box<[u8]>>,
    start_token: u64,
    end_token: u64,
    block_tokens: u64,
}

#[pymethods]
impl BlockStored {
    /// The group that stored them.
    #[getter]
    fn group_id(&self) -> u32 {
        self.group_id
    }

    /// The request that computed them.
    #[getter]
    fn request_id(&self) -> &str {
        &self.request_id
    }

    /// Their hashes, in the order of the tokens.
    #[getter]
    fn block_hashes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.block_hashes.iter().map(|hash| PyBytes::new(py, hash)))
    }

    /// The first token that each of them covers.
    #[getter]
    fn block_starts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, &self.block_starts)
    }

    /// The hash before the first one; None if it is the request's first.
    #[getter]
    fn parent_block_hash<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.parent_block_hash.as_ref().map(|hash| PyBytes::new(py, hash))
    }

    /// First token of the range.
    #[getter]
    fn start_token(&self) -> u64 {
        self.start_token
    }

    /// The token after the range.
    #[getter]
    fn end_token(&self) -> u64 {
        self.end_token
    }

    /// Tokens each hash stands for.
    #[getter]
    fn block_tokens(&self) -> u64 {
        self.block_tokens
    }

    fn __repr__(&self) -> String {
        let Self { group_id, request_id, block_hashes, start_token, block_tokens, .. } = self;
        format!(
            "BlockStored(group_id={group_id}, request_id={request_id:?}, {} hashes of {block_tokens} tokens from token \
             {start_token})",
            block_hashes.len()
        )
    }
}

/// A block can no longer be found by this hash in this group.
#[pyclass(frozen, eq, module = "lockstep_kv")]
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BlockRemoved {
    group_id: u32,
    block_hash: Box<[u8]>,
}

#[pymethods]
impl BlockRemoved {
    /// The group that stored it.
    #[getter]
    fn group_id(&self) -> u32 {
        self.group_id
    }

    /// The hash.
    #[getter]
    fn block_hash<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.block_hash)
    }

    fn __repr__(&self) -> String {
        format!("BlockRemoved(group_id={})", self.group_id)
    }
}

/// Nothing can be found any more.
#[pyclass(frozen, eq, module = "lockstep_kv")]
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct AllBlocksCleared;

#[pymethods]
impl AllBlocksCleared {
    #[allow(clippy::unused_self, reason = "Python's signature")]
    fn __repr__(&self) -> &'static str {
        "AllBlocksCleared()"
    }
}

/// The events as a Python list.
pub(crate) fn list_of_events(py: Python<'_>, events: Vec<Event>) -> PyResult<Bound<'_, PyList>> {
    let list = PyList::empty(py);
    for event in events {
        match event {
            Event::Stored {
                group,
                request_id,
                block_hashes,
                block_starts,
                parent_block_hash,
                start_token,
                end_token,
                block_tokens,
            } => {
                let group_id = group.0;
                let stored = BlockStored {
                    group_id,
                    request_id,
                    block_hashes,
                    block_starts,
                    parent_block_hash,
                    start_token,
                    end_token,
                    block_tokens,
                };
                list.append(Bound::new(py, stored)?)?;
            }
            Event::Removed { group, block_hash } => {
                list.append(Bound::new(py, BlockRemoved { group_id: group.0, block_hash })?)?;
            }
            Event::Cleared => list.append(Bound::new(py, AllBlocksCleared)?)?,
        }
    }
    Ok(list)
}
