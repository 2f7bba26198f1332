//! The index itself. See the module [`offload`](crate::offload) for the states of keys and slots.

use std::hash::{DefaultHasher, Hasher};

use hashbrown::HashMap;

use crate::error::{Error, Result};
use crate::offload::MAX_SLOTS;
use crate::offload::answers::{Lookup, OffloadStats, StorePlan, hex};
use crate::offload::draining::Draining;
use crate::offload::policy::{Order, Policy, Recall};
use crate::offload::slots::{Slots, State};
use crate::pool::Key;

/// Room for so many keys of a call is kept for the next one.
const KEPT_ROOM: usize = 1024;

/// The index of a tier.
#[derive(Clone, Debug)]
pub struct OffloadIndex {
    pub(super) slots: Slots,
    /// The slot of each key that is present.
    pub(super) index: HashMap<Key, u32>,
    pub(super) draining: Draining,
    pub(super) order: Order,
    stats: OffloadStats,
    /// The distinct keys of the current call and how often each has come up. Empty between calls, kept for its memory.
    given: HashMap<Key, usize>,
}

impl OffloadIndex {
    /// An empty index of `num_slots` slots.
    ///
    /// # Errors
    /// [`Error::Config`] if `num_slots` is 0, more than [`MAX_SLOTS`], or more than there is memory for.
    pub fn new(num_slots: u32, policy: Policy) -> Result<Self> {
        if num_slots == 0 || num_slots > MAX_SLOTS {
            return Err(Error::config(format!("num_slots must be between 1 and {MAX_SLOTS}, got {num_slots}")));
        }
        let mut index = HashMap::new();
        index
            .try_reserve(num_slots as usize)
            .map_err(|_| Error::config(format!("not enough memory for an index of {num_slots} slots")))?;
        Ok(Self {
            slots: Slots::new(num_slots)?,
            index,
            draining: Draining::default(),
            order: Order::new(policy, num_slots)?,
            stats: OffloadStats::default(),
            given: HashMap::new(),
        })
    }

    /// All slots.
    pub fn num_slots(&self) -> usize {
        self.slots.num_slots() as usize
    }

    /// Slots not in use.
    #[inline]
    pub fn num_free_slots(&self) -> usize {
        self.slots.num_free()
    }

    /// Keys present, being written or ready.
    pub fn num_keys(&self) -> usize {
        self.index.len()
    }

    /// How keys to evict are chosen.
    pub fn policy(&self) -> Policy {
        self.order.policy()
    }

    /// What the index has done so far, and what its slots are used for.
    pub fn stats(&self) -> OffloadStats {
        let counts = self.slots.counts();
        OffloadStats {
            free_slots: self.slots.num_free(),
            writing_slots: counts.writing,
            idle_slots: counts.idle,
            reading_slots: counts.reading,
            draining_slots: counts.draining,
            ..self.stats
        }
    }

    /// Whether the key is present. Not a use: the order of eviction stays as it is.
    #[inline]
    pub fn lookup(&self, key: &Key) -> Lookup {
        match self.slot_of(key) {
            None => Lookup::Miss,
            Some((_, State::Ready { .. })) => Lookup::Hit,
            Some(_) => Lookup::Pending,
        }
    }

    #[inline]
    fn slot_of(&self, key: &Key) -> Option<(u32, State)> {
        self.index.get(key).map(|&slot| (slot, self.slots.get(slot).state))
    }

    /// The slot of a ready key, and the loads in flight from it.
    #[inline]
    fn ready_slot_of(&self, key: &Key) -> Option<(u32, u32)> {
        match self.slot_of(key) {
            Some((slot, State::Ready { reads })) => Some((slot, reads)),
            _ => None,
        }
    }

    /// Plans a store of those of the keys that are not present: gives each a slot, free ones first, then those of
    /// evicted keys. A repeated key counts once, where it first comes up. No key of the call is evicted for another.
    ///
    /// Gives nothing, and changes nothing, if there are not enough slots even so.
    pub fn prepare_store(&mut self, keys: &[Key]) -> Option<StorePlan> {
        let mut given = std::mem::take(&mut self.given);
        let plan = self.plan_store(keys, &mut given);
        self.give_back(given);
        plan
    }

    fn plan_store(&mut self, keys: &[Key], given: &mut HashMap<Key, usize>) -> Option<StorePlan> {
        let mut plan = StorePlan::default();
        let mut spared = 0;
        for &key in keys {
            if given.insert(key, 1).is_none() {
                match self.slot_of(&key) {
                    None => plan.keys.push(key),
                    Some((_, State::Ready { reads: 0 })) => spared += 1,
                    Some(_) => {}
                }
            }
        }
        if plan.keys.len() > self.slots.num_free() + self.slots.counts().idle - spared {
            return None;
        }

        plan.slots.reserve_exact(plan.keys.len());
        let mut search = self.order.search();
        let Self { slots, index, order, stats, .. } = self;
        for &key in &plan.keys {
            let recall = order.recall(&key);
            let recalled = recall != Recall::Unknown;
            let slot = slots.take_free(key, recalled).or_else(|| {
                let (slot, evicted) = order.evict(&mut search, recall, |slot| {
                    let slot = slots.get(slot);
                    (slot.state == State::Ready { reads: 0 } && !given.contains_key(&slot.key)).then_some(slot.key)
                })?;
                index.remove(&evicted);
                plan.evicted.push(evicted);
                slots.reuse(slot, key, recalled);
                Some(slot)
            });
            // The test above has made sure that there is a slot for each.
            debug_assert!(slot.is_some(), "no slot for {key:?}");
            if let Some(slot) = slot {
                index.insert(key, slot);
                plan.slots.push(slot);
            }
        }
        stats.evicted += plan.evicted.len() as u64;
        Some(plan)
    }

    /// Keeps the memory of a map of keys for the next call.
    fn give_back(&mut self, mut given: HashMap<Key, usize>) {
        given.clear();
        // Clearing takes time in proportion to the room: after a call of very many keys most of it is given up.
        given.shrink_to(KEPT_ROOM);
        self.given = given;
    }

    /// Reports that a store of each key is complete. If it succeeded the keys are ready, the first of them most recent;
    /// if not they are forgotten and their slots are free. A key that was forgotten meanwhile only gives up its slot.
    ///
    /// # Errors
    /// [`Error::DoubleComplete`] if a key has no store in flight, or comes up more often than it has; [`Error::Config`]
    /// if it comes up twice although it has several.
    pub fn complete_store(&mut self, keys: &[Key], success: bool) -> Result<()> {
        let mut given = std::mem::take(&mut self.given);
        let checked = keys.iter().try_for_each(|key| {
            let repeated = given.insert(*key, 1).is_some();
            let held = self.num_stores_of(key);
            if held > 0 && !repeated {
                return Ok(());
            }
            let asked = keys.iter().filter(|&other| other == key).count();
            if held < asked {
                return Err(Error::DoubleComplete { key: hex(key), asked, held, what: "stores" });
            }
            Err(Error::config(format!(
                "key {} comes up {asked} times: one call completes one store of a key",
                hex(key)
            )))
        });
        self.give_back(given);
        checked?;
        for key in keys.iter().rev() {
            self.complete_one_store(key, success);
        }
        Ok(())
    }

    /// How many stores of the key are in flight.
    fn num_stores_of(&self, key: &Key) -> usize {
        let writing = matches!(self.slot_of(key), Some((_, State::Writing { .. })));
        self.draining.num_stores(key) + usize::from(writing)
    }

    fn complete_one_store(&mut self, key: &Key, success: bool) {
        if let Some(slot) = self.draining.pop_store(key) {
            self.slots.free(slot);
            self.stats.dropped_stores += 1;
        } else if let Some((slot, State::Writing { recalled })) = self.slot_of(key) {
            if success {
                self.slots.set(slot, State::Ready { reads: 0 });
                self.order.admit(slot, recalled);
                self.stats.stored += 1;
            } else {
                self.index.remove(key);
                self.slots.free(slot);
                self.stats.failed_stores += 1;
            }
        }
    }

    /// Plans a load of each key: its slot stays as it is until the load is complete. A key may be loaded several times
    /// at once. The keys become recent, the first of them most.
    ///
    /// # Errors
    /// [`Error::Config`] if a key is not ready, or has as many loads in flight as can be counted.
    pub fn prepare_load(&mut self, keys: &[Key]) -> Result<Vec<u32>> {
        let mut slots = Vec::with_capacity(keys.len());
        for key in keys {
            match self.slot_of(key) {
                Some((slot, State::Ready { reads })) if reads as usize <= u32::MAX as usize - keys.len() => {
                    slots.push(slot);
                }
                Some((_, State::Ready { .. })) => {
                    return Err(Error::config(format!("key {} has too many loads in flight to add more", hex(key))));
                }
                Some(_) => {
                    return Err(Error::config(format!("key {} cannot be loaded: it is being written", hex(key))));
                }
                None => return Err(Error::config(format!("key {} cannot be loaded: it is not stored", hex(key)))),
            }
        }
        for &slot in slots.iter().rev() {
            if let State::Ready { reads } = self.slots.get(slot).state {
                self.slots.set(slot, State::Ready { reads: reads + 1 });
                self.order.touch(slot);
            }
        }
        self.stats.loads += slots.len() as u64;
        Ok(slots)
    }

    /// Reports that one load per occurrence of a key is complete.
    ///
    /// # Errors
    /// [`Error::DoubleComplete`] if a key comes up more often than it has loads in flight.
    pub fn complete_load(&mut self, keys: &[Key]) -> Result<()> {
        let mut given = std::mem::take(&mut self.given);
        let checked = keys.iter().try_for_each(|key| {
            let times = given.entry(*key).or_insert(0);
            *times += 1;
            let held = self.num_loads_of(key);
            if *times <= held {
                return Ok(());
            }
            let asked = keys.iter().filter(|&other| other == key).count();
            Err(Error::DoubleComplete { key: hex(key), asked, held, what: "loads" })
        });
        self.give_back(given);
        checked?;
        for key in keys {
            self.complete_one_load(key);
        }
        Ok(())
    }

    /// How many loads of the key are in flight.
    fn num_loads_of(&self, key: &Key) -> usize {
        let drained = self.draining.loads(key).map(|slot| match self.slots.get(slot).state {
            State::DrainingLoads { reads } => reads as usize,
            _ => 0,
        });
        drained.sum::<usize>() + self.ready_slot_of(key).map_or(0, |(_, reads)| reads as usize)
    }

    fn complete_one_load(&mut self, key: &Key) {
        if let Some(slot) = self.draining.first_loads(key) {
            match self.slots.get(slot).state {
                State::DrainingLoads { reads } if reads > 1 => {
                    self.slots.set(slot, State::DrainingLoads { reads: reads - 1 });
                }
                _ => {
                    self.draining.pop_loads(key);
                    self.slots.free(slot);
                }
            }
        } else if let Some((slot, reads)) = self.ready_slot_of(key) {
            self.slots.set(slot, State::Ready { reads: reads.saturating_sub(1) });
        }
    }

    /// Makes the keys that are ready recent, the first of them most. Others are ignored.
    pub fn touch(&mut self, keys: &[Key]) {
        for key in keys.iter().rev() {
            if let Some((slot, _)) = self.ready_slot_of(key) {
                self.order.touch(slot);
            }
        }
    }

    /// Forgets all keys. Slots with transfers in flight stay in use until those are complete; the others are free, and
    /// will be taken in ascending order.
    pub fn reset(&mut self) {
        for (key, slot) in self.index.drain() {
            match self.slots.get(slot).state {
                State::Writing { .. } => {
                    self.draining.push_store(key, slot);
                    self.slots.set(slot, State::DrainingStore);
                }
                State::Ready { reads } if reads > 0 => {
                    self.draining.push_loads(key, slot);
                    self.slots.set(slot, State::DrainingLoads { reads });
                }
                _ => self.slots.set(slot, State::Free),
            }
        }
        self.slots.sort_free();
        self.order.clear();
    }

    /// A digest of the state that later calls can observe, counters aside: equal states of one build have equal digests.
    pub fn state_digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.slots.hash_state(&mut hasher);
        let draining = |state| matches!(state, State::DrainingStore | State::DrainingLoads { .. });
        for (at, slot) in self.slots.iter().filter(|(_, slot)| draining(slot.state)) {
            self.draining.hash_place(&slot.key, at, &mut hasher);
        }
        self.order.hash_state(&mut hasher);
        hasher.finish()
    }
}
