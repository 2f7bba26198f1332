//! Adaptive replacement, after Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003).
//!
//! Ready slots are in two lists, T1 (used once since they were stored) and T2 (used again, or stored again while
//! remembered). Keys evicted from T1 are remembered in B1, those from T2 in B2: ghosts. A target says how many slots T1
//! should have. With `c` slots:
//!
//! * A key about to be stored that is in B1 raises the target by max(1, |B2| / |B1|), at most to c; one that is in B2
//!   lowers it by max(1, |B1| / |B2|), at least to 0. Quotients are rounded down, sizes are those before the key leaves
//!   its list, which it then does. This happens when the store is prepared, in the order of the keys, and only if there
//!   is room for all of them.
//! * A slot is evicted from T1 if |T1| exceeds the target, or equals it and the new key was in B2; otherwise from T2. It
//!   is the oldest evictable slot of that list, or of the other list if that one has none.
//! * A stored key enters T1, or T2 if it was a ghost when its store was prepared. It enters when it is ready, which is
//!   later than in the paper: a store in flight counts in neither list. Then the oldest of B1 are forgotten until
//!   |T1| + |B1| <= c, and the oldest of B2 until all four lists together have at most 2c entries.
//! * A touched slot becomes the newest of T2, whichever list it was in.
//! * A key whose store fails is forgotten, also if it was a ghost before; so is everything at a reset, when the target
//!   becomes 0 as well.

use std::hash::{DefaultHasher, Hash};

use crate::error::{Error, Result};
use crate::offload::policy::ghosts::Ghosts;
use crate::offload::policy::lists::Lists;
use crate::offload::policy::{Recall, Search};
use crate::pool::Key;

/// T1, and B1 among the ghosts.
const ONCE: usize = 0;
/// T2, and B2 among the ghosts.
const AGAIN: usize = 1;

/// The four lists and the target.
#[derive(Clone, Debug)]
pub(in crate::offload) struct Adaptive {
    slots: Lists<2>,
    ghosts: Ghosts,
    /// How many slots T1 should have.
    target: usize,
    /// c.
    num_slots: usize,
}

impl Adaptive {
    pub(super) fn new(num_slots: u32) -> Result<Self> {
        let num_slots = num_slots as usize;
        Ok(Self { slots: Lists::new(num_slots)?, ghosts: Ghosts::new(2 * num_slots)?, target: 0, num_slots })
    }

    pub(super) fn recall(&mut self, key: &Key) -> Recall {
        let Some(list) = self.ghosts.find(key) else { return Recall::Unknown };
        let step = (self.ghosts.len(1 - list) / self.ghosts.len(list).max(1)).max(1);
        self.ghosts.remove(key);
        if list == ONCE {
            self.target = (self.target + step).min(self.num_slots);
            Recall::UsedOnce
        } else {
            self.target = self.target.saturating_sub(step);
            Recall::UsedAgain
        }
    }

    #[inline]
    pub(super) fn search(&self) -> Search {
        Search { next: [self.slots.oldest(ONCE), self.slots.oldest(AGAIN)] }
    }

    pub(super) fn evict(
        &mut self,
        search: &mut Search,
        recall: Recall,
        evictable: impl Fn(u32) -> Option<Key>,
    ) -> Option<(u32, Key)> {
        let once = self.slots.len(ONCE);
        let from_once = once > self.target || (once == self.target && recall == Recall::UsedAgain);
        for list in if from_once { [ONCE, AGAIN] } else { [AGAIN, ONCE] } {
            if let Some((slot, key)) = self.slots.next_that(&mut search.next[list], &evictable) {
                self.slots.remove(slot);
                self.ghosts.push_newest(list, key);
                return Some((slot, key));
            }
        }
        None
    }

    #[inline]
    pub(super) fn admit(&mut self, slot: u32, recalled: bool) {
        self.slots.push_newest(if recalled { AGAIN } else { ONCE }, slot);
        while self.once() > self.num_slots && self.ghosts.remove_oldest(ONCE) {}
        while self.total() > 2 * self.num_slots && self.ghosts.remove_oldest(AGAIN) {}
    }

    /// |T1| + |B1|.
    #[inline]
    fn once(&self) -> usize {
        self.slots.len(ONCE) + self.ghosts.len(ONCE)
    }

    /// The entries of all lists.
    #[inline]
    fn total(&self) -> usize {
        self.once() + self.slots.len(AGAIN) + self.ghosts.len(AGAIN)
    }

    #[inline]
    pub(super) fn touch(&mut self, slot: u32) {
        self.slots.remove(slot);
        self.slots.push_newest(AGAIN, slot);
    }

    pub(super) fn clear(&mut self) {
        self.slots.clear();
        self.ghosts.clear();
        self.target = 0;
    }

    /// Checks the lists, and gives the number of slots in them.
    pub(super) fn audit(&self, is_ready: impl Fn(u32) -> bool, is_present: impl Fn(&Key) -> bool) -> Result<usize> {
        self.slots.audit()?;
        if let Some(slot) = self.slots.iter(ONCE).chain(self.slots.iter(AGAIN)).find(|&slot| !is_ready(slot)) {
            return Err(Error::Invariant(format!("O4: slot {slot} is in the eviction order, but is not ready")));
        }
        self.ghosts.audit(is_present)?;
        let (once, total, c) = (self.once(), self.total(), self.num_slots);
        if once > c || total > 2 * c || self.target > c {
            let target = self.target;
            return Err(Error::Invariant(format!("O5: {once} used once, {total} in all, target {target}, {c} slots")));
        }
        Ok(self.slots.len(ONCE) + self.slots.len(AGAIN))
    }

    pub(super) fn hash_state(&self, into: &mut DefaultHasher) {
        self.target.hash(into);
        self.slots.hash_state(into, |slot| slot);
        self.ghosts.hash_state(into);
    }
}

#[cfg(test)]
impl Adaptive {
    /// The lists and the target, with each slot as `show` shows it and each ghost as its first byte.
    pub(in crate::offload) fn show(&self, show: impl Fn(u32) -> u8) -> String {
        let slots = |list| self.slots.iter(list).map(&show).collect::<Vec<_>>();
        let ghosts = |list| self.ghosts.iter(list).map(|key| key.as_bytes()[0]).collect::<Vec<_>>();
        format!(
            "T1 {:?} T2 {:?} B1 {:?} B2 {:?} target {}",
            slots(ONCE),
            slots(AGAIN),
            ghosts(ONCE),
            ghosts(AGAIN),
            self.target
        )
    }

    /// Remembers a key that was not evicted.
    pub(in crate::offload) fn remember(&mut self, key: Key) {
        self.ghosts.push_newest(ONCE, key);
    }
}
