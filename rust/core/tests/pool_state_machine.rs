//! The block pool against a plain model, operation by operation, over random sequences.

#[path = "plain/pool.rs"]
mod pool;

use lockstep_kv_core::pool::Key;
use lockstep_kv_core::{BlockId, BlockPool};
use pool::{Kind, PlainPool, assert_same, ids, numbers, unless};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

/// Block numbers beyond the pool come up as well.
#[derive(Clone, Debug)]
enum Op {
    Take(u64),
    AddRef(Vec<u32>),
    Release(Vec<u32>),
    /// Gives back the references of these held blocks: how many are held, and which of them.
    ReleaseHeld(Vec<prop::sample::Index>),
    Publish(u32, u8),
    PublishHeld(prop::sample::Index, u8),
    Evict(Vec<u32>),
    Reset,
    ReleaseAll,
}

fn block() -> impl Strategy<Value = u32> {
    prop_oneof![10 => 0..12_u32, 1 => Just(u32::MAX), 1 => Just(1 << 27)]
}

fn op() -> impl Strategy<Value = Op> {
    let count = prop_oneof![12 => 0..6_u64, 1 => Just(u64::MAX), 1 => Just(1 << 32)];
    let some = || vec(any::<prop::sample::Index>(), 1..6);
    prop_oneof![
        5 => count.prop_map(Op::Take),
        3 => vec(block(), 0..4).prop_map(Op::AddRef),
        2 => vec(block(), 0..4).prop_map(Op::Release),
        5 => some().prop_map(Op::ReleaseHeld),
        1 => (block(), 0..9_u8).prop_map(|(block, key)| Op::Publish(block, key)),
        6 => (any::<prop::sample::Index>(), 0..9_u8).prop_map(|(block, key)| Op::PublishHeld(block, key)),
        1 => vec(block(), 0..3).prop_map(Op::Evict),
        1 => Just(Op::Reset),
        1 => Just(Op::ReleaseAll),
    ]
}

/// Keys of all lengths, equal at the front.
fn key(number: u8) -> Key {
    let length = [1, 2, 16, 20, 32, 36, 39, 40, 40][usize::from(number)];
    let mut bytes = vec![0; length];
    bytes[length - 1] = number;
    Key::new(&bytes).expect("in range")
}

struct Pair {
    core: BlockPool,
    plain: PlainPool<u8>,
    caching: bool,
}

impl Pair {
    fn held(&self) -> Vec<u32> {
        let refs = (0_u32..).zip(&self.plain.refs);
        refs.flat_map(|(block, &refs)| std::iter::repeat_n(block, refs as usize)).collect()
    }

    /// Distinct references to held blocks.
    fn pick(&self, which: &[prop::sample::Index]) -> Vec<u32> {
        let mut held = self.held();
        let mut picked = Vec::new();
        for index in which {
            if !held.is_empty() {
                picked.push(held.remove(index.index(held.len())));
            }
        }
        picked
    }

    fn publish(&mut self, block: u32, number: u8) {
        let before = self.core.state_digest();
        let got = self.core.publish(BlockId(block), key(number));
        let refused = !self.caching || !self.plain.is_real(block) || self.plain.refs[block as usize] == 0;
        let expected = unless(if refused { vec![Kind::Config] } else { vec![] });
        if assert_same(got, expected, (before, self.core.state_digest())).is_some() {
            self.plain.insert(number, block);
        }
    }

    fn release(&mut self, blocks: &[u32]) {
        let before = self.core.state_digest();
        let got = self.core.release(&ids(blocks));
        assert_same(got, self.plain.release(blocks), (before, self.core.state_digest()));
    }

    fn carry_out(&mut self, op: &Op) {
        let before = self.core.state_digest();
        match op {
            Op::Take(count) => {
                let got = self.core.take(usize::try_from(*count).unwrap_or(usize::MAX));
                let got = got.map(|blocks| numbers(&blocks));
                assert_same(got, self.plain.take(*count), (before, self.core.state_digest()));
            }
            Op::AddRef(blocks) => {
                let got = self.core.add_ref(&ids(blocks));
                assert_same(got, self.plain.add_ref(blocks), (before, self.core.state_digest()));
            }
            Op::Release(blocks) => self.release(blocks),
            Op::ReleaseHeld(which) => self.release(&self.pick(which)),
            Op::Publish(block, number) => self.publish(*block, *number),
            Op::PublishHeld(which, number) => {
                let held = self.held();
                if !held.is_empty() {
                    self.publish(*which.get(&held), *number);
                }
            }
            Op::Evict(blocks) => {
                let got = self.core.evict(&ids(blocks));
                assert_same(got, self.plain.evict(blocks), (before, self.core.state_digest()));
            }
            Op::Reset => {
                let done = self.core.reset();
                assert_eq!(done, self.plain.reset());
                assert!(done || before == self.core.state_digest());
            }
            Op::ReleaseAll => self.release(&self.held()),
        }
        self.compare();
    }

    /// Everything that can be observed is equal.
    fn compare(&self) {
        let Self { core, plain, .. } = self;
        core.audit().expect("sound");
        assert_eq!(numbers(&core.free_order()), plain.queue);
        assert_eq!(core.num_free_blocks(), plain.queue.len());
        assert_eq!(core.num_held_blocks(), plain.held());
        assert_eq!(core.num_keys(), plain.entries.len());
        for block in 0..core.num_blocks() {
            let id = u32::try_from(block).expect("small");
            assert_eq!(core.ref_count(BlockId(id)).expect("exists"), plain.refs[block]);
            let keys: Vec<Key> = plain.keys_of(id).into_iter().map(key).collect();
            assert_eq!(core.keys_of(BlockId(id)).expect("exists"), keys);
        }
        for number in 0..9 {
            assert_eq!(core.lookup(&key(number)).map(|block| block.0), plain.lookup(&number));
        }
        let stats = core.stats();
        let expected = (plain.taken, plain.evicted, plain.published, plain.peak_held);
        assert_eq!((stats.taken, stats.evicted, stats.published, stats.peak_held), expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 40 * ProptestConfig::default().cases,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_pool_does_what_the_plain_model_does(
        num_blocks in prop_oneof![1 => Just(1_u32), 1 => Just(2), 6 => 3..11_u32],
        caching in prop::bool::weighted(0.9),
        ops in vec(op(), 0..120),
    ) {
        let core = BlockPool::new(num_blocks, caching).expect("valid");
        let mut pair = Pair { core, plain: PlainPool::new(num_blocks), caching };
        pair.compare();
        for op in &ops {
            pair.carry_out(op);
        }
        pair.carry_out(&Op::ReleaseAll);
        assert_eq!(pair.core.num_free_blocks(), num_blocks as usize - 1);
        assert_eq!(pair.core.num_held_blocks(), 0);
    }
}
