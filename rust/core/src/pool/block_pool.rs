//! Blocks with reference counts, a queue of free ones, and the keys their content is found by.
//!
//! A block is *free* (queued, no references, perhaps still findable: then it is evicted when it is taken) or *held*.
//! The order of the queue follows vLLM 0.32: `take` pops the head; of the blocks that become free in one `release`,
//! those without a key go to the head as one batch in the order given, those with a key to the tail.

#[cfg(test)]
mod tests;

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::pool::Key;
use crate::pool::events::{BlockUse, EventLog, PoolEvent, UseLog};
use crate::pool::free_list::FreeList;
use crate::pool::hash_index::HashIndex;

/// Largest pool: 2^27 blocks, about 13 GB of bookkeeping.
pub const MAX_BLOCKS: u32 = 1 << 27;

/// Counts how often a block has lost keys, to recognise hits that have become stale. Wraps after 2^32 losses of one
/// block between a lookup and its use.
pub(crate) type Generation = u32;

/// What the pool has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Blocks handed out by `take`.
    pub taken: u64,
    /// Blocks that lost their keys because they were taken.
    pub evicted: u64,
    /// Keys published.
    pub published: u64,
    /// Most blocks held at once.
    pub peak_held: usize,
}

/// The pool.
#[derive(Clone, Debug)]
pub struct BlockPool {
    free: FreeList,
    refs: Vec<u32>,
    index: HashIndex,
    /// Per block with keys: leading tokens of a request up to the end of what its first key stands for; 0 if not told.
    key_tokens: Vec<u64>,
    generations: Vec<Generation>,
    /// Number of times any block has lost keys.
    losses: u64,
    enable_caching: bool,
    stats: PoolStats,
    pub(crate) events: EventLog,
    pub(crate) uses: UseLog,
}

impl BlockPool {
    /// A pool of `num_blocks` blocks, the null block included, all free.
    ///
    /// # Errors
    /// [`Error::Config`] if `num_blocks` is 0, more than [`MAX_BLOCKS`], or more than there is memory for.
    pub fn new(num_blocks: u32, enable_caching: bool) -> Result<Self> {
        Self::with_events(num_blocks, enable_caching, false)
    }

    /// A pool that also notes its events.
    pub(crate) fn with_events(num_blocks: u32, enable_caching: bool, enable_events: bool) -> Result<Self> {
        if num_blocks == 0 || num_blocks > MAX_BLOCKS {
            return Err(Error::config(format!("num_blocks must be between 1 and {MAX_BLOCKS}, got {num_blocks}")));
        }
        Ok(Self {
            free: FreeList::new(num_blocks)?,
            refs: super::filled(0, num_blocks as usize, "reference counts")?,
            index: HashIndex::new(num_blocks)?,
            key_tokens: super::filled(0, num_blocks as usize, "key lengths")?,
            generations: super::filled(0, num_blocks as usize, "generations")?,
            losses: 0,
            enable_caching,
            stats: PoolStats::default(),
            events: EventLog::new(enable_events),
            uses: UseLog::default(),
        })
    }

    /// Blocks, the null block included.
    pub fn num_blocks(&self) -> usize {
        self.refs.len()
    }

    /// Blocks that can be taken.
    #[inline]
    pub fn num_free_blocks(&self) -> usize {
        self.free.len()
    }

    /// Blocks with references.
    #[inline]
    pub fn num_held_blocks(&self) -> usize {
        self.num_blocks() - 1 - self.num_free_blocks()
    }

    /// Entries of the index: one per block and key.
    pub fn num_keys(&self) -> usize {
        self.index.len()
    }

    /// Whether blocks can be published.
    pub fn enable_caching(&self) -> bool {
        self.enable_caching
    }

    /// What the pool has done so far.
    pub fn stats(&self) -> PoolStats {
        self.stats
    }

    /// References to the block.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no such block.
    pub fn ref_count(&self, block: BlockId) -> Result<u32> {
        self.check_exists(block)?;
        Ok(self.refs[block.index()])
    }

    /// Whether the block has no references. The null block counts as held.
    #[inline]
    pub(crate) fn is_free(&self, block: BlockId) -> bool {
        self.refs[block.index()] == 0 && !block.is_null()
    }

    /// The free blocks in the order in which they will be taken.
    pub fn free_order(&self) -> Vec<BlockId> {
        self.free.iter().collect()
    }

    /// Takes `count` blocks with one reference each; their keys are forgotten.
    ///
    /// # Errors
    /// [`Error::PoolExhausted`] if fewer are free.
    pub fn take(&mut self, count: usize) -> Result<Vec<BlockId>> {
        self.check_free(count)?;
        let mut taken = Vec::with_capacity(count);
        self.take_into(count, &mut taken)?;
        Ok(taken)
    }

    /// As [`BlockPool::take`], appending to `taken`.
    ///
    /// # Errors
    /// As [`BlockPool::take`].
    pub fn take_into(&mut self, count: usize, taken: &mut Vec<BlockId>) -> Result<()> {
        self.check_free(count)?;
        let first = taken.len();
        for _ in 0..count {
            let Some(block) = self.free.pop_front() else { break };
            if self.forget(block) {
                self.stats.evicted += 1;
            }
            self.refs[block.index()] = 1;
            taken.push(block);
        }
        self.stats.taken += count as u64;
        self.uses.extend(taken[first..].iter().copied().map(BlockUse::Taken));
        self.note_held();
        Ok(())
    }

    fn check_free(&self, requested: usize) -> Result<()> {
        let free = self.free.len();
        if requested > free { Err(Error::PoolExhausted { requested, free }) } else { Ok(()) }
    }

    #[inline]
    fn note_held(&mut self) {
        self.stats.peak_held = self.stats.peak_held.max(self.num_held_blocks());
    }

    /// Adds one reference per occurrence; a free block leaves the queue and keeps its keys.
    ///
    /// # Errors
    /// [`Error::Config`] if a block does not exist, is the null block, or has as many references as can be counted.
    pub fn add_ref(&mut self, blocks: &[BlockId]) -> Result<()> {
        for &block in blocks {
            self.check_real(block)?;
            if self.refs[block.index()] as usize > u32::MAX as usize - blocks.len() {
                return Err(Error::config(format!("block {block} has too many references to add more")));
            }
        }
        for &block in blocks {
            if self.refs[block.index()] == 0 {
                self.free.remove(block);
            }
            self.refs[block.index()] += 1;
        }
        self.note_held();
        Ok(())
    }

    /// [`BlockPool::add_ref`] for a row of a hit, in which null blocks may stand.
    pub(crate) fn add_ref_to_real(&mut self, row: &[BlockId]) -> Result<()> {
        // Null blocks stand together at the front.
        let first = row.iter().position(|block| !block.is_null()).unwrap_or(row.len());
        self.add_ref(&row[first..])
    }

    /// Gives back one reference per occurrence. See the module for where blocks are queued.
    ///
    /// # Errors
    /// [`Error::Config`] if a block does not exist or is the null block, [`Error::DoubleFree`] if one is given back more
    /// often than it is held.
    pub fn release(&mut self, blocks: &[BlockId]) -> Result<()> {
        self.release_in_order(blocks.iter().copied())
    }

    /// As [`BlockPool::release`], for blocks that come in another order than they are stored in.
    pub(crate) fn release_in_order(&mut self, blocks: impl Iterator<Item = BlockId> + Clone) -> Result<()> {
        let mut some_stay_held = false;
        for (done, block) in blocks.clone().enumerate() {
            let refused = match self.check_real(block) {
                Ok(()) if self.refs[block.index()] > 0 => {
                    self.refs[block.index()] -= 1;
                    some_stay_held |= self.refs[block.index()] > 0;
                    continue;
                }
                Ok(()) => {
                    let asked = blocks.clone().filter(|&other| other == block).count();
                    let before = blocks.clone().take(done).filter(|&other| other == block).count();
                    let count = |number| u32::try_from(number).unwrap_or(u32::MAX);
                    Error::DoubleFree { block, asked: count(asked), held: count(before), what: "references" }
                }
                Err(error) => error,
            };
            for block in blocks.clone().take(done) {
                self.refs[block.index()] += 1;
            }
            return Err(refused);
        }
        // A block given back several times is queued where its last reference goes, so that the counts go down once more.
        // Where every block lost its only reference, none is named twice.
        if some_stay_held {
            blocks.clone().for_each(|block| self.refs[block.index()] += 1);
        }
        let mut behind = BlockId::NULL;
        for block in blocks {
            self.refs[block.index()] -= u32::from(some_stay_held);
            if self.refs[block.index()] != 0 {
                continue;
            }
            if self.index.has_keys(block) {
                self.free.push_back(block);
            } else {
                self.free.insert_after(behind, block);
                behind = block;
            }
        }
        Ok(())
    }

    /// Makes a held block findable by `key`, beside the keys it has already.
    ///
    /// # Errors
    /// [`Error::Config`] if caching is off or the block does not exist, is the null block or is not held: the content of
    /// a block that nobody holds is nobody's to publish.
    pub fn publish(&mut self, block: BlockId, key: Key) -> Result<()> {
        self.check_real(block)?;
        if !self.enable_caching {
            return Err(Error::config(format!("block {block} cannot be published: caching is off")));
        }
        if self.refs[block.index()] == 0 {
            return Err(Error::config(format!("block {block} cannot be published: it is free")));
        }
        self.insert_key(block, key, 0);
        Ok(())
    }

    /// [`BlockPool::publish`] for a block that is known to be held. `tokens`: leading tokens of a request up to the end of
    /// what the key stands for.
    #[inline]
    pub(crate) fn insert_key(&mut self, block: BlockId, key: Key, tokens: u64) {
        if !self.index.has_keys(block) {
            self.key_tokens[block.index()] = tokens;
        }
        if self.index.insert(key, block) {
            self.stats.published += 1;
        }
    }

    /// Leading tokens of a request up to the end of what the block's first key stands for; 0 if it has none.
    #[inline]
    pub(crate) fn key_tokens(&self, block: BlockId) -> u64 {
        if self.index.has_keys(block) { self.key_tokens[block.index()] } else { 0 }
    }

    /// The block's first key.
    pub(crate) fn first_key(&self, block: BlockId) -> Option<Key> {
        self.index.keys_of(block).next()
    }

    /// Lets a block without keys be found by all keys of another one instead of it. Nothing is told: what can be found
    /// stays the same.
    pub(crate) fn move_keys(&mut self, from: BlockId, to: BlockId) {
        let Self { index, generations, key_tokens, .. } = self;
        let mut keys = Vec::new();
        index.remove_block(from, |key| keys.push(key));
        if keys.is_empty() {
            return;
        }
        for key in keys {
            index.insert(key, to);
        }
        key_tokens[to.index()] = key_tokens[from.index()];
        generations[from.index()] = generations[from.index()].wrapping_add(1);
        self.losses += 1;
    }

    /// The first block published under the key that still carries it.
    #[inline]
    pub fn lookup(&self, key: &Key) -> Option<BlockId> {
        self.index.first(key)
    }

    /// The keys the block carries, in the order of publication.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no such block.
    pub fn keys_of(&self, block: BlockId) -> Result<Vec<Key>> {
        self.check_exists(block)?;
        Ok(self.index.keys_of(block).collect())
    }

    /// Whether the block carries any key.
    #[inline]
    pub(crate) fn has_keys(&self, block: BlockId) -> bool {
        self.index.has_keys(block)
    }

    /// Whether the block carries this key.
    pub(crate) fn carries(&self, block: BlockId, key: &Key) -> bool {
        self.index.keys_of(block).any(|other| other == *key)
    }

    /// Forgets the keys of these blocks. References, and the place in the queue, stay as they are.
    ///
    /// # Errors
    /// [`Error::Config`] if a block does not exist.
    pub fn evict(&mut self, blocks: &[BlockId]) -> Result<()> {
        blocks.iter().try_for_each(|&block| self.check_exists(block))?;
        for &block in blocks {
            self.forget(block);
        }
        Ok(())
    }

    /// Forgets the keys of one block. Returns whether it had any.
    #[inline]
    pub(crate) fn forget(&mut self, block: BlockId) -> bool {
        if !self.index.has_keys(block) {
            return false;
        }
        let Self { index, events, .. } = self;
        index.remove_block(block, |key| events.push(|| PoolEvent::Removed(key)));
        self.generations[block.index()] = self.generations[block.index()].wrapping_add(1);
        self.losses += 1;
        true
    }

    /// Forgets all keys, if no block is held. Returns whether it did.
    pub fn reset(&mut self) -> bool {
        if self.num_held_blocks() > 0 {
            return false;
        }
        for (at, generation) in (0_u32..).zip(&mut self.generations) {
            if self.index.has_keys(BlockId(at)) {
                *generation = generation.wrapping_add(1);
                self.losses += 1;
            }
        }
        self.index.clear();
        self.events.push(|| PoolEvent::Cleared);
        true
    }

    /// How often the block has lost its keys.
    #[inline]
    pub(crate) fn generation(&self, block: BlockId) -> Generation {
        self.generations[block.index()]
    }

    /// How often any block has lost its keys.
    #[inline]
    pub(crate) fn losses(&self) -> u64 {
        self.losses
    }

    fn check_exists(&self, block: BlockId) -> Result<()> {
        if block.index() < self.refs.len() {
            return Ok(());
        }
        Err(Error::config(format!("block {block} does not exist: the pool has {} blocks", self.refs.len())))
    }

    pub(crate) fn check_real(&self, block: BlockId) -> Result<()> {
        if block.is_null() {
            return Err(Error::config("block 0 is the null block: it is never referenced, freed or published"));
        }
        self.check_exists(block)
    }

    /// Checks the invariants I1, I3 and I4.
    ///
    /// # Errors
    /// [`Error::Invariant`] naming the first that is broken.
    pub fn audit(&self) -> Result<()> {
        self.free.audit()?;
        self.index.audit()?;
        let mut held = 0;
        for (at, &refs) in (0_u32..).zip(&self.refs).skip(1) {
            held += usize::from(refs > 0);
            if self.free.contains(BlockId(at)) == (refs > 0) {
                return Err(Error::Invariant(format!(
                    "I3: block {at} has {refs} references, but its queueing differs"
                )));
            }
        }
        if self.refs[0] != 0 || self.index.has_keys(BlockId::NULL) {
            return Err(Error::Invariant("I3: the null block is referenced or published".into()));
        }
        if self.free.len() != self.num_blocks() - 1 - held {
            let free = self.free.len();
            return Err(Error::Invariant(format!("I1: {free} free and {held} held of {}", self.num_blocks() - 1)));
        }
        Ok(())
    }

    /// Feeds all that later calls can observe into a hasher, so that two states can be compared.
    pub(crate) fn hash_state(&self, into: &mut DefaultHasher) {
        for block in self.free.iter() {
            block.hash(into);
        }
        self.refs.hash(into);
        self.generations.hash(into);
        for at in (0_u32..).map(BlockId).take(self.refs.len()) {
            self.key_tokens(at).hash(into);
            for (key, successor) in self.index.keys_and_successors(at) {
                (at, key, self.index.first(&key), successor).hash(into);
            }
        }
        self.events.pending().hash(into);
    }

    /// A digest of the state that later calls can observe: equal states of one build have equal digests.
    pub fn state_digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash_state(&mut hasher);
        hasher.finish()
    }
}
