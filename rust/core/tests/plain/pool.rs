//! The block pool as the specification tells it: a list for the queue, a count per block, and one list of all
//! (key, block) entries in the order of publication. Everything is found by looking at all of it.

use lockstep_kv_core::{BlockId, Error};

/// Which error an operation ends with. Where several reasons apply, any of them may be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Config,
    Exhausted,
    Stale,
    UnknownRequest,
    DoubleFree,
    /// A bug, whatever the operation.
    Invariant,
}

/// The kind of a core error.
pub(crate) fn kind_of(error: &Error) -> Kind {
    match error {
        Error::Config(_) => Kind::Config,
        Error::PoolExhausted { .. } => Kind::Exhausted,
        Error::StaleHit { .. } => Kind::Stale,
        Error::UnknownRequest(_) => Kind::UnknownRequest,
        Error::DoubleFree { .. } | Error::DoubleComplete { .. } => Kind::DoubleFree,
        Error::Invariant(_) => Kind::Invariant,
    }
}

/// What an operation gives, or all reasons to refuse it.
pub(crate) type Outcome<T> = Result<T, Vec<Kind>>;

/// `Err` if there is any reason.
pub(crate) fn unless(reasons: Vec<Kind>) -> Outcome<()> {
    if reasons.is_empty() { Ok(()) } else { Err(reasons) }
}

/// Whether an operation of the core ended as the model says; the state's digest must stand if it was refused.
pub(crate) fn assert_same<T: PartialEq + std::fmt::Debug>(
    got: Result<T, Error>,
    expected: Outcome<T>,
    digests: (u64, u64),
) -> Option<T> {
    match (got, expected) {
        (Ok(got), Ok(expected)) => {
            assert_eq!(got, expected);
            Some(got)
        }
        (Err(error), Err(reasons)) => {
            assert!(reasons.contains(&kind_of(&error)), "refused with {error:?}, reasons are {reasons:?}");
            assert_eq!(digests.0, digests.1, "refused with {error:?}, but the state has changed");
            None
        }
        (got, expected) => panic!("got {got:?}, expected {expected:?}"),
    }
}

/// Ids as plain numbers.
pub(crate) fn numbers(blocks: &[BlockId]) -> Vec<u32> {
    blocks.iter().map(|block| block.0).collect()
}

/// Plain numbers as ids.
pub(crate) fn ids(numbers: &[u32]) -> Vec<BlockId> {
    numbers.iter().copied().map(BlockId).collect()
}

/// The pool.
#[derive(Debug)]
pub(crate) struct PlainPool<K> {
    pub(crate) queue: Vec<u32>,
    pub(crate) refs: Vec<u32>,
    /// All keys of all blocks, oldest first.
    pub(crate) entries: Vec<(K, u32)>,
    /// Blocks that lost their keys, with these, since the list was last emptied.
    pub(crate) losses: Vec<(u32, Vec<K>)>,
    pub(crate) taken: u64,
    pub(crate) evicted: u64,
    pub(crate) published: u64,
    pub(crate) peak_held: usize,
}

impl<K: Clone + PartialEq> PlainPool<K> {
    pub(crate) fn new(num_blocks: u32) -> Self {
        Self {
            queue: (1..num_blocks).collect(),
            refs: vec![0; num_blocks as usize],
            entries: Vec::new(),
            losses: Vec::new(),
            taken: 0,
            evicted: 0,
            published: 0,
            peak_held: 0,
        }
    }

    pub(crate) fn exists(&self, block: u32) -> bool {
        (block as usize) < self.refs.len()
    }

    /// A block that can be referenced.
    pub(crate) fn is_real(&self, block: u32) -> bool {
        block != 0 && self.exists(block)
    }

    pub(crate) fn held(&self) -> usize {
        self.refs.iter().filter(|&&refs| refs > 0).count()
    }

    pub(crate) fn keys_of(&self, block: u32) -> Vec<K> {
        self.entries.iter().filter(|(_, other)| *other == block).map(|(key, _)| key.clone()).collect()
    }

    pub(crate) fn lookup(&self, key: &K) -> Option<u32> {
        self.entries.iter().find(|(other, _)| other == key).map(|(_, block)| *block)
    }

    /// Pops the head `count` times. What is popped forgets its keys.
    pub(crate) fn take(&mut self, count: u64) -> Outcome<Vec<u32>> {
        if count > self.queue.len() as u64 {
            return Err(vec![Kind::Exhausted]);
        }
        let mut taken = Vec::new();
        for _ in 0..count {
            let block = self.queue.remove(0);
            self.evicted += u64::from(self.forget(block));
            self.refs[block as usize] = 1;
            taken.push(block);
        }
        self.taken += count;
        self.peak_held = self.peak_held.max(self.held());
        Ok(taken)
    }

    pub(crate) fn add_ref(&mut self, blocks: &[u32]) -> Outcome<()> {
        if !blocks.iter().all(|&block| self.is_real(block)) {
            return Err(vec![Kind::Config]);
        }
        for &block in blocks {
            self.queue.retain(|&other| other != block);
            self.refs[block as usize] += 1;
        }
        self.peak_held = self.peak_held.max(self.held());
        Ok(())
    }

    /// Of the blocks that become free, those without a key go to the head as one batch, the others to the tail, each
    /// in the order in which their last references go.
    pub(crate) fn release(&mut self, blocks: &[u32]) -> Outcome<()> {
        unless(self.reasons_against_release(blocks))?;
        let mut freed = Vec::new();
        for &block in blocks {
            self.refs[block as usize] -= 1;
            if self.refs[block as usize] == 0 {
                freed.push(block);
            }
        }
        let (with_key, without): (Vec<u32>, Vec<u32>) =
            freed.into_iter().partition(|block| !self.keys_of(*block).is_empty());
        self.queue.splice(0..0, without);
        self.queue.extend(with_key);
        Ok(())
    }

    fn reasons_against_release(&self, blocks: &[u32]) -> Vec<Kind> {
        let mut reasons = Vec::new();
        for &block in blocks {
            if !self.is_real(block) {
                reasons.push(Kind::Config);
            } else if blocks.iter().filter(|&&other| other == block).count() > self.refs[block as usize] as usize {
                reasons.push(Kind::DoubleFree);
            }
        }
        reasons
    }

    /// Makes the block findable by one more key.
    pub(crate) fn insert(&mut self, key: K, block: u32) {
        if !self.keys_of(block).contains(&key) {
            self.entries.push((key, block));
            self.published += 1;
        }
    }

    /// Removes all keys of a block. Returns whether there were any.
    pub(crate) fn forget(&mut self, block: u32) -> bool {
        let keys = self.keys_of(block);
        self.entries.retain(|(_, other)| *other != block);
        let any = !keys.is_empty();
        if any {
            self.losses.push((block, keys));
        }
        any
    }

    pub(crate) fn evict(&mut self, blocks: &[u32]) -> Outcome<()> {
        if !blocks.iter().all(|&block| self.exists(block)) {
            return Err(vec![Kind::Config]);
        }
        for &block in blocks {
            self.forget(block);
        }
        Ok(())
    }

    /// Forgets everything if nothing is held.
    pub(crate) fn reset(&mut self) -> bool {
        let idle = self.held() == 0;
        if idle {
            self.entries.clear();
        }
        idle
    }
}
