//! The index of a host tier as the specification tells it: lists of keys, and one list of transfers per kind in the
//! order in which they were prepared. Everything is found by looking at all of it.

use lockstep_kv_core::offload::{Lookup, OffloadStats, Policy};

/// Why an operation is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    Config,
    DoubleComplete,
}

/// Keys, slots and evicted keys of a plan.
pub(crate) type PlainPlan = (Vec<u8>, Vec<u32>, Vec<u8>);

/// A transfer in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Transfer {
    key: u8,
    slot: u32,
    /// Of a store: the key was a ghost.
    ghost: bool,
    /// Its key was not forgotten since.
    live: bool,
}

/// All lists are oldest first. For LRU, `t1` holds all ready keys and the others stay empty.
#[derive(Clone, Debug)]
pub(crate) struct PlainIndex {
    policy: Policy,
    num_slots: usize,
    /// Free slots, the next to be taken first.
    free: Vec<u32>,
    ready: Vec<(u8, u32)>,
    stores: Vec<Transfer>,
    loads: Vec<Transfer>,
    t1: Vec<u8>,
    t2: Vec<u8>,
    b1: Vec<u8>,
    b2: Vec<u8>,
    target: usize,
    counters: OffloadStats,
}

fn times(keys: &[u8], key: u8) -> usize {
    keys.iter().map(|&other| usize::from(other == key)).sum()
}

impl PlainIndex {
    pub(crate) fn new(num_slots: u32, policy: Policy) -> Self {
        Self {
            policy,
            num_slots: num_slots as usize,
            free: (0..num_slots).collect(),
            ready: vec![],
            stores: vec![],
            loads: vec![],
            t1: vec![],
            t2: vec![],
            b1: vec![],
            b2: vec![],
            target: 0,
            counters: OffloadStats::default(),
        }
    }

    pub(crate) fn lookup(&self, key: u8) -> Lookup {
        if self.ready.iter().any(|entry| entry.0 == key) {
            Lookup::Hit
        } else if self.stores.iter().any(|store| store.key == key && store.live) {
            Lookup::Pending
        } else {
            Lookup::Miss
        }
    }

    pub(crate) fn num_keys(&self) -> usize {
        self.ready.len() + self.stores.iter().filter(|store| store.live).count()
    }

    /// The keys of all stores in flight.
    pub(crate) fn storing(&self) -> Vec<u8> {
        self.stores.iter().map(|store| store.key).collect()
    }

    /// The keys of all loads in flight.
    pub(crate) fn loading(&self) -> Vec<u8> {
        self.loads.iter().map(|load| load.key).collect()
    }

    /// The keys that can be loaded.
    pub(crate) fn hits(&self) -> Vec<u8> {
        self.ready.iter().map(|entry| entry.0).collect()
    }

    fn is_read(&self, key: u8) -> bool {
        self.loads.iter().any(|load| load.key == key && load.live)
    }

    pub(crate) fn stats(&self) -> OffloadStats {
        let mut draining: Vec<u32> = self.loads.iter().filter(|load| !load.live).map(|load| load.slot).collect();
        draining.sort_unstable();
        draining.dedup();
        let reading = self.ready.iter().filter(|entry| self.is_read(entry.0)).count();
        let writing = self.stores.iter().filter(|store| store.live).count();
        OffloadStats {
            free_slots: self.free.len(),
            writing_slots: writing,
            idle_slots: self.ready.len() - reading,
            reading_slots: reading,
            draining_slots: draining.len() + self.stores.len() - writing,
            ..self.counters
        }
    }

    /// A key is about to be stored. Whether it was in B1, and in B2.
    fn recall(&mut self, key: u8) -> (bool, bool) {
        let (in_b1, in_b2) = (self.b1.contains(&key), self.b2.contains(&key));
        let (b1, b2) = (self.b1.len(), self.b2.len());
        if in_b1 {
            self.target = self.num_slots.min(self.target + if b1 >= b2 { 1 } else { b2 / b1 });
        }
        if in_b2 {
            self.target = self.target.saturating_sub(if b2 >= b1 { 1 } else { b1 / b2 });
        }
        self.b1.retain(|&other| other != key);
        self.b2.retain(|&other| other != key);
        (in_b1, in_b2)
    }

    fn evict(&mut self, in_b2: bool, given: &[u8]) -> Option<(u8, u32)> {
        let goes = |key: &&u8| !given.contains(key) && !self.is_read(**key);
        let (from_t1, from_t2) = (self.t1.iter().find(goes).copied(), self.t2.iter().find(goes).copied());
        let prefer_t1 = self.t1.len() > self.target || (in_b2 && self.t1.len() == self.target);
        let key = if prefer_t1 { from_t1.or(from_t2) } else { from_t2.or(from_t1) }?;
        if self.policy == Policy::Arc {
            let ghosts = if self.t1.contains(&key) { &mut self.b1 } else { &mut self.b2 };
            ghosts.push(key);
        }
        self.t1.retain(|&other| other != key);
        self.t2.retain(|&other| other != key);
        let at = self.ready.iter().position(|entry| entry.0 == key)?;
        Some(self.ready.remove(at))
    }

    pub(crate) fn prepare_store(&mut self, keys: &[u8]) -> Option<PlainPlan> {
        let before = self.clone();
        let (mut new, mut slots, mut evicted) = (vec![], vec![], vec![]);
        for &key in keys {
            if before.lookup(key) != Lookup::Miss || new.contains(&key) {
                continue;
            }
            let (in_b1, in_b2) = self.recall(key);
            let slot = if self.free.is_empty() {
                let Some((gone, slot)) = self.evict(in_b2, keys) else {
                    *self = before;
                    return None;
                };
                evicted.push(gone);
                slot
            } else {
                self.free.remove(0)
            };
            new.push(key);
            slots.push(slot);
            self.stores.push(Transfer { key, slot, ghost: in_b1 || in_b2, live: true });
        }
        self.counters.evicted += evicted.len() as u64;
        Some((new, slots, evicted))
    }

    pub(crate) fn complete_store(&mut self, keys: &[u8], success: bool) -> Result<(), Vec<Why>> {
        let storing = self.storing();
        let reasons: Vec<Why> = keys
            .iter()
            .filter_map(|&key| match (times(keys, key), times(&storing, key)) {
                (asked, held) if asked > held => Some(Why::DoubleComplete),
                (1, _) => None,
                _ => Some(Why::Config),
            })
            .collect();
        if !reasons.is_empty() {
            return Err(reasons);
        }
        for &key in keys.iter().rev() {
            let at = self.stores.iter().position(|store| store.key == key).expect("in flight");
            let Transfer { slot, ghost, live, .. } = self.stores.remove(at);
            match (live, success) {
                (true, true) => {
                    self.counters.stored += 1;
                    self.ready.push((key, slot));
                    self.admit(key, ghost);
                }
                (true, false) => self.counters.failed_stores += 1,
                (false, _) => self.counters.dropped_stores += 1,
            }
            if !(live && success) {
                self.free.insert(0, slot);
            }
        }
        Ok(())
    }

    fn admit(&mut self, key: u8, ghost: bool) {
        if ghost {
            self.t2.push(key);
        } else {
            self.t1.push(key);
        }
        while self.t1.len() + self.b1.len() > self.num_slots {
            self.b1.remove(0);
        }
        while self.t1.len() + self.t2.len() + self.b1.len() + self.b2.len() > 2 * self.num_slots {
            self.b2.remove(0);
        }
    }

    pub(crate) fn prepare_load(&mut self, keys: &[u8]) -> Result<Vec<u32>, Vec<Why>> {
        let slot_of = |key: &u8| self.ready.iter().find(|entry| entry.0 == *key).map(|entry| entry.1);
        let Some(slots) = keys.iter().map(slot_of).collect::<Option<Vec<u32>>>() else {
            return Err(vec![Why::Config]);
        };
        for (&key, &slot) in keys.iter().zip(&slots) {
            self.loads.push(Transfer { key, slot, ghost: false, live: true });
        }
        self.counters.loads += keys.len() as u64;
        self.touch(keys);
        Ok(slots)
    }

    pub(crate) fn complete_load(&mut self, keys: &[u8]) -> Result<(), Vec<Why>> {
        let loading = self.loading();
        if keys.iter().any(|&key| times(keys, key) > times(&loading, key)) {
            return Err(vec![Why::DoubleComplete]);
        }
        for &key in keys {
            let at = self.loads.iter().position(|load| load.key == key).expect("in flight");
            let Transfer { slot, live, .. } = self.loads.remove(at);
            if !live && self.loads.iter().all(|load| load.slot != slot) {
                self.free.insert(0, slot);
            }
        }
        Ok(())
    }

    pub(crate) fn touch(&mut self, keys: &[u8]) {
        for &key in keys.iter().rev().filter(|&&key| self.lookup(key) == Lookup::Hit).collect::<Vec<_>>() {
            self.t1.retain(|&other| other != key);
            self.t2.retain(|&other| other != key);
            match self.policy {
                Policy::Lru => self.t1.push(key),
                Policy::Arc => self.t2.push(key),
            }
        }
    }

    pub(crate) fn reset(&mut self) {
        let idle = self.ready.iter().filter(|entry| !self.is_read(entry.0)).map(|entry| entry.1);
        let idle: Vec<u32> = idle.collect();
        self.free.extend(idle);
        self.free.sort_unstable();
        self.ready.clear();
        for transfer in self.stores.iter_mut().chain(&mut self.loads) {
            transfer.live = false;
        }
        for list in [&mut self.t1, &mut self.t2, &mut self.b1, &mut self.b2] {
            list.clear();
        }
        self.target = 0;
    }
}
