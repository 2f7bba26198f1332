//! The coordinator as the specification tells it, over the plain pool. No counters, no caches: hits that are out are
//! marked stale one by one, sets are found by comparing groups, and a prefix is walked from its start every time.

use std::collections::{BTreeMap, HashMap};

use lockstep_kv_core::{CoordinatorConfig, GroupKind, GroupSpec};

use crate::pool::{Kind, Outcome, PlainPool, unless};

/// A block hash.
pub(crate) type Hash = Vec<u8>;

/// What a block is found by: a hash, in one set.
pub(crate) type PlainKey = (Hash, usize);

/// One row of block ids per set.
pub(crate) type Rows = Vec<Vec<u32>>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PlainEvent {
    Stored { group: u32, request: String, hashes: Vec<Hash>, parent: Option<Hash>, start: u64, tokens: u64 },
    Removed { group: u32, hash: Hash },
    Cleared,
}

/// A prefix that was found, and whether one of its blocks has lost its keys since.
#[derive(Clone, Debug)]
pub(crate) struct PlainHit {
    pub(crate) tokens: u64,
    pub(crate) rows: Rows,
    pub(crate) stale: bool,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct PlainRequest {
    pub(crate) rows: Rows,
    /// Per set: leading blocks that are not published again.
    published: Vec<usize>,
}

/// What `allocate` is asked for. The hit is named by its place among all hits that are out.
#[derive(Clone, Debug)]
pub(crate) struct PlainAsk<'a> {
    pub(crate) name: &'a str,
    pub(crate) tokens: u64,
    pub(crate) hit: Option<usize>,
    pub(crate) external: u64,
    pub(crate) reserved: u64,
}

#[derive(Debug)]
pub(crate) struct PlainCoordinator {
    config: CoordinatorConfig,
    /// Per set: its member groups.
    pub(crate) sets: Vec<Vec<usize>>,
    /// Per set: tokens per block.
    pub(crate) spans: Vec<u64>,
    /// Per set: whether a draft model's lookup leaves the last block.
    drops: Vec<bool>,
    pub(crate) hash_tokens: u64,
    pub(crate) alignment: u64,
    pub(crate) pool: PlainPool<PlainKey>,
    pub(crate) requests: BTreeMap<String, PlainRequest>,
    pub(crate) pins: Vec<u32>,
    /// Per block with keys: what its first key covers, in leading tokens of a request.
    covered: HashMap<u32, u64>,
    pub(crate) hits: Vec<PlainHit>,
    pub(crate) events: Vec<PlainEvent>,
}

fn shards(group: &GroupSpec, ranks: u32) -> u32 {
    group.kv_shards.unwrap_or(ranks)
}

fn span(group: &GroupSpec, ranks: u32) -> u64 {
    u64::from(group.block_size) * u64::from(shards(group, ranks))
}

/// MLA groups of equal span move together if they are not all on equally many shards.
fn form_sets(groups: &[GroupSpec], ranks: u32) -> Vec<Vec<usize>> {
    let mut sets: Vec<Vec<usize>> = Vec::new();
    for (at, group) in groups.iter().enumerate() {
        if sets.iter().any(|set| set.contains(&at)) {
            continue;
        }
        let alike = |other: &GroupSpec| other.kind == GroupKind::Mla && span(other, ranks) == span(group, ranks);
        let peers: Vec<usize> = (0..groups.len()).filter(|&other| alike(&groups[other])).collect();
        let mixed = peers.iter().any(|&peer| shards(&groups[peer], ranks) != shards(group, ranks));
        sets.push(if group.kind == GroupKind::Mla && ranks > 1 && mixed { peers } else { vec![at] });
    }
    sets
}

/// Which sets leave their last block: those with a marked group, and plain groups of the same geometry. If a draft model
/// reads the cache and no group is marked, all.
fn form_drops(config: &CoordinatorConfig, sets: &[Vec<usize>]) -> Vec<bool> {
    let groups = &config.groups;
    let all = config.use_eagle && groups.iter().all(|group| !group.is_eagle);
    let geometry = |group: usize| {
        let first_page = groups[group].layers.first().map(|layer| layer.page_bytes);
        (groups[group].kind, groups[group].block_size, span(&groups[group], config.dcp_world_size), first_page)
    };
    let marked = |set: &Vec<usize>| set.iter().any(|&group| groups[group].is_eagle);
    let alike = |a: &Vec<usize>, b: &Vec<usize>| a.len() == 1 && b.len() == 1 && geometry(a[0]) == geometry(b[0]);
    sets.iter().map(|set| all || sets.iter().any(|peer| marked(peer) && (peer == set || alike(peer, set)))).collect()
}

/// The greatest common divisor, by trying.
fn gcd(numbers: &[u64]) -> u64 {
    let smallest = numbers.iter().copied().min().unwrap_or(1);
    (1..=smallest).rev().find(|divisor| numbers.iter().all(|number| number % divisor == 0)).unwrap_or(1)
}

impl PlainCoordinator {
    pub(crate) fn new(config: &CoordinatorConfig) -> Self {
        let sets = form_sets(&config.groups, config.dcp_world_size);
        let spans: Vec<u64> = sets.iter().map(|set| span(&config.groups[set[0]], config.dcp_world_size)).collect();
        let product: u64 = spans.iter().product();
        let common_multiple = |multiple: &u64| spans.iter().all(|span| multiple.is_multiple_of(*span));
        Self {
            drops: form_drops(config, &sets),
            hash_tokens: config.hash_block_tokens.unwrap_or_else(|| gcd(&spans)),
            alignment: (1..=product).find(common_multiple).expect("the product is one"),
            sets,
            spans,
            pool: PlainPool::new(config.num_blocks),
            requests: BTreeMap::new(),
            pins: Vec::new(),
            covered: HashMap::new(),
            hits: Vec::new(),
            events: Vec::new(),
            config: config.clone(),
        }
    }

    pub(crate) fn set_of(&self, group: usize) -> usize {
        self.sets.iter().position(|set| set.contains(&group)).expect("a group is in a set")
    }

    fn note(&mut self, event: PlainEvent) {
        if self.config.enable_events {
            self.events.push(event);
        }
    }

    /// What lost its keys is gone for every member group, and hits that name it are stale.
    fn settle_losses(&mut self) {
        for (block, keys) in std::mem::take(&mut self.pool.losses) {
            for hit in self.hits.iter_mut().filter(|hit| hit.rows.iter().any(|row| row.contains(&block))) {
                hit.stale = true;
            }
            for (hash, set) in keys {
                for group in self.sets[set].clone() {
                    let group = u32::try_from(group).expect("few groups");
                    self.note(PlainEvent::Removed { group, hash: hash.clone() });
                }
            }
        }
    }

    /// The hash that ends with a block of a set.
    fn full_hash<'a>(&self, hashes: &'a [Hash], set: usize, block: usize) -> Option<&'a Hash> {
        let ends_at = (block as u64 + 1) * self.spans[set];
        hashes.get(usize::try_from(ends_at / self.hash_tokens).ok()? - 1)
    }

    /// The set's blocks for the leading hashes, up to the first that is missing.
    fn run(&self, hashes: &[Hash], set: usize) -> Vec<u32> {
        let found = |block| {
            let hash = self.full_hash(hashes, set, block)?;
            self.pool.lookup(&(hash.clone(), set))
        };
        (0..).map_while(found).collect()
    }

    /// The longest multiple of the alignment that every set has, where it leaves its last block with that block on top. A
    /// group alone looks no further than `max_tokens` for the block it leaves.
    pub(crate) fn find(&mut self, hashes: &[Hash], max_tokens: u64) -> &PlainHit {
        let runs: Rows = (0..self.sets.len()).map(|set| self.run(hashes, set)).collect();
        let alone = self.config.groups.len() == 1;
        let mut tokens = if self.config.enable_caching { max_tokens } else { 0 };
        for (set, run) in runs.iter().enumerate() {
            let span = self.spans[set];
            let mut blocks = run.len() as u64;
            if alone {
                blocks = blocks.min(max_tokens / span);
            }
            tokens = tokens.min(blocks.saturating_sub(u64::from(self.drops[set])) * span);
        }
        tokens -= tokens % self.alignment;
        let cut = |(run, span): (&Vec<u32>, &u64)| {
            (1..).zip(run).take_while(|(end, _)| end * span <= tokens).map(|(_, &block)| block).collect()
        };
        let rows = runs.iter().zip(&self.spans).map(cut).collect();
        self.hits.push(PlainHit { tokens, rows, stale: false });
        self.hits.last().expect("just pushed")
    }

    fn blocks_for(&self, set: usize, tokens: u64) -> u64 {
        tokens / self.spans[set] + u64::from(!tokens.is_multiple_of(self.spans[set]))
    }

    /// `None` if too few blocks are free, else the new ids per set.
    pub(crate) fn allocate(&mut self, ask: &PlainAsk<'_>) -> Outcome<Option<Rows>> {
        let empty = PlainHit { tokens: 0, rows: vec![Vec::new(); self.sets.len()], stale: false };
        let hit = ask.hit.map_or(empty, |at| self.hits[at].clone());
        let running = self.requests.contains_key(ask.name);
        let computed = u128::from(hit.tokens) + u128::from(ask.external);
        let mut reasons = Vec::new();
        if ask.tokens == 0 || ask.tokens > self.config.max_model_len || computed > u128::from(ask.tokens) {
            reasons.push(Kind::Config);
        }
        if running && computed > 0 {
            reasons.push(Kind::Config);
        }
        if hit.stale {
            reasons.push(Kind::Stale);
        }
        unless(reasons)?;

        // Hits that nobody holds leave the queue as well.
        let held = self.requests.get(ask.name).cloned().unwrap_or_default();
        let mut external = Vec::new();
        let mut new = Vec::new();
        for set in 0..self.sets.len() {
            let row = held.rows.get(set).map_or(0, Vec::len) as u64 + hit.rows[set].len() as u64;
            let loaded = self.blocks_for(set, hit.tokens + ask.external).max(row);
            external.push(loaded - row);
            new.push(self.blocks_for(set, ask.tokens).max(loaded) - loaded);
        }
        let idle = hit.rows.iter().flatten().filter(|&&block| self.pool.refs[block as usize] == 0).count();
        let needed = external.iter().chain(&new).map(|&blocks| u128::from(blocks)).sum::<u128>() + idle as u128;
        if needed + u128::from(ask.reserved) > self.pool.queue.len() as u128 {
            return Ok(None);
        }

        let mut request = held;
        request.rows.resize(self.sets.len(), Vec::new());
        request.published.resize(self.sets.len(), 0);
        for (set, row) in hit.rows.iter().enumerate() {
            self.pool.add_ref(row).expect("hits are real");
            request.rows[set].extend(row);
            request.published[set] += row.len();
        }
        for (row, &count) in request.rows.iter_mut().zip(&external) {
            row.extend(self.pool.take(count).expect("counted"));
        }
        let mut taken = Vec::new();
        for (row, &count) in request.rows.iter_mut().zip(&new) {
            taken.push(self.pool.take(count).expect("counted"));
            row.extend(taken.last().expect("just pushed"));
        }
        self.requests.insert(ask.name.into(), request);
        self.settle_losses();
        Ok(Some(taken))
    }

    /// Tokens that can be hit later, of the first `tokens`.
    fn useful(&self, set: usize, tokens: u64) -> u64 {
        let aligned = tokens - tokens % self.alignment;
        if self.config.groups.len() == 1 {
            tokens
        } else if self.drops[set] && aligned > 0 {
            tokens.min(aligned + self.spans[set])
        } else {
            aligned
        }
    }

    /// The number of hashes up to the prompt's last one, if that ends inside a block that can be hit.
    fn tail(&self, set: usize, row: &[u32], tokens: u64, prompt: Option<u64>) -> Option<u64> {
        let resent = if self.drops[set] { prompt? } else { prompt?.saturating_sub(1) };
        let count = resent / self.hash_tokens;
        let end = count * self.hash_tokens;
        let in_row = end / self.spans[set] < row.len() as u64;
        (!end.is_multiple_of(self.spans[set]) && end <= self.useful(set, tokens) && in_row).then_some(count)
    }

    /// Per set: blocks and tail to publish.
    fn plan(&self, request: &PlainRequest, tokens: u64, prompt: Option<u64>) -> Vec<(usize, usize, Option<u64>)> {
        let of_set = |(set, row): (usize, &Vec<u32>)| {
            let first = request.published[set];
            let end = usize::try_from(self.useful(set, tokens) / self.spans[set]).expect("within the row");
            (first, end, self.tail(set, row, tokens, prompt))
        };
        request.rows.iter().enumerate().map(of_set).collect()
    }

    /// How many hashes `cache` needs; 0 if there is nothing to publish.
    pub(crate) fn hashes_needed(&self, name: &str, tokens: u64, prompt: Option<u64>) -> u64 {
        let Some(request) = self.requests.get(name).filter(|_| self.config.enable_caching) else { return 0 };
        let slots = |set: usize| request.rows[set].len() as u64 * self.spans[set];
        if (0..self.sets.len()).any(|set| tokens > slots(set)) {
            return 0;
        }
        let plan = self.plan(request, tokens, prompt);
        let of_set = |(set, &(first, end, tail)): (usize, &(usize, usize, Option<u64>))| {
            let blocks = if first < end { end as u64 * self.spans[set] / self.hash_tokens } else { 0 };
            blocks.max(tail.unwrap_or(0))
        };
        plan.iter().enumerate().map(of_set).max().unwrap_or(0)
    }

    pub(crate) fn cache(&mut self, name: &str, hashes: &[Hash], tokens: u64, prompt: Option<u64>) -> Outcome<()> {
        let request = self.requests.get(name).cloned().ok_or(vec![Kind::UnknownRequest])?;
        if !self.config.enable_caching {
            return Ok(());
        }
        let fits = (0..self.sets.len()).all(|set| tokens <= request.rows[set].len() as u64 * self.spans[set]);
        if !fits || self.hashes_needed(name, tokens, prompt) > hashes.len() as u64 {
            return Err(vec![Kind::Config]);
        }
        for (set, (first, end, tail)) in self.plan(&request, tokens, prompt).into_iter().enumerate() {
            if first < end {
                let full: Vec<Hash> =
                    (0..end).map(|at| self.full_hash(hashes, set, at).expect("counted").clone()).collect();
                for (at, (hash, &block)) in full.iter().zip(&request.rows[set]).enumerate().skip(first) {
                    let key = (hash.clone(), set);
                    if !self.pool.keys_of(block).contains(&key) {
                        self.pool.forget(block);
                        self.settle_losses();
                    }
                    self.insert(key, block, (at as u64 + 1) * self.spans[set]);
                }
                let parent = first.checked_sub(1).map(|before| &full[before]);
                let span = self.spans[set];
                self.note_stored(set, name, &full[first..], parent, (first as u64 * span, span));
            }
            let published = end.max(first);
            self.requests.get_mut(name).expect("known").published[set] = published;
            if let Some(count) = tail {
                self.publish_tail(name, hashes, set, usize::try_from(count).expect("counted"));
            }
        }
        Ok(())
    }

    /// `tokens`: leading tokens of the request up to the end of what the key stands for.
    fn insert(&mut self, key: PlainKey, block: u32, tokens: u64) {
        if self.pool.keys_of(block).is_empty() {
            self.covered.insert(block, tokens);
        }
        self.pool.insert(key, block);
    }

    /// A key that covers more than the block's first one takes the place of all that the block was known by.
    fn publish_tail(&mut self, name: &str, hashes: &[Hash], set: usize, count: usize) {
        let tokens = count as u64 * self.hash_tokens;
        let block = self.requests[name].rows[set][usize::try_from(tokens / self.spans[set]).expect("in the row")];
        let key = (hashes[count - 1].clone(), set);
        let keys = self.pool.keys_of(block);
        if keys.contains(&key) {
            return;
        }
        if !keys.is_empty() && self.covered[&block] < tokens {
            self.pool.forget(block);
            self.settle_losses();
        }
        self.insert(key.clone(), block, tokens);
        let parent = (count > 1).then(|| &hashes[count - 2]);
        let start = (count as u64 - 1) * self.hash_tokens;
        self.note_stored(set, name, &[key.0], parent, (start, self.hash_tokens));
    }

    fn note_stored(&mut self, set: usize, name: &str, hashes: &[Hash], parent: Option<&Hash>, at: (u64, u64)) {
        for group in self.sets[set].clone() {
            let group = u32::try_from(group).expect("few groups");
            let (request, hashes, parent) = (name.into(), hashes.to_vec(), parent.cloned());
            self.note(PlainEvent::Stored { group, request, hashes, parent, start: at.0, tokens: at.1 });
        }
    }

    /// Each set's row is given back last block first.
    pub(crate) fn free(&mut self, name: &str) -> Outcome<()> {
        let request = self.requests.remove(name).ok_or(vec![Kind::UnknownRequest])?;
        for mut row in request.rows {
            row.reverse();
            self.pool.release(&row).expect("rows hold references");
        }
        Ok(())
    }

    pub(crate) fn pin(&mut self, blocks: &[u32]) -> Outcome<()> {
        self.pool.add_ref(blocks)?;
        self.pins.extend(blocks);
        Ok(())
    }

    pub(crate) fn unpin(&mut self, blocks: &[u32]) -> Outcome<()> {
        let mut left = self.pins.clone();
        let mut reasons = Vec::new();
        for block in blocks {
            if !self.pool.is_real(*block) {
                reasons.push(Kind::Config);
            } else if let Some(at) = left.iter().position(|other| other == block) {
                left.remove(at);
            } else {
                reasons.push(Kind::DoubleFree);
            }
        }
        unless(reasons)?;
        self.pins = left;
        self.pool.release(blocks)
    }

    pub(crate) fn evict(&mut self, blocks: &[u32]) -> Outcome<()> {
        self.pool.evict(blocks)?;
        self.settle_losses();
        Ok(())
    }

    pub(crate) fn reset(&mut self) -> bool {
        let carried: Vec<u32> = self.pool.entries.iter().map(|(_, block)| *block).collect();
        let done = self.pool.reset();
        if done {
            for hit in &mut self.hits {
                hit.stale |= hit.rows.iter().flatten().any(|block| carried.contains(block));
            }
            self.note(PlainEvent::Cleared);
        }
        done
    }
}
