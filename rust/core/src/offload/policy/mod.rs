//! Which ready key is evicted next.
//!
//! A policy orders the slots of ready keys. Slots that are being written or drained are not in it; those that are being
//! read keep their place and are passed over.

mod adaptive;
mod ghosts;
mod lists;
mod lru;

use std::hash::DefaultHasher;

use crate::error::{Error, Result};
use crate::pool::Key;

use adaptive::Adaptive;
use lru::Lru;

/// How keys to evict are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The least recently used key first.
    Lru,
    /// Adaptive replacement after Megiddo and Modha (2003): keys used once and keys used again are kept apart, and the
    /// room each kind gets follows the keys that come back after their eviction.
    Arc,
}

/// Where a key that is about to be stored was last seen by the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Recall {
    /// Not that it would know.
    Unknown,
    /// Evicted after it was used once.
    UsedOnce,
    /// Evicted after it was used again.
    UsedAgain,
}

/// How far one call has looked for slots to evict. Slots passed over stay passed over until the call ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Search {
    /// Per list: the next slot to look at.
    next: [Option<u32>; 2],
}

/// The order of eviction.
#[derive(Clone, Debug)]
pub(super) enum Order {
    Lru(Lru),
    Adaptive(Box<Adaptive>),
}

impl Order {
    /// An empty order over the slots `0..num_slots`.
    pub(super) fn new(policy: Policy, num_slots: u32) -> Result<Self> {
        match policy {
            Policy::Lru => Lru::new(num_slots).map(Self::Lru),
            Policy::Arc => Adaptive::new(num_slots).map(|order| Self::Adaptive(Box::new(order))),
        }
    }

    /// The policy this follows.
    pub(super) fn policy(&self) -> Policy {
        match self {
            Self::Lru(_) => Policy::Lru,
            Self::Adaptive(_) => Policy::Arc,
        }
    }

    /// Notes that a key is about to be stored, before room is made for it.
    #[inline]
    pub(super) fn recall(&mut self, key: &Key) -> Recall {
        match self {
            Self::Lru(_) => Recall::Unknown,
            Self::Adaptive(order) => order.recall(key),
        }
    }

    /// A search that has not looked at anything.
    #[inline]
    pub(super) fn search(&self) -> Search {
        match self {
            Self::Lru(order) => order.search(),
            Self::Adaptive(order) => order.search(),
        }
    }

    /// Takes out the next slot to evict, for a key that was last seen as `recall` says. `evictable` gives the key of a
    /// slot that may go. The order must not change otherwise during one search.
    #[inline]
    pub(super) fn evict(
        &mut self,
        search: &mut Search,
        recall: Recall,
        evictable: impl Fn(u32) -> Option<Key>,
    ) -> Option<(u32, Key)> {
        match self {
            Self::Lru(order) => order.evict(search, evictable),
            Self::Adaptive(order) => order.evict(search, recall, evictable),
        }
    }

    /// Adds the slot of a key that has become ready as the most recent. `recalled`: the policy knew the key when it was
    /// about to be stored.
    #[inline]
    pub(super) fn admit(&mut self, slot: u32, recalled: bool) {
        match self {
            Self::Lru(order) => order.admit(slot),
            Self::Adaptive(order) => order.admit(slot, recalled),
        }
    }

    /// Makes a slot the most recent.
    #[inline]
    pub(super) fn touch(&mut self, slot: u32) {
        match self {
            Self::Lru(order) => order.touch(slot),
            Self::Adaptive(order) => order.touch(slot),
        }
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        match self {
            Self::Lru(order) => order.clear(),
            Self::Adaptive(order) => order.clear(),
        }
    }

    /// O4 and O5: exactly the `num_ready` ready slots are in the order, and no ghost is present.
    pub(super) fn audit(
        &self,
        num_ready: usize,
        is_ready: impl Fn(u32) -> bool,
        is_present: impl Fn(&Key) -> bool,
    ) -> Result<()> {
        let num_ordered = match self {
            Self::Lru(order) => order.audit(is_ready)?,
            Self::Adaptive(order) => order.audit(is_ready, is_present)?,
        };
        if num_ordered == num_ready {
            return Ok(());
        }
        Err(Error::Invariant(format!("O4: {num_ordered} slots are in the eviction order, {num_ready} are ready")))
    }

    /// Feeds the order into a hasher.
    pub(super) fn hash_state(&self, into: &mut DefaultHasher) {
        match self {
            Self::Lru(order) => order.hash_state(into),
            Self::Adaptive(order) => order.hash_state(into),
        }
    }
}
