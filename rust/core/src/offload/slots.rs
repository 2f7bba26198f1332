//! The slots: what each is used for, and the free ones.

use std::hash::{DefaultHasher, Hash};

use crate::error::{Error, Result};
use crate::pool::{self, Key};

/// What a slot is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum State {
    /// Nothing.
    Free,
    /// A store is in flight. `recalled`: the key was among the policy's ghosts when the store was prepared.
    Writing { recalled: bool },
    /// The content can be read, and this many loads are reading it.
    Ready { reads: u32 },
    /// A store is in flight whose key was forgotten.
    DrainingStore,
    /// This many loads are in flight, all prepared before the key was forgotten.
    DrainingLoads { reads: u32 },
}

/// Slots by use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) writing: usize,
    /// Ready, and not being read.
    pub(super) idle: usize,
    /// Ready, and being read.
    pub(super) reading: usize,
    pub(super) draining: usize,
}

impl Counts {
    /// The counter of a state; free slots are counted by what is left.
    fn of(&mut self, state: State) -> Option<&mut usize> {
        match state {
            State::Free => None,
            State::Writing { .. } => Some(&mut self.writing),
            State::Ready { reads: 0 } => Some(&mut self.idle),
            State::Ready { .. } => Some(&mut self.reading),
            State::DrainingStore | State::DrainingLoads { .. } => Some(&mut self.draining),
        }
    }

    /// Slots in use.
    pub(super) fn used(&self) -> usize {
        self.writing + self.idle + self.reading + self.draining
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    /// Meaningless in a free slot.
    pub(super) key: Key,
    pub(super) state: State,
}

/// All slots. Those never used so far have no entry, so a large tier costs memory only as it fills.
#[derive(Clone, Debug)]
pub(super) struct Slots {
    entries: Vec<Slot>,
    /// Free slots that have an entry, the next to be taken last.
    freed: Vec<u32>,
    limit: u32,
    counts: Counts,
}

impl Slots {
    /// `num_slots` free slots.
    pub(super) fn new(num_slots: u32) -> Result<Self> {
        Ok(Self {
            entries: pool::reserve(num_slots as usize, "the slots")?,
            freed: pool::reserve(num_slots as usize, "the free slots")?,
            limit: num_slots,
            counts: Counts::default(),
        })
    }

    /// All slots.
    #[inline]
    pub(super) fn num_slots(&self) -> u32 {
        self.limit
    }

    /// Free slots.
    #[inline]
    pub(super) fn num_free(&self) -> usize {
        self.limit as usize - self.counts.used()
    }

    /// Slots by use.
    #[inline]
    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    /// A slot that has been used.
    #[inline]
    pub(super) fn get(&self, slot: u32) -> &Slot {
        &self.entries[slot as usize]
    }

    /// A slot, if it has been used.
    pub(super) fn find(&self, slot: u32) -> Option<&Slot> {
        self.entries.get(slot as usize)
    }

    /// The slots that have been used, with their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Slot)> {
        (0_u32..).zip(&self.entries)
    }

    /// The free slots in the order in which they will be taken: the last freed first, then those never used.
    pub(super) fn free_order(&self) -> impl Iterator<Item = u32> + '_ {
        self.freed.iter().rev().copied().chain((0..self.limit).skip(self.entries.len()))
    }

    /// Takes a free slot for a key that is about to be written.
    #[inline]
    pub(super) fn take_free(&mut self, key: Key, recalled: bool) -> Option<u32> {
        if let Some(slot) = self.freed.pop() {
            self.reuse(slot, key, recalled);
            return Some(slot);
        }
        let slot = u32::try_from(self.entries.len()).ok().filter(|&slot| slot < self.limit)?;
        self.entries.push(Slot { key, state: State::Writing { recalled } });
        self.counts.writing += 1;
        Some(slot)
    }

    /// Gives a slot in use, or just taken from the free ones, to a key that is about to be written.
    #[inline]
    pub(super) fn reuse(&mut self, slot: u32, key: Key, recalled: bool) {
        self.set(slot, State::Writing { recalled });
        self.entries[slot as usize].key = key;
    }

    /// Changes what a slot is used for. Use [`Slots::free`] to end its use.
    #[inline]
    pub(super) fn set(&mut self, slot: u32, state: State) {
        let before = std::mem::replace(&mut self.entries[slot as usize].state, state);
        if let Some(count) = self.counts.of(before) {
            *count -= 1;
        }
        if let Some(count) = self.counts.of(state) {
            *count += 1;
        }
    }

    /// Ends the use of a slot.
    #[inline]
    pub(super) fn free(&mut self, slot: u32) {
        self.set(slot, State::Free);
        self.freed.push(slot);
    }

    /// Lets the free slots be taken in ascending order, as in a new table.
    pub(super) fn sort_free(&mut self) {
        while self.entries.last().is_some_and(|slot| slot.state == State::Free) {
            self.entries.pop();
        }
        self.freed.clear();
        let free = (0_u32..).zip(&self.entries).filter(|(_, slot)| slot.state == State::Free);
        self.freed.extend(free.map(|(at, _)| at));
        self.freed.reverse();
    }

    /// O1: the counts are right, and the free slots are exactly those offered.
    pub(super) fn audit(&self) -> Result<()> {
        let broken = |text: String| Err(Error::Invariant(format!("O1: slots: {text}")));
        let mut counts = Counts::default();
        for slot in &self.entries {
            if let Some(count) = counts.of(slot.state) {
                *count += 1;
            }
        }
        if counts != self.counts {
            return broken(format!("there are {counts:?}, counted are {:?}", self.counts));
        }
        let mut offered = vec![false; self.entries.len()];
        for &slot in &self.freed {
            match offered.get_mut(slot as usize) {
                Some(seen) if !*seen && self.get(slot).state == State::Free => *seen = true,
                _ => return broken(format!("slot {slot} is offered twice, or although it is not free")),
            }
        }
        if self.freed.len() + counts.used() != self.entries.len() || self.entries.len() > self.limit as usize {
            let (freed, entries) = (self.freed.len(), self.entries.len());
            return broken(format!("{freed} offered and {} used of {entries} entries", counts.used()));
        }
        Ok(())
    }

    /// Feeds the uses of all slots, and the order of the free ones, into a hasher.
    pub(super) fn hash_state(&self, into: &mut DefaultHasher) {
        for (at, slot) in self.iter().filter(|(_, slot)| slot.state != State::Free) {
            (at, slot.key, slot.state).hash(into);
        }
        for slot in self.free_order() {
            slot.hash(into);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u8) -> Key {
        Key::new(&[number]).expect("in range")
    }

    fn order(slots: &Slots) -> Vec<u32> {
        slots.free_order().collect()
    }

    #[test]
    fn the_last_freed_is_taken_first_and_sorting_restores_the_first_order() -> Result<()> {
        let mut slots = Slots::new(5)?;
        for number in 0..4 {
            assert_eq!(slots.take_free(key(number), false), Some(u32::from(number)));
        }
        slots.free(1);
        slots.free(3);
        slots.free(0);
        assert_eq!(order(&slots), [0, 3, 1, 4]);
        slots.audit()?;
        slots.sort_free();
        assert_eq!(order(&slots), [0, 1, 3, 4]);
        slots.audit()?;
        for expected in [0, 1, 3, 4] {
            assert_eq!(slots.take_free(key(9), false), Some(expected));
        }
        assert_eq!(slots.take_free(key(9), false), None);
        assert_eq!((slots.num_free(), slots.counts().writing), (0, 5));
        slots.audit()
    }

    #[test]
    fn audit_sees_wrong_counts_and_wrong_offers() -> Result<()> {
        let sound = || -> Result<Slots> {
            let mut slots = Slots::new(3)?;
            slots.take_free(key(1), false);
            slots.take_free(key(2), false);
            slots.free(0);
            slots.audit()?;
            Ok(slots)
        };
        let mut slots = sound()?;
        slots.counts.idle += 1;
        assert!(slots.audit().is_err());
        let mut slots = sound()?;
        slots.freed.push(0);
        assert!(slots.audit().is_err());
        let mut slots = sound()?;
        slots.freed[0] = 1;
        assert!(slots.audit().is_err());
        let mut slots = sound()?;
        slots.freed.clear();
        assert!(slots.audit().is_err());
        Ok(())
    }
}
