//! Windows and chunks beside full attention: whatever requests do, what they still need is held and what a lookup finds is
//! what was published, as physical content tells.
//!
//! There is no second allocator here. Each block's content is written down when it is computed, and compared when it is
//! found again.

use std::collections::BTreeMap;

use lockstep_kv_core::coordinator::Publication;
use lockstep_kv_core::{AllocateRequest, BlockId, Coordinator, CoordinatorConfig, GroupId, GroupKind, GroupSpec};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

#[derive(Clone, Debug)]
enum Op {
    Start { family: u8, tokens: u64, external: u64 },
    Grow { which: prop::sample::Index, by: u64 },
    End { which: prop::sample::Index },
    Evict { block: u32 },
    Reset,
}

fn operations() -> impl Strategy<Value = Vec<Op>> {
    let start = (0..3_u8, 1..120_u64, prop::sample::select(vec![0, 0, 0, 9]));
    let op = prop_oneof![
        4 => start.prop_map(|(family, tokens, external)| Op::Start { family, tokens, external }),
        6 => (any::<prop::sample::Index>(), 1..20_u64).prop_map(|(which, by)| Op::Grow { which, by }),
        3 => any::<prop::sample::Index>().prop_map(|which| Op::End { which }),
        1 => (1..60_u32).prop_map(|block| Op::Evict { block }),
        1 => Just(Op::Reset),
    ];
    vec(op, 10..80)
}

fn group() -> impl Strategy<Value = GroupSpec> {
    let block_size = || prop::sample::select(vec![2_u32, 4, 8]);
    prop_oneof![
        block_size().prop_map(|size| GroupSpec::new(GroupKind::Full, size, vec![])),
        (block_size(), 1..40_u32).prop_map(|(size, window)| GroupSpec {
            sliding_window: Some(window),
            ..GroupSpec::new(GroupKind::SlidingWindow, size, vec![])
        }),
    ]
}

fn config() -> impl Strategy<Value = CoordinatorConfig> {
    let windows = vec(group(), 1..4);
    let chunks = (prop::sample::select(vec![2_u32, 4, 8]), 1..5_u32).prop_map(|(size, blocks)| {
        let chunked = GroupSpec {
            attention_chunk_size: Some(size * blocks),
            ..GroupSpec::new(GroupKind::ChunkedLocal, size, vec![])
        };
        vec![GroupSpec::new(GroupKind::Full, size, vec![]), chunked]
    });
    let groups = prop_oneof![3 => windows, 1 => chunks];
    (groups, 8..90_u32, prop::sample::select(vec![None, Some(0)])).prop_map(|(groups, blocks, retention_interval)| {
        CoordinatorConfig { retention_interval, ..CoordinatorConfig::new(groups, blocks, 4096) }
    })
}

/// The hash of a family's tokens up to this many: families share their first 16 tokens.
fn hash(family: u8, tokens: u64) -> [u8; 32] {
    let mut hash = [if tokens <= 16 { 0 } else { family }; 32];
    hash[..8].copy_from_slice(&tokens.to_le_bytes());
    hash
}

struct Life {
    core: Coordinator,
    hash_tokens: u64,
    spans: Vec<u64>,
    /// Per running request: its family and its computed tokens.
    running: BTreeMap<String, (u8, u64)>,
    /// Per block: the prefix that its content ends.
    content: BTreeMap<BlockId, [u8; 32]>,
    born: usize,
}

impl Life {
    fn new(config: &CoordinatorConfig) -> Self {
        let core = Coordinator::new(config.clone()).expect("valid");
        let spans = core.sets().iter().map(|set| set.tokens_per_block).collect();
        Self {
            hash_tokens: core.hash_block_tokens(),
            core,
            spans,
            running: BTreeMap::new(),
            content: BTreeMap::new(),
            born: 0,
        }
    }

    fn hashes(&self, family: u8, tokens: u64) -> Vec<[u8; 32]> {
        (1..=tokens / self.hash_tokens).map(|count| hash(family, count * self.hash_tokens)).collect()
    }

    fn row(&self, name: &str, set: usize) -> Vec<BlockId> {
        let group = self.core.sets()[set].group_ids[0];
        self.core.block_ids(name, group).expect("running").to_vec()
    }

    /// The group's tokens that the next token does not see.
    fn skipped(&self, set: usize, computed: u64) -> u64 {
        let group = &self.core.config().groups[self.core.sets()[set].group_ids[0].0 as usize];
        match (group.sliding_window, group.attention_chunk_size) {
            (Some(window), _) => (computed + 1).saturating_sub(u64::from(window)),
            (_, Some(chunk)) => computed / u64::from(chunk) * u64::from(chunk),
            _ => 0,
        }
    }

    /// The blocks from token `from` on hold the family's content now, up to `to`, and are published.
    fn compute(&mut self, name: &str, family: u8, from: u64, to: u64) {
        for set in 0..self.spans.len() {
            for (at, &block) in (0_u64..).zip(&self.row(name, set)) {
                let (start, end) = (at * self.spans[set], (at + 1) * self.spans[set]);
                if end > from && start < to && block != BlockId::NULL {
                    self.content.insert(block, hash(family, end));
                }
            }
        }
        let hashes = self.hashes(family, to);
        self.core.cache(name, hashes.as_slice(), &Publication::new(to, Some(to))).expect("enough hashes");
    }

    fn start(&mut self, family: u8, tokens: u64, external: u64) {
        let name = format!("r{}", self.born);
        self.born += 1;
        let hashes = self.hashes(family, tokens);
        let hit = self.core.find_longest_hit(hashes.as_slice(), tokens - 1).expect("hashes");
        for set in 0..self.spans.len() {
            let row = hit.block_ids(self.core.sets()[set].group_ids[0]);
            assert_eq!(row.len() as u64, hit.num_tokens() / self.spans[set]);
            for (at, &block) in (0_u64..).zip(row) {
                let end = (at + 1) * self.spans[set];
                if end > self.skipped(set, hit.num_tokens()) {
                    assert_ne!(block, BlockId::NULL, "a hit lacks a block that is needed");
                    assert_eq!(self.content[&block], hash(family, end), "a hit names other content");
                }
            }
        }
        let external = external.min(tokens - 1 - hit.num_tokens());
        let ask =
            AllocateRequest { hit: Some(&hit), num_external_tokens: external, ..AllocateRequest::new(&name, tokens) };
        if self.core.allocate(&ask).expect("valid").is_some() {
            self.running.insert(name.clone(), (family, tokens));
            self.compute(&name, family, hit.num_tokens(), tokens);
        }
    }

    fn grow(&mut self, name: &str, by: u64) {
        let (family, computed) = self.running[name];
        let tokens = computed + by;
        let ask = AllocateRequest { processed_tokens: computed, ..AllocateRequest::new(name, tokens) };
        if self.core.allocate(&ask).expect("valid").is_some() {
            self.running.insert(name.into(), (family, tokens));
            self.compute(name, family, computed, tokens);
        }
    }

    fn pick(&self, which: prop::sample::Index) -> Option<String> {
        self.running.keys().nth(which.index(self.running.len().max(1))).cloned()
    }

    fn carry_out(&mut self, op: &Op) {
        match *op {
            Op::Start { family, tokens, external } => self.start(family, tokens, external),
            Op::Grow { which, by } => {
                if let Some(name) = self.pick(which) {
                    self.grow(&name, by);
                }
            }
            Op::End { which } => {
                if let Some(name) = self.pick(which) {
                    self.running.remove(&name);
                    self.core.free(&name).expect("running");
                }
            }
            Op::Evict { block } => {
                let exists = (block as usize) < self.core.pool().num_blocks();
                assert_eq!(self.core.evict(&[BlockId(block)]).is_ok(), exists);
            }
            Op::Reset => assert_eq!(self.core.reset_prefix_cache(), self.core.pool().num_held_blocks() == 0),
        }
        self.check();
    }

    /// The books balance, and each request holds what it still needs, with its own content.
    fn check(&self) {
        self.core.audit().expect("sound");
        for (name, &(family, tokens)) in &self.running {
            for set in 0..self.spans.len() {
                let row = self.row(name, set);
                assert!(row.len() as u64 >= tokens.div_ceil(self.spans[set]));
                for (at, block) in (0_u64..).zip(&row) {
                    let end = (at + 1) * self.spans[set];
                    if end > self.skipped(set, tokens) {
                        assert_ne!(*block, BlockId::NULL, "{name} lacks a block that it needs");
                        assert_eq!(self.content[block], hash(family, end), "{name} holds other content");
                    }
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 8 * ProptestConfig::default().cases,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn what_is_needed_is_held_and_what_is_found_was_published(config in config(), operations in operations()) {
        let mut life = Life::new(&config);
        for op in &operations {
            life.carry_out(op);
        }
        for name in life.running.keys().cloned().collect::<Vec<_>>() {
            life.running.remove(&name);
            life.core.free(&name).expect("running");
            life.check();
        }
        prop_assert_eq!(life.core.pool().num_held_blocks(), 0);
        prop_assert_eq!(life.core.pool().num_free_blocks(), life.core.pool().num_blocks() - 1);
        prop_assert!(life.core.block_ids("r0", GroupId(0)).is_err());
    }
}
