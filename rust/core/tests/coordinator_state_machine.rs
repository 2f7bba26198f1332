//! The coordinator against a plain model, operation by operation, over random configurations and sequences.
//!
//! After every operation all that can be observed is compared: results, rows, the order of the queue, references, pins,
//! keys, events and counters. An operation that is refused must be refused for a reason the model knows and leave the
//! digest of the state as it was.

#[path = "plain/coordinator.rs"]
mod coordinator;
#[path = "plain/draw.rs"]
mod draw;
#[path = "plain/pool.rs"]
mod pool;

use std::collections::BTreeMap;

use coordinator::{Hash, PlainAsk, PlainCoordinator, PlainEvent, Rows};
use draw::{NAMES, Op};
use lockstep_kv_core::coordinator::{CoordinatorStats, Event, Publication};
use lockstep_kv_core::hash::BlockHash;
use lockstep_kv_core::pool::PoolStats;
use lockstep_kv_core::{AllocateRequest, BlockId, Coordinator, CoordinatorConfig, Error, GroupId, PrefixHit};
use pool::{Kind, Outcome, assert_same, ids, numbers, unless};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

/// The hashes of a sequence. The first three sequences have leading hashes in common.
fn sequence(number: u8, count: usize) -> Vec<Hash> {
    let of = |at: usize| {
        let shared = (number == 1 && at < 4) || (number == 2 && at < 9);
        let mut hash = vec![if shared { 0 } else { number }; if number == 3 { 16 } else { 32 }];
        hash[..8].copy_from_slice(&(at as u64).to_le_bytes());
        hash
    };
    (0..count).map(of).collect()
}

struct Pair {
    core: Coordinator,
    plain: PlainCoordinator,
    num_groups: u32,
    /// Hits of the core, in the order of the model's.
    hits: Vec<PrefixHit>,
    foreign: PrefixHit,
    /// Tokens that running requests asked slots for.
    tokens: BTreeMap<String, u64>,
    counts: CoordinatorStats,
}

impl Pair {
    fn new(config: &CoordinatorConfig) -> Self {
        let plain = PlainCoordinator::new(config);
        let mut other = Coordinator::new(config.clone()).expect("valid");
        let core = Coordinator::new(config.clone()).expect("valid");
        let sets: Vec<Vec<usize>> =
            core.sets().iter().map(|set| set.group_ids.iter().map(|group| group.0 as usize).collect()).collect();
        let spans: Vec<u64> = core.sets().iter().map(|set| set.tokens_per_block).collect();
        assert_eq!((&sets, &spans, core.hash_block_tokens()), (&plain.sets, &plain.spans, plain.hash_tokens));
        Self {
            foreign: other.find_longest_hit(&[] as &[Hash], 9).expect("no hashes"),
            num_groups: u32::try_from(config.groups.len()).expect("few groups"),
            core,
            plain,
            hits: Vec::new(),
            tokens: BTreeMap::new(),
            counts: CoordinatorStats::default(),
        }
    }

    /// Rows per group as rows per set. Groups of one set must have the same.
    fn by_set<'a>(&self, row: impl Fn(GroupId) -> &'a [BlockId]) -> Rows {
        let of_set = |set: &Vec<usize>| {
            let rows: Vec<Vec<u32>> =
                set.iter().map(|&group| numbers(row(GroupId(u32::try_from(group).expect("few groups"))))).collect();
            assert!(rows.iter().all(|row| *row == rows[0]), "groups of one set have drifted apart: {rows:?}");
            rows[0].clone()
        };
        self.plain.sets.iter().map(of_set).collect()
    }

    /// Runs an operation on both sides.
    fn both<T: PartialEq + std::fmt::Debug>(
        &mut self,
        core: impl FnOnce(&mut Coordinator) -> Result<T, Error>,
        plain: impl FnOnce(&mut PlainCoordinator) -> Outcome<T>,
    ) -> Option<T> {
        let before = self.core.state_digest();
        let got = core(&mut self.core);
        assert_same(got, plain(&mut self.plain), (before, self.core.state_digest()))
    }

    fn find(&mut self, hashes: &[Hash], max_tokens: u64) -> usize {
        let before = self.core.state_digest();
        let hit = self.core.find_longest_hit(hashes, max_tokens).expect("well-formed hashes");
        assert_eq!(self.core.state_digest(), before, "a lookup has changed the state");
        self.plain.find(hashes, max_tokens);
        let expected = self.plain.hits.last().expect("just found");
        assert_eq!(hit.num_tokens(), expected.tokens);
        assert_eq!(self.by_set(|group| hit.block_ids(group)), expected.rows);
        assert!(hit.num_tokens() <= max_tokens && hit.num_tokens().is_multiple_of(self.plain.alignment));
        self.counts.lookups += 1;
        self.counts.lookup_tokens = self.counts.lookup_tokens.saturating_add(max_tokens);
        self.counts.hit_tokens += hit.num_tokens();
        self.hits.push(hit);
        self.hits.len() - 1
    }

    /// Returns whether the request has its slots.
    fn allocate(&mut self, ask: &PlainAsk<'_>) -> bool {
        let before = self.core.state_digest();
        let request = AllocateRequest {
            hit: ask.hit.map(|at| &self.hits[at]),
            num_external_tokens: ask.external,
            reserved_blocks: ask.reserved,
            ..AllocateRequest::new(ask.name, ask.tokens)
        };
        let groups = 0..self.num_groups;
        let got = self.core.allocate(&request).map(|allocation| {
            allocation
                .map(|new| groups.map(|group| new.new_ids(GroupId(group)).collect::<Vec<_>>()).collect::<Vec<_>>())
        });
        let got = got.map(|rows| rows.map(|rows| self.by_set(|group| rows[group.0 as usize].as_slice())));
        let expected = self.plain.allocate(ask);
        let done = assert_same(got, expected, (before, self.core.state_digest()));
        match done {
            Some(Some(_)) => {
                self.counts.allocations += 1;
                self.tokens.insert(ask.name.into(), ask.tokens);
                true
            }
            Some(None) => {
                self.counts.refusals += 1;
                assert_eq!(before, self.core.state_digest(), "a refusal has changed the state");
                false
            }
            None => false,
        }
    }

    fn cache(&mut self, name: &str, hashes: &[Hash], tokens: u64, prompt: Option<u64>) {
        self.both(
            |core| core.cache(name, hashes, &Publication::new(tokens, prompt)),
            |plain| plain.cache(name, hashes, tokens, prompt),
        );
    }

    /// Publishes as an engine does: the request's own sequence, all of it.
    fn publish(&mut self, name: &str, tokens: u64) {
        let own = u8::try_from(name.len() % 4).expect("small");
        let own = name.bytes().last().map_or(own, |byte| byte % 4);
        self.cache(name, &sequence(own, 400), tokens, Some(tokens));
    }

    fn start(&mut self, name: &str, ask: &PlainAsk<'_>, lookahead: u64, publish: bool) {
        let own = name.bytes().last().map_or(0, |byte| byte % 4);
        let count = usize::try_from(ask.tokens / self.plain.hash_tokens).expect("small");
        let hit = self.find(&sequence(own, count), ask.tokens - 1);
        let hit = Some(hit).filter(|_| !self.tokens.contains_key(name));
        let ask = PlainAsk { hit, tokens: ask.tokens + lookahead, ..ask.clone() };
        if self.allocate(&ask) && publish {
            self.publish(name, ask.tokens - lookahead);
        }
    }

    fn cache_some(&mut self, op: &Op) {
        let Op::Cache { which, sequence: number, tokens, prompt, slack, malformed } = *op else { return };
        let mut names = NAMES.map(String::from).to_vec();
        for _ in 0..4 {
            names.extend(self.tokens.keys().cloned());
        }
        let name = which.get(&names).as_str();
        let needed = self.plain.hashes_needed(name, tokens, prompt);
        let count = usize::try_from((needed + slack).saturating_sub(2)).expect("within the rows");
        let mut hashes = sequence(number, count);
        if malformed && needed > 0 {
            for hash in &mut hashes {
                hash.truncate(15);
            }
            self.both(
                |core| core.cache(name, hashes.as_slice(), &Publication::new(tokens, prompt)),
                |_| Err(vec![Kind::Config]),
            );
        } else {
            self.cache(name, &hashes, tokens, prompt);
        }
    }

    fn carry_out(&mut self, op: &Op) {
        match op {
            &Op::Start { name, tokens, lookahead, external, reserved, publish } => {
                let ask = PlainAsk { name: NAMES[name], tokens, hit: None, external, reserved };
                self.start(NAMES[name], &ask, lookahead, publish);
            }
            Op::Grow { which, by, lookahead, reserved, publish } if !self.tokens.is_empty() => {
                let (name, &tokens) = self.tokens.iter().nth(which.index(self.tokens.len())).expect("in range");
                let (name, computed) = (name.clone(), tokens + by);
                let tokens = computed + lookahead;
                let ask = PlainAsk { name: &name, tokens, hit: None, external: 0, reserved: *reserved };
                if self.allocate(&ask) && *publish {
                    self.publish(&name, computed);
                }
            }
            &Op::Allocate { name, tokens, hit, external, reserved } => {
                let hit = hit.filter(|_| !self.hits.is_empty()).map(|hit| hit.index(self.hits.len()));
                self.allocate(&PlainAsk { name: NAMES[name], tokens, hit, external, reserved });
            }
            &Op::Foreign { name, tokens } => {
                let foreign = self.foreign.clone();
                let ask = AllocateRequest { hit: Some(&foreign), ..AllocateRequest::new(NAMES[name], tokens) };
                self.both(|core| core.allocate(&ask).map(|done| done.is_some()), |_| Err(vec![Kind::Config]));
            }
            Op::Cache { .. } => self.cache_some(op),
            &Op::Lookup { sequence: number, hashes, max_tokens } => {
                self.find(&sequence(number, hashes), max_tokens);
            }
            Op::Free(name) => self.free(NAMES[*name]),
            Op::End(which) if !self.tokens.is_empty() => {
                let name = self.tokens.keys().nth(which.index(self.tokens.len())).expect("in range").clone();
                self.free(&name);
            }
            Op::ReleaseSkipped(name, tokens) => {
                let before = self.core.state_digest();
                let known = self.plain.requests.contains_key(NAMES[*name]);
                let expected = unless(if known { vec![] } else { vec![Kind::UnknownRequest] });
                let got = self.core.release_skipped(NAMES[*name], *tokens, None);
                assert_same(got, expected, (before, self.core.state_digest()));
                assert_eq!(before, self.core.state_digest(), "full attention gives nothing back");
            }
            Op::Pin(blocks) => {
                self.both(|core| core.pin(&ids(blocks)), |plain| plain.pin(blocks));
            }
            Op::Unpin(blocks) => self.unpin(blocks),
            Op::UnpinPinned(which) => {
                let pins = self.plain.pins.clone();
                let blocks: Vec<u32> =
                    which.iter().filter(|_| !pins.is_empty()).map(|index| *index.get(&pins)).collect();
                self.unpin(&blocks);
            }
            Op::Evict(blocks) => {
                self.both(|core| core.evict(&ids(blocks)), |plain| plain.evict(blocks));
            }
            Op::Reset => {
                let before = self.core.state_digest();
                let done = self.both(|core| Ok(core.reset_prefix_cache()), |plain| Ok(plain.reset()));
                assert!(done == Some(true) || before == self.core.state_digest());
            }
            Op::TakeEvents => self.compare_events(),
            Op::Grow { .. } | Op::End(_) => {}
        }
        self.compare();
    }

    fn free(&mut self, name: &str) {
        self.both(|core| core.free(name), |plain| plain.free(name));
        self.tokens.remove(name);
    }

    fn unpin(&mut self, blocks: &[u32]) {
        self.both(|core| core.unpin(&ids(blocks)), |plain| plain.unpin(blocks));
    }

    fn compare_events(&mut self) {
        let of = |event| match event {
            Event::Stored { group, request_id, block_hashes, parent_block_hash, start_token, block_tokens, .. } => {
                PlainEvent::Stored {
                    group: group.0,
                    request: request_id.into(),
                    hashes: block_hashes.into_iter().map(Vec::from).collect(),
                    parent: parent_block_hash.map(Vec::from),
                    start: start_token,
                    tokens: block_tokens,
                }
            }
            Event::Removed { group, block_hash } => PlainEvent::Removed { group: group.0, hash: block_hash.into() },
            Event::Cleared => PlainEvent::Cleared,
        };
        let events: Vec<PlainEvent> = self.core.take_events().into_iter().map(of).collect();
        assert_eq!(events, std::mem::take(&mut self.plain.events));
    }

    /// Everything that can be observed is equal.
    fn compare(&self) {
        let Self { core, plain, .. } = self;
        core.audit().expect("sound");
        let pool = core.pool();
        assert_eq!(numbers(&pool.free_order()), plain.pool.queue);
        assert_eq!(pool.num_free_blocks(), plain.pool.queue.len());
        for (block, &refs) in (0_u32..).zip(&plain.pool.refs) {
            assert_eq!(pool.ref_count(BlockId(block)).expect("exists"), refs, "references of block {block}");
            let in_rows = plain.requests.values().flat_map(|request| request.rows.iter().flatten());
            let named = in_rows.chain(&plain.pins).filter(|&&other| other == block).count();
            assert_eq!(refs as usize, named, "what names block {block}");
            let keys = pool.keys_of(BlockId(block)).expect("exists");
            let of_hash: Vec<Hash> = keys.iter().map(|key| key.as_bytes()[..key.as_bytes().len() - 4].into()).collect();
            let expected: Vec<Hash> = plain.pool.keys_of(block).into_iter().map(|(hash, _)| hash).collect();
            assert_eq!(of_hash, expected, "keys of block {block}");
        }
        self.compare_lookups();
        assert_eq!(core.num_requests(), plain.requests.len());
        for name in NAMES {
            let row = |group| core.block_ids(name, group);
            match plain.requests.get(name) {
                Some(request) => assert_eq!(self.by_set(|group| row(group).expect("known")), request.rows),
                None => assert_eq!(row(GroupId(0)), Err(Error::UnknownRequest(name.into()))),
            }
            assert!(row(GroupId(self.num_groups)).is_err(), "there is no such group");
        }
        let pool = PoolStats {
            taken: plain.pool.taken,
            evicted: plain.pool.evicted,
            published: plain.pool.published,
            peak_held: plain.pool.peak_held,
        };
        assert_eq!(core.stats(), CoordinatorStats { pool, ..self.counts });
    }

    fn compare_lookups(&self) {
        let entries = &self.plain.pool.entries;
        assert_eq!(self.core.pool().num_keys(), entries.len());
        for ((hash, _), _) in entries {
            let of_group = |group: u32| {
                let set = self.plain.set_of(group as usize);
                self.plain.pool.lookup(&(hash.clone(), set))
            };
            let expected: Option<Vec<u32>> = (0..self.num_groups).map(of_group).collect();
            let found = self.core.lookup(&BlockHash::new(hash).expect("well-formed"));
            assert_eq!(found.map(|blocks| numbers(&blocks)), expected);
        }
        assert_eq!(self.core.lookup(&BlockHash::new(&[255; 32]).expect("well-formed")), None);
    }

    /// When all is given back, all is free.
    fn end(&mut self) {
        for name in self.tokens.keys().cloned().collect::<Vec<_>>() {
            self.free(&name);
            self.compare();
        }
        self.unpin(&self.plain.pins.clone());
        self.compare();
        let pool = self.core.pool();
        assert_eq!((pool.num_free_blocks(), pool.num_held_blocks()), (pool.num_blocks() - 1, 0));
        self.compare_events();
        assert!(self.core.reset_prefix_cache());
        assert_eq!(self.core.pool().num_keys(), 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 40 * ProptestConfig::default().cases,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_coordinator_does_what_the_plain_model_does(config in draw::config(), operations in draw::operations()) {
        let mut pair = Pair::new(&config);
        pair.compare();
        for op in &operations {
            pair.carry_out(op);
        }
        pair.end();
    }
}
