//! Requests, their rows of blocks, and the operations of a request's life in the order in which they come:
//! look up, allocate, publish, release.

mod allocate;
mod classes;
mod config;
mod events;
mod geometry;
mod inspect;
mod lookup;
mod need;
mod pins;
mod publish;
mod release;
mod requests;
mod states;
#[cfg(test)]
mod tests;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};

use hashbrown::HashMap;

pub use allocate::{AllocateRequest, Allocation};
pub use config::CoordinatorConfig;
pub use events::Event;
pub use lookup::PrefixHit;
pub use publish::Publication;
pub use states::{BlockCopy, StateOffer};

use crate::audit;
use crate::error::{Error, Result};
use crate::geometry::LockstepSet;
use crate::hash::BlockHash;
use crate::ids::{BlockId, GroupId};
use crate::pool::events::UseLog;
use crate::pool::{BlockPool, BlockUse, Key, PoolStats};
use allocate::Added;
use geometry::Geometry;
use requests::Requests;
use states::Unwritten;

/// Tells coordinators apart, so that a hit of one is not taken for a hit of another.
static NEXT_COORDINATOR: AtomicU64 = AtomicU64::new(0);

/// What a coordinator has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoordinatorStats {
    /// Prefix lookups.
    pub lookups: u64,
    /// Tokens that lookups could have hit at most.
    pub lookup_tokens: u64,
    /// Tokens that lookups hit.
    pub hit_tokens: u64,
    /// Allocations that succeeded.
    pub allocations: u64,
    /// Allocations that did not fit.
    pub refusals: u64,
    /// What the pool has done.
    pub pool: PoolStats,
}

/// Blocks for the requests of one engine, over one pool and any number of lockstep sets.
#[derive(Debug)]
pub struct Coordinator {
    id: u64,
    config: CoordinatorConfig,
    geometry: Geometry,
    pool: BlockPool,
    requests: Requests,
    /// Pins per block, beside the references of rows.
    pins: HashMap<BlockId, u32>,
    /// Scratch of `allocate`, kept so that it is not made anew for every call.
    added: Vec<Added>,
    /// Per set: copies that the running step must make.
    copies: Vec<Vec<BlockCopy>>,
    /// Per set: states that can be stored elsewhere.
    offers: Vec<Vec<StateOffer>>,
    /// What steps have yet to write of what they have published, where that matters.
    unwritten: Unwritten,
    /// Per set: blocks that must be cleared.
    to_clear: Vec<Vec<BlockId>>,
    lookups: u64,
    lookup_tokens: u64,
    hit_tokens: u64,
    allocations: u64,
    refusals: u64,
}

impl Coordinator {
    /// A coordinator whose blocks are all free.
    ///
    /// # Errors
    /// [`Error::Config`] naming the value that cannot be used, a kind that is not supported included.
    pub fn new(config: CoordinatorConfig) -> Result<Self> {
        let geometry = Geometry::new(&config)?;
        let num_sets = geometry.sets.len();
        let mut pool = BlockPool::with_events(config.num_blocks, config.enable_caching, config.enable_events)?;
        pool.uses = UseLog::new(config.notes_uses);
        Ok(Self {
            id: NEXT_COORDINATOR.fetch_add(1, Ordering::Relaxed),
            config,
            geometry,
            pool,
            requests: Requests::default(),
            pins: HashMap::new(),
            added: Vec::new(),
            copies: vec![Vec::new(); num_sets],
            offers: vec![Vec::new(); num_sets],
            unwritten: Unwritten::default(),
            to_clear: vec![Vec::new(); num_sets],
            lookups: 0,
            lookup_tokens: 0,
            hit_tokens: 0,
            allocations: 0,
            refusals: 0,
        })
    }

    /// What the coordinator was made from.
    pub fn config(&self) -> &CoordinatorConfig {
        &self.config
    }

    /// The lockstep sets, in the order of their first groups.
    pub fn sets(&self) -> &[LockstepSet] {
        &self.geometry.sets
    }

    /// The pool. Blocks change hands only through the coordinator.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Tokens per block hash.
    pub fn hash_block_tokens(&self) -> u64 {
        self.geometry.hash_block_tokens
    }

    /// Whether hits may end inside blocks, at any block hash.
    pub fn has_fine_grained_hits(&self) -> bool {
        self.geometry.is_fine_grained
    }

    /// Whether states are published where a shared prefix ends inside a block: if that was asked for and can be.
    pub fn publishes_shared_prefix(&self) -> bool {
        self.geometry.publishes_shared_prefix
    }

    /// Share of the blocks in use, between 0 and 1; 0 for a pool of the null block alone.
    #[allow(clippy::cast_precision_loss, reason = "at most 2^27 blocks")]
    pub fn usage(&self) -> f64 {
        let usable = self.pool.num_blocks() - 1;
        if usable == 0 { 0.0 } else { 1.0 - self.pool.num_free_blocks() as f64 / usable as f64 }
    }

    /// Number of requests that hold blocks.
    pub fn num_requests(&self) -> usize {
        self.requests.len()
    }

    /// A request's row in the set of this group; null blocks stand where nothing is kept.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`], or [`Error::Config`] if there is no such group.
    pub fn block_ids(&self, request_id: &str, group: GroupId) -> Result<&[BlockId]> {
        let request = self.requests.get(request_id)?;
        Ok(&request.rows[self.set_of(group)?].blocks)
    }

    /// The block each group would find under this hash; `None` if a group has none.
    pub fn lookup(&self, hash: &BlockHash) -> Option<Vec<BlockId>> {
        let find = |&set: &usize| {
            #[allow(clippy::cast_possible_truncation, reason = "sets are numbered with 32 bits")]
            self.pool.lookup(&Key::of_block(hash.as_bytes(), set as u32))
        };
        self.geometry.set_of_group.iter().map(find).collect()
    }

    /// The index of the group's set.
    fn set_of(&self, group: GroupId) -> Result<usize> {
        self.geometry.set_of_group.get(group.0 as usize).copied().ok_or_else(|| {
            let groups = self.config.groups.len();
            Error::config(format!("group {} does not exist: there are {groups} groups", group.0))
        })
    }

    /// Forgets the keys of these blocks. References, and the place in the queue, stay as they are.
    ///
    /// # Errors
    /// [`Error::Config`] if a block does not exist.
    pub fn evict(&mut self, blocks: &[BlockId]) -> Result<()> {
        self.pool.evict(blocks)?;
        self.pool.uses.extend(blocks.iter().copied().map(BlockUse::Dropped));
        Ok(())
    }

    /// Changes the retention interval for what is published from now on: see [`CoordinatorConfig::retention_interval`].
    ///
    /// # Errors
    /// [`Error::Config`] if hits cannot end at its multiples.
    pub fn set_retention_interval(&mut self, interval: Option<u64>) -> Result<()> {
        let config = CoordinatorConfig { retention_interval: interval, ..self.config.clone() };
        self.geometry.check(&config)?;
        self.config = config;
        Ok(())
    }

    /// Forgets all keys, if no block is held. Returns whether it did; if not, nothing has changed.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.pool.reset()
    }

    /// What the coordinator has done so far.
    pub fn stats(&self) -> CoordinatorStats {
        CoordinatorStats {
            lookups: self.lookups,
            lookup_tokens: self.lookup_tokens,
            hit_tokens: self.hit_tokens,
            allocations: self.allocations,
            refusals: self.refusals,
            pool: self.pool.stats(),
        }
    }

    /// Checks the invariants I1 to I4 over the whole state. Takes time in proportion to the pool and all rows.
    ///
    /// # Errors
    /// [`Error::Invariant`] naming the first that is broken.
    pub fn audit(&self) -> Result<()> {
        self.pool.audit()?;
        let rows = self.requests.iter().flat_map(|(_, request)| request.rows.iter().enumerate());
        let rows = rows.map(|(set, row)| (set, row.blocks.as_slice()));
        audit::check_references(&self.pool, rows, &self.pins)
    }

    /// A digest of the state that later calls can observe, counters aside: equal states of one build have equal digests.
    pub fn state_digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.pool.hash_state(&mut hasher);
        let mut requests: Vec<_> = self.requests.iter().collect();
        requests.sort_by_key(|(name, _)| *name);
        requests.hash(&mut hasher);
        let mut pins: Vec<_> = self.pins.iter().collect();
        pins.sort();
        pins.hash(&mut hasher);
        self.unwritten.hash_state(&mut hasher);
        self.config.retention_interval.hash(&mut hasher);
        (&self.copies, &self.offers, &self.to_clear).hash(&mut hasher);
        hasher.finish()
    }

    /// [`Coordinator::audit`] after every operation, in builds with debug assertions.
    fn debug_audit(&self) {
        #[cfg(debug_assertions)]
        if let Err(error) = self.audit() {
            debug_assert!(false, "{error}");
        }
    }
}
