//! The index of a host tier against a plain model, operation by operation, over random sequences, for both policies.
//!
//! Plans are compared whole, so the order of eviction and the order in which slots are taken are as well.

#[path = "plain/offload.rs"]
mod offload;

use std::fmt::Debug;

use lockstep_kv_core::offload::{OffloadIndex, Policy};
use lockstep_kv_core::pool::Key;
use lockstep_kv_core::{Error, Result};
use offload::{PlainIndex, Why};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::FileFailurePersistence;

const NUM_KEYS: u8 = 14;

#[derive(Clone, Debug)]
enum Op {
    /// Any keys, in any state.
    PrepareStore(Vec<u8>),
    CompleteStore(Vec<u8>, bool),
    PrepareLoad(Vec<u8>),
    CompleteLoad(Vec<u8>),
    Touch(Vec<u8>),
    /// Keys for which the operation is in order.
    CompleteStores(Vec<Index>, bool),
    LoadHits(Vec<Index>),
    CompleteLoads(Vec<Index>),
    /// Prepares and completes one store after the other.
    Store(Vec<u8>),
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    let keys = |most| vec(0..NUM_KEYS, 0..=most);
    let some = || vec(any::<Index>(), 1..5);
    prop_oneof![
        6 => keys(5).prop_map(Op::PrepareStore),
        1 => (keys(2), any::<bool>()).prop_map(|(keys, success)| Op::CompleteStore(keys, success)),
        1 => keys(2).prop_map(Op::PrepareLoad),
        1 => keys(2).prop_map(Op::CompleteLoad),
        3 => keys(4).prop_map(Op::Touch),
        6 => (some(), prop::bool::weighted(0.85)).prop_map(|(which, success)| Op::CompleteStores(which, success)),
        3 => some().prop_map(Op::LoadHits),
        4 => some().prop_map(Op::CompleteLoads),
        6 => keys(6).prop_map(Op::Store),
        1 => Just(Op::Reset),
    ]
}

/// Keys of all lengths, equal at the front.
fn key(number: u8) -> Key {
    let mut bytes = vec![0; [1, 2, 8, 16, 20, 31, 32, 33, 36, 38, 39, 40, 40, 40][usize::from(number)]];
    if let Some(last) = bytes.last_mut() {
        *last = number;
    }
    Key::new(&bytes).expect("in range")
}

fn keys(numbers: &[u8]) -> Vec<Key> {
    numbers.iter().copied().map(key).collect()
}

struct Pair {
    core: OffloadIndex,
    plain: PlainIndex,
}

impl Pair {
    /// Both end alike, and a refusal changes nothing.
    fn both<T: PartialEq + Debug>(
        &mut self,
        core: impl FnOnce(&mut OffloadIndex) -> Result<T>,
        plain: impl FnOnce(&mut PlainIndex) -> std::result::Result<T, Vec<Why>>,
    ) {
        let before = self.core.state_digest();
        match (core(&mut self.core), plain(&mut self.plain)) {
            (Ok(got), Ok(expected)) => assert_eq!(got, expected),
            (Err(error), Err(reasons)) => {
                let why = match error {
                    Error::Config(_) => Why::Config,
                    Error::DoubleComplete { .. } => Why::DoubleComplete,
                    other => panic!("another kind of error: {other:?}"),
                };
                assert!(reasons.contains(&why), "{why:?} is not among {reasons:?}");
                assert_eq!(self.core.state_digest(), before, "refused, but changed");
            }
            (got, expected) => panic!("got {got:?}, expected {expected:?}"),
        }
    }

    fn prepare_store(&mut self, numbers: &[u8]) -> Vec<u8> {
        let before = self.core.state_digest();
        let got = self.core.prepare_store(&keys(numbers));
        let expected = self.plain.prepare_store(numbers);
        assert!(got.is_some() || self.core.state_digest() == before, "no plan, but changed");
        let stored = expected.as_ref().map(|plan| plan.0.clone()).unwrap_or_default();
        let got = got.map(|plan| (plan.keys, plan.slots, plan.evicted));
        assert_eq!(got, expected.map(|(stored, slots, evicted)| (keys(&stored), slots, keys(&evicted))));
        stored
    }

    fn complete_store(&mut self, numbers: &[u8], success: bool) {
        self.both(|core| core.complete_store(&keys(numbers), success), |plain| plain.complete_store(numbers, success));
    }

    fn prepare_load(&mut self, numbers: &[u8]) {
        self.both(|core| core.prepare_load(&keys(numbers)), |plain| plain.prepare_load(numbers));
    }

    fn complete_load(&mut self, numbers: &[u8]) {
        self.both(|core| core.complete_load(&keys(numbers)), |plain| plain.complete_load(numbers));
    }

    fn carry_out(&mut self, op: &Op) {
        match op {
            Op::PrepareStore(numbers) => drop(self.prepare_store(numbers)),
            Op::CompleteStore(numbers, success) => self.complete_store(numbers, *success),
            Op::PrepareLoad(numbers) => self.prepare_load(numbers),
            Op::CompleteLoad(numbers) => self.complete_load(numbers),
            Op::Touch(numbers) => {
                self.core.touch(&keys(numbers));
                self.plain.touch(numbers);
            }
            Op::CompleteStores(which, success) => {
                let mut picked = pick(self.plain.storing(), which);
                // One call completes one store of a key.
                let mut seen = vec![];
                picked.retain(|&number| !seen.contains(&number) && (seen.push(number), true).1);
                self.complete_store(&picked, *success);
            }
            Op::LoadHits(which) => {
                let hits = self.plain.hits();
                let picked = which.iter().filter(|_| !hits.is_empty()).map(|index| *index.get(&hits));
                self.prepare_load(&picked.collect::<Vec<_>>());
            }
            Op::CompleteLoads(which) => self.complete_load(&pick(self.plain.loading(), which)),
            Op::Store(numbers) => {
                for number in numbers {
                    let stored = self.prepare_store(&[*number]);
                    self.complete_store(&stored, true);
                }
            }
            Op::Reset => {
                self.core.reset();
                self.plain.reset();
            }
        }
        self.compare();
    }

    /// Everything that can be observed is equal.
    fn compare(&self) {
        let Self { core, plain } = self;
        core.audit().expect("sound");
        for number in 0..NUM_KEYS {
            assert_eq!(core.lookup(&key(number)), plain.lookup(number), "key {number}");
        }
        assert_eq!(core.num_keys(), plain.num_keys());
        assert_eq!(core.stats(), plain.stats());
        assert_eq!(core.num_free_slots(), plain.stats().free_slots);
        assert_eq!(core.state_digest(), core.clone().state_digest());
    }
}

/// Some of these, each at most once.
fn pick(mut from: Vec<u8>, which: &[Index]) -> Vec<u8> {
    let mut picked = vec![];
    for index in which {
        if !from.is_empty() {
            picked.push(from.remove(index.index(from.len())));
        }
    }
    picked
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 40 * ProptestConfig::default().cases,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_offload_index_does_what_the_plain_model_does(
        num_slots in prop_oneof![1 => Just(1_u32), 1 => Just(2), 6 => 3..8_u32],
        adaptive in any::<bool>(),
        ops in vec(op(), 0..120),
    ) {
        let policy = if adaptive { Policy::Arc } else { Policy::Lru };
        let core = OffloadIndex::new(num_slots, policy).expect("valid");
        let new = core.state_digest();
        let mut pair = Pair { core, plain: PlainIndex::new(num_slots, policy) };
        pair.compare();
        for op in &ops {
            pair.carry_out(op);
        }

        // Whatever happened: when all transfers are complete, a reset frees every slot.
        while let Some(number) = pair.plain.storing().first().copied() {
            pair.complete_store(&[number], true);
        }
        pair.complete_load(&pair.plain.loading());
        pair.compare();
        assert_eq!(pair.core.stats().draining_slots, 0);
        pair.carry_out(&Op::Reset);
        assert_eq!(pair.core.num_free_slots(), num_slots as usize);
        assert_eq!(pair.core.state_digest(), new);
    }
}
