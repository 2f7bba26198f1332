//! The least recently used key first.

use std::hash::DefaultHasher;

use crate::error::{Error, Result};
use crate::offload::policy::Search;
use crate::offload::policy::lists::Lists;
use crate::pool::Key;

/// The one list.
const ALL: usize = 0;

/// Slots by last use.
#[derive(Clone, Debug)]
pub(in crate::offload) struct Lru {
    slots: Lists<1>,
}

impl Lru {
    pub(super) fn new(num_slots: u32) -> Result<Self> {
        Ok(Self { slots: Lists::new(num_slots as usize)? })
    }

    #[inline]
    pub(super) fn search(&self) -> Search {
        Search { next: [self.slots.oldest(ALL), None] }
    }

    #[inline]
    pub(super) fn evict(&mut self, search: &mut Search, evictable: impl Fn(u32) -> Option<Key>) -> Option<(u32, Key)> {
        let found = self.slots.next_that(&mut search.next[ALL], evictable)?;
        self.slots.remove(found.0);
        Some(found)
    }

    #[inline]
    pub(super) fn admit(&mut self, slot: u32) {
        self.slots.push_newest(ALL, slot);
    }

    #[inline]
    pub(super) fn touch(&mut self, slot: u32) {
        self.slots.remove(slot);
        self.slots.push_newest(ALL, slot);
    }

    pub(super) fn clear(&mut self) {
        self.slots.clear();
    }

    /// Checks the list, and gives its length.
    pub(super) fn audit(&self, is_ready: impl Fn(u32) -> bool) -> Result<usize> {
        self.slots.audit()?;
        match self.slots.iter(ALL).find(|&slot| !is_ready(slot)) {
            Some(slot) => Err(Error::Invariant(format!("O4: slot {slot} is in the eviction order, but is not ready"))),
            None => Ok(self.slots.len(ALL)),
        }
    }

    pub(super) fn hash_state(&self, into: &mut DefaultHasher) {
        self.slots.hash_state(into, |slot| slot);
    }
}
