//! The module `lockstep_kv._core`: one crossing per operation, only ints, bytes and lists of ints cross.
//!
//! Translates types and errors, decides nothing.

#![forbid(unsafe_code)]
#![allow(clippy::doc_markdown, reason = "docstrings are written for Python's readers")]
#![allow(clippy::too_many_arguments, reason = "Python's signatures have keyword arguments")]

mod args;
mod config;
mod coordinator;
mod errors;
mod events;
mod geometry;
mod hash;
mod hit;
mod inspect;
mod lists;
mod offload;
mod pool;
mod steps;

use pyo3::prelude::*;

/// The Rust core. Import these names from `lockstep_kv`.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::config::CoordinatorConfig;
    #[pymodule_export]
    use super::coordinator::Coordinator;
    #[pymodule_export]
    use super::events::{AllBlocksCleared, BlockRemoved, BlockStored};
    #[pymodule_export]
    use super::geometry::{GroupSpec, LayerSpec, Layout, LayoutTensor, LockstepSet, plan_layout};
    #[pymodule_export]
    use super::hash::{hash_blocks, none_hash};
    #[pymodule_export]
    use super::hit::PrefixHit;
    #[pymodule_export]
    use super::offload::{OffloadIndex, StorePlan};
    #[pymodule_export]
    use super::pool::BlockPool;

    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
