//! The index of a tier of host memory: which key lies in which slot, which slots a transfer uses, and what is evicted.
//!
//! The tier has a fixed number of *slots*, rows of host memory that the caller owns. A key that is present is
//!
//! * *writing*: a store into its slot is in flight; a lookup says "pending";
//! * *ready*: its content can be read; a lookup says "hit". While loads from it are in flight it is *reading*.
//!
//! Only ready keys that nobody reads are evicted. A [`reset`](OffloadIndex::reset) cannot stop a transfer, so it leaves
//! the slots of those in flight *draining*: occupied and without a key, until the transfer is reported as complete.
//! The same key may be stored again into another slot meanwhile. Completions name keys, not slots, so one counts for
//! the oldest transfer in flight of that key and kind: transfers of one key and kind must be reported in the order in
//! which they were prepared.
//!
//! Wherever a call makes several keys recent, the first of them ends up as the most recent: callers give the keys of a
//! prefix from its start, and a prefix is worth least at its end.
//!
//! # Invariants
//!
//! * **O1** every slot is free, writing, ready, reading or draining, and is counted as such; each free slot is offered
//!   exactly once.
//! * **O2** the index names slot `s` under key `k` iff `s` is writing, ready or reading and holds `k`.
//! * **O3** the draining queues name each draining slot once, under its key and kind; a ready key has no older store in
//!   flight.
//! * **O4** the policy orders exactly the ready slots, each once.
//! * **O5** of an adaptive policy with `c` slots: |T1| + |B1| <= c, |T1| + |T2| + |B1| + |B2| <= 2c, the target is at
//!   most c, and no ghost is present.
//!
//! [`OffloadIndex::audit`] checks them all.

mod answers;
mod check;
mod draining;
mod policy;
mod slots;
#[cfg(test)]
mod tests;
mod tier_index;

pub use answers::{Lookup, OffloadStats, StorePlan};
pub use policy::Policy;
pub use tier_index::OffloadIndex;

/// Largest tier: 2^27 slots.
pub const MAX_SLOTS: u32 = 1 << 27;
