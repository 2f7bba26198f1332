//! The slots of transfers whose key was forgotten, oldest first per key and kind.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash};

use hashbrown::HashMap;

use crate::error::{Error, Result};
use crate::offload::slots::{Slots, State};
use crate::pool::Key;

/// The slots of one key.
#[derive(Clone, Debug, Default)]
struct OfKey {
    stores: VecDeque<u32>,
    /// Each with at least one load in flight; how many is in the slot.
    loads: VecDeque<u32>,
}

/// All draining slots. Empty but for a while after a reset.
#[derive(Clone, Debug, Default)]
pub(super) struct Draining {
    keys: HashMap<Key, OfKey>,
}

impl Draining {
    /// Adds a slot with a store in flight, behind the older ones of the key.
    pub(super) fn push_store(&mut self, key: Key, slot: u32) {
        self.keys.entry(key).or_default().stores.push_back(slot);
    }

    /// Adds a slot with loads in flight, behind the older ones of the key.
    pub(super) fn push_loads(&mut self, key: Key, slot: u32) {
        self.keys.entry(key).or_default().loads.push_back(slot);
    }

    /// How many stores of the key are draining.
    #[inline]
    pub(super) fn num_stores(&self, key: &Key) -> usize {
        self.keys.get(key).map_or(0, |of_key| of_key.stores.len())
    }

    /// The slots of the key with loads in flight, oldest first.
    pub(super) fn loads(&self, key: &Key) -> impl Iterator<Item = u32> + '_ {
        self.keys.get(key).into_iter().flat_map(|of_key| of_key.loads.iter().copied())
    }

    /// Takes out the oldest slot of the key with a store in flight.
    #[inline]
    pub(super) fn pop_store(&mut self, key: &Key) -> Option<u32> {
        let slot = self.keys.get_mut(key)?.stores.pop_front();
        self.forget_if_empty(key);
        slot
    }

    /// The oldest slot of the key with loads in flight.
    #[inline]
    pub(super) fn first_loads(&self, key: &Key) -> Option<u32> {
        self.keys.get(key)?.loads.front().copied()
    }

    /// Takes out the oldest slot of the key with loads in flight.
    pub(super) fn pop_loads(&mut self, key: &Key) {
        if let Some(of_key) = self.keys.get_mut(key) {
            of_key.loads.pop_front();
            self.forget_if_empty(key);
        }
    }

    fn forget_if_empty(&mut self, key: &Key) {
        if self.keys.get(key).is_some_and(|of_key| of_key.stores.is_empty() && of_key.loads.is_empty()) {
            self.keys.remove(key);
        }
    }

    /// O3, but for what it says about ready keys: the queues name each draining slot once, under its key and kind.
    pub(super) fn audit(&self, slots: &Slots) -> Result<()> {
        let broken = |text: String| Err(Error::Invariant(format!("O3: draining: {text}")));
        let mut queued = 0;
        for (key, of_key) in &self.keys {
            if of_key.stores.is_empty() && of_key.loads.is_empty() {
                return broken(format!("{key:?} has empty queues"));
            }
            let stores = of_key.stores.iter().map(|&slot| (slot, false));
            for (slot, loads) in stores.chain(of_key.loads.iter().map(|&slot| (slot, true))) {
                queued += 1;
                let Some(entry) = slots.find(slot) else {
                    return broken(format!("slot {slot} is queued, but was never used"));
                };
                let fits = match entry.state {
                    State::DrainingStore => !loads,
                    State::DrainingLoads { reads } => loads && reads > 0,
                    _ => false,
                };
                let same = |queue: &VecDeque<u32>| queue.iter().filter(|&&other| other == slot).count();
                if !fits || entry.key != *key || same(&of_key.stores) + same(&of_key.loads) != 1 {
                    return broken(format!("slot {slot} is queued under {key:?}, but is {entry:?} or queued twice"));
                }
            }
        }
        if queued != slots.counts().draining {
            return broken(format!("{queued} slots are queued, {} are draining", slots.counts().draining));
        }
        Ok(())
    }

    /// Feeds the place of a draining slot in its queue into a hasher.
    pub(super) fn hash_place(&self, key: &Key, slot: u32, into: &mut DefaultHasher) {
        let place = |queue: &VecDeque<u32>| queue.iter().position(|&other| other == slot);
        self.keys.get(key).map(|of_key| (place(&of_key.stores), place(&of_key.loads))).hash(into);
    }
}
