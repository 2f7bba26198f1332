//! What the index answers with.

use std::fmt::Write;

use crate::pool::Key;

/// What a lookup finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// The key is not present.
    Miss,
    /// A store of the key is in flight.
    Pending,
    /// The key can be loaded.
    Hit,
}

/// What to store where: `slots[i]` is for `keys[i]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StorePlan {
    /// The keys to store, without those that are present.
    pub keys: Vec<Key>,
    /// A slot for each.
    pub slots: Vec<u32>,
    /// The keys that were evicted to make room, in this order.
    pub evicted: Vec<Key>,
}

/// What the index has done since it was made, and what its slots are used for now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OffloadStats {
    /// Keys that became ready.
    pub stored: u64,
    /// Keys that were evicted.
    pub evicted: u64,
    /// Stores that failed.
    pub failed_stores: u64,
    /// Stores that were complete only after their key was forgotten by a reset.
    pub dropped_stores: u64,
    /// Loads prepared.
    pub loads: u64,
    /// Slots not in use.
    pub free_slots: usize,
    /// Slots with a store in flight.
    pub writing_slots: usize,
    /// Slots with a ready key that nobody reads.
    pub idle_slots: usize,
    /// Slots with a ready key and loads in flight.
    pub reading_slots: usize,
    /// Slots with a transfer in flight whose key was forgotten.
    pub draining_slots: usize,
}

/// A key as messages show it.
pub(super) fn hex(key: &Key) -> String {
    key.as_bytes().iter().fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
