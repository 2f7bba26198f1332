//! Random configurations and operations.

use lockstep_kv_core::{CoordinatorConfig, GroupKind, GroupSpec, LayerSpec};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

/// The requests' names: few, so that names that run, ended or never were come up.
pub(crate) const NAMES: [&str; 6] = ["r0", "r1", "r2", "r3", "", "\u{fc}\0"];

/// Numbers that no pool is large enough for.
const HUGE: [u64; 6] = [1 << 31, 1 << 32, 1 << 40, 1 << 63, u64::MAX - 1, u64::MAX];

#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// Looks up, allocates, and publishes what is there.
    Start {
        name: usize,
        tokens: u64,
        lookahead: u64,
        external: u64,
        reserved: u64,
        publish: bool,
    },
    /// More tokens for a running request.
    Grow {
        which: Index,
        by: u64,
        lookahead: u64,
        reserved: u64,
        publish: bool,
    },
    /// Any numbers, and any hit that was ever found.
    Allocate {
        name: usize,
        tokens: u64,
        hit: Option<Index>,
        external: u64,
        reserved: u64,
    },
    /// A hit of another coordinator.
    Foreign {
        name: usize,
        tokens: u64,
    },
    /// Publishes with the hashes of some sequence, up to 2 too few or some too many.
    Cache {
        which: Index,
        sequence: u8,
        tokens: u64,
        prompt: Option<u64>,
        slack: u64,
        malformed: bool,
    },
    Lookup {
        sequence: u8,
        hashes: usize,
        max_tokens: u64,
    },
    Free(usize),
    End(Index),
    ReleaseSkipped(usize, u64),
    Pin(Vec<u32>),
    Unpin(Vec<u32>),
    UnpinPinned(Vec<Index>),
    Evict(Vec<u32>),
    Reset,
    TakeEvents,
}

fn any_group(ranks: u32) -> impl Strategy<Value = GroupSpec> {
    let kind = select(vec![GroupKind::Full, GroupKind::Mla]);
    let parts = (kind, select(vec![1_u32, 2, 3, 4, 8]), prop::option::of(select(divisors(ranks))));
    parts.prop_map(|(kind, block_size, kv_shards)| GroupSpec { kv_shards, ..GroupSpec::new(kind, block_size, vec![]) })
}

/// Two or three MLA groups of one span on any shards, mostly different ones.
fn pair_or_triple(ranks: u32) -> impl Strategy<Value = Vec<GroupSpec>> {
    (vec(select(divisors(ranks)), 2..4), 1..3_u32).prop_map(move |(shards, base)| {
        let member =
            |shards: u32| GroupSpec::new(GroupKind::Mla, base * (ranks / shards), vec![]).with_kv_shards(shards);
        shards.into_iter().map(member).collect()
    })
}

fn divisors(ranks: u32) -> Vec<u32> {
    (1..=ranks).filter(|shards| ranks.is_multiple_of(*shards)).collect()
}

/// One to four groups, half of the time with some that move in lockstep.
fn groups(ranks: u32) -> impl Strategy<Value = Vec<GroupSpec>> {
    let mixed = (pair_or_triple(ranks), vec(any_group(ranks), 0..2)).prop_map(|(pair, others)| [pair, others].concat());
    let groups = prop_oneof![vec(any_group(ranks), 1..4), mixed.prop_shuffle()];
    let marked = prop_oneof![2 => Just(0_u8), 1 => 1..16_u8];
    (groups, vec(1..3_u64, 4), marked).prop_map(|(mut groups, pages, marked)| {
        for (at, group) in groups.iter_mut().enumerate() {
            group.layers.push(LayerSpec::new(format!("layer.{at}"), pages[at]).expect("in range"));
            group.is_eagle = marked >> at & 1 == 1;
        }
        groups
    })
}

pub(crate) fn config() -> impl Strategy<Value = CoordinatorConfig> {
    let size = prop_oneof![1 => 1..4_u32, 3 => 4..16_u32, 12 => 16..70_u32];
    let longest = prop_oneof![4 => 40..400_u64, 1 => Just(1 << 40)];
    let config = (select(vec![1, 2, 2, 4, 4, 8]), size, longest).prop_flat_map(|(ranks, num_blocks, longest)| {
        groups(ranks).prop_map(move |groups| {
            let config = CoordinatorConfig::new(groups, num_blocks, longest);
            CoordinatorConfig { dcp_world_size: ranks, ..config }
        })
    });
    let flags = (prop::bool::weighted(0.9), prop::bool::weighted(0.3), any::<bool>());
    (config, flags, 0..5_u64).prop_map(|(config, (enable_caching, use_eagle, enable_events), finer)| {
        let hash_block_tokens = finer_hashes(&config, finer);
        CoordinatorConfig { enable_caching, use_eagle, enable_events, hash_block_tokens, ..config }
    })
}

/// Hashes of fewer tokens than the smallest block has, where there are such.
fn finer_hashes(config: &CoordinatorConfig, finer: u64) -> Option<u64> {
    let spans = config.groups.iter().map(|group| group.tokens_per_block(config.dcp_world_size).expect("valid"));
    let spans: Vec<u64> = spans.collect();
    Some(finer).filter(|&tokens| tokens > 0 && spans.iter().all(|span| span.is_multiple_of(tokens)))
}

fn block() -> impl Strategy<Value = u32> {
    prop_oneof![1 => Just(0_u32), 12 => 1..16_u32, 12 => 1..70_u32, 1 => Just(u32::MAX)]
}

fn tokens() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 1..13_u64, 4 => 1..33_u64, 1 => 1..161_u64]
}

/// Any number, the impossible ones included.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![6 => tokens(), 1 => Just(0), 1 => select(HUGE.to_vec())]
}

/// Mostly none.
fn few() -> impl Strategy<Value = u64> {
    prop_oneof![6 => Just(0_u64), 2 => 1..9_u64]
}

fn reserved() -> impl Strategy<Value = u64> {
    prop_oneof![20 => Just(0_u64), 3 => 1..9_u64, 1 => select(HUGE.to_vec())]
}

fn operation() -> impl Strategy<Value = Op> {
    let name = || 0..NAMES.len();
    prop_oneof![
        8 => (name(), tokens(), few(), few(), reserved(), prop::bool::weighted(0.8)).prop_map(
            |(name, tokens, lookahead, external, reserved, publish)|
                Op::Start { name, tokens, lookahead, external, reserved, publish }),
        6 => (any::<Index>(), 0..9_u64, few(), reserved(), prop::bool::weighted(0.8)).prop_map(
            |(which, by, lookahead, reserved, publish)| Op::Grow { which, by, lookahead, reserved, publish }),
        4 => (name(), number(), prop::option::weighted(0.8, any::<Index>()), prop_oneof![3 => Just(0), 1 => number()],
              reserved()).prop_map(
            |(name, tokens, hit, external, reserved)| Op::Allocate { name, tokens, hit, external, reserved }),
        1 => (name(), number()).prop_map(|(name, tokens)| Op::Foreign { name, tokens }),
        4 => (any::<Index>(), 0..4_u8, number(), prop::option::of(number()), 0..6_u64, prop::bool::weighted(0.1)).prop_map(
            |(which, sequence, tokens, prompt, slack, malformed)|
                Op::Cache { which, sequence, tokens, prompt, slack, malformed }),
        4 => (0..4_u8, 0..161_usize, number()).prop_map(
            |(sequence, hashes, max_tokens)| Op::Lookup { sequence, hashes, max_tokens }),
        1 => name().prop_map(Op::Free),
        5 => any::<Index>().prop_map(Op::End),
        1 => (name(), number()).prop_map(|(name, tokens)| Op::ReleaseSkipped(name, tokens)),
        2 => vec(block(), 0..4).prop_map(Op::Pin),
        1 => vec(block(), 0..4).prop_map(Op::Unpin),
        2 => vec(any::<Index>(), 1..5).prop_map(Op::UnpinPinned),
        2 => vec(block(), 0..3).prop_map(Op::Evict),
        1 => Just(Op::Reset),
        2 => Just(Op::TakeEvents),
    ]
}

pub(crate) fn operations() -> impl Strategy<Value = Vec<Op>> {
    vec(operation(), 0..100)
}
