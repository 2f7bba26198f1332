//! Blocks: which are free, who refers to them, and which content they can be found by.

mod block_pool;
pub(crate) mod events;
mod free_list;
mod hash_index;
mod key;

pub use block_pool::{BlockPool, MAX_BLOCKS, PoolStats};
pub use events::BlockUse;
pub use key::{Key, MAX_KEY_BYTES};

pub(crate) use block_pool::Generation;

use crate::error::{Error, Result};

/// Reserves exactly `len` elements, so that a table too large for the machine is refused instead of aborting.
pub(crate) fn reserve<T>(len: usize, what: &str) -> Result<Vec<T>> {
    let mut table = Vec::new();
    table.try_reserve_exact(len).map_err(|_| {
        Error::config(format!("not enough memory for {what}: {len} entries of {} bytes", size_of::<T>()))
    })?;
    Ok(table)
}

/// A table of `len` copies of `value`.
fn filled<T: Clone>(value: T, len: usize, what: &str) -> Result<Vec<T>> {
    let mut table = reserve(len, what)?;
    table.resize(len, value);
    Ok(table)
}
