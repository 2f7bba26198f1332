//! Key -> blocks and block -> keys.
//!
//! A key may name several blocks (two requests computed the same prefix at the same time) and a block may carry several
//! keys. Duplicates of a key are kept in the order of insertion; a lookup returns the first, and each is removed alone.
//!
//! Buckets hold chains of entries, one chain link per distinct key; the duplicates of a key hang off its chain link in a
//! ring. Removal is exact: no tombstones, so no rehashing pause however long the index lives. Keys are block hashes, so
//! a fold of their own bits with a per-index random seed serves as the hash.

use std::hash::{BuildHasher, RandomState};

use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::pool::Key;

/// No entry.
const NONE: u32 = u32::MAX;

/// One key of one block. Fits a cache line.
#[derive(Clone, Copy, Debug)]
struct Entry {
    key: Key,
    block: BlockId,
    /// The next distinct key in the bucket; meaningful in the first entry of a key's ring.
    next_in_bucket: u32,
    /// The ring of entries with this key, oldest first. In an unused entry `next_same_key` links the unused ones.
    prev_same_key: u32,
    next_same_key: u32,
    /// The next key of the same block, in the order of insertion.
    next_of_block: u32,
}

/// The index. Its tables are sized for one key per block; more keys than blocks only lengthen the chains.
#[derive(Clone, Debug)]
pub(super) struct HashIndex {
    seeds: [u64; 4],
    buckets: Vec<u32>,
    entries: Vec<Entry>,
    first_unused: u32,
    /// Per block: its first entry.
    first_of_block: Vec<u32>,
    len: usize,
}

/// The product of two words folded to one.
#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    #[allow(clippy::cast_possible_truncation, reason = "both halves are used")]
    {
        (product as u64) ^ (product >> 64) as u64
    }
}

impl HashIndex {
    /// An empty index over the blocks `0..num_blocks`.
    pub(super) fn new(num_blocks: u32) -> Result<Self> {
        let random = RandomState::new();
        let blocks = num_blocks as usize;
        Ok(Self {
            seeds: [0_u64, 1, 2, 3].map(|at| random.hash_one(at)),
            buckets: super::filled(NONE, blocks.next_power_of_two(), "the hash index")?,
            // Reserved now, written as keys arrive: pages of the table that are never used cost no memory.
            entries: super::reserve(blocks, "the hash index")?,
            first_unused: NONE,
            first_of_block: super::filled(NONE, blocks, "the hash index")?,
            len: 0,
        })
    }

    /// Number of (key, block) entries.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn bucket(&self, key: &Key) -> usize {
        let words = key.words();
        let seeds = &self.seeds;
        let front = fold(words[0] ^ seeds[0], words[1] ^ seeds[1]);
        let hash = fold(front ^ words[4], fold(words[2] ^ seeds[2], words[3] ^ seeds[3]) ^ seeds[1]);
        // The table's length is a power of two.
        #[allow(clippy::cast_possible_truncation, reason = "only the low bits are used")]
        {
            hash as usize & (self.buckets.len() - 1)
        }
    }

    #[inline]
    fn entry(&self, at: u32) -> &Entry {
        &self.entries[at as usize]
    }

    #[inline]
    fn entry_mut(&mut self, at: u32) -> &mut Entry {
        &mut self.entries[at as usize]
    }

    /// The first entry of the key's ring.
    #[inline]
    fn find(&self, key: &Key) -> Option<u32> {
        let mut at = self.buckets[self.bucket(key)];
        while at != NONE {
            let entry = self.entry(at);
            if entry.key == *key {
                return Some(at);
            }
            at = entry.next_in_bucket;
        }
        None
    }

    /// The block first inserted under the key.
    #[inline]
    pub(super) fn first(&self, key: &Key) -> Option<BlockId> {
        self.find(key).map(|at| self.entry(at).block)
    }

    /// Whether the block carries any key.
    #[inline]
    pub(super) fn has_keys(&self, block: BlockId) -> bool {
        self.first_of_block[block.index()] != NONE
    }

    /// The keys of the block, in the order of insertion.
    pub(super) fn keys_of(&self, block: BlockId) -> impl Iterator<Item = Key> + '_ {
        self.keys_and_successors(block).map(|(key, _)| key)
    }

    /// The keys of the block, each with the next block in the key's ring.
    pub(super) fn keys_and_successors(&self, block: BlockId) -> impl Iterator<Item = (Key, BlockId)> + '_ {
        let at = |at: u32| (at != NONE).then(|| self.entry(at));
        std::iter::successors(at(self.first_of_block[block.index()]), move |entry| at(entry.next_of_block))
            .map(|entry| (entry.key, self.entry(entry.next_same_key).block))
    }

    /// Makes the block findable by the key. Returns false if it already was.
    pub(super) fn insert(&mut self, key: Key, block: BlockId) -> bool {
        let mut last_of_block = NONE;
        let mut at = self.first_of_block[block.index()];
        while at != NONE {
            if self.entry(at).key == key {
                return false;
            }
            last_of_block = at;
            at = self.entry(at).next_of_block;
        }

        let new = self.new_entry(key, block);
        if let Some(first) = self.find(&key) {
            let last = self.entry(first).prev_same_key;
            self.entry_mut(new).prev_same_key = last;
            self.entry_mut(new).next_same_key = first;
            self.entry_mut(last).next_same_key = new;
            self.entry_mut(first).prev_same_key = new;
        } else {
            let bucket = self.bucket(&key);
            self.entry_mut(new).next_in_bucket = self.buckets[bucket];
            self.buckets[bucket] = new;
        }
        match last_of_block {
            NONE => self.first_of_block[block.index()] = new,
            last => self.entry_mut(last).next_of_block = new,
        }
        self.len += 1;
        true
    }

    /// An entry that is its own ring and in no list.
    fn new_entry(&mut self, key: Key, block: BlockId) -> u32 {
        let alone =
            |at| Entry { key, block, next_in_bucket: NONE, prev_same_key: at, next_same_key: at, next_of_block: NONE };
        if self.first_unused == NONE {
            // Keys are bounded by what callers publish on 2^27 blocks: the count stays far below 2^32.
            #[allow(clippy::cast_possible_truncation, reason = "see above")]
            let at = self.entries.len() as u32;
            self.entries.push(alone(at));
            at
        } else {
            let at = self.first_unused;
            self.first_unused = self.entry(at).next_same_key;
            *self.entry_mut(at) = alone(at);
            at
        }
    }

    /// Removes all keys of the block and shows each, in the order of insertion.
    #[inline]
    pub(super) fn remove_block(&mut self, block: BlockId, mut removed: impl FnMut(Key)) {
        let mut at = std::mem::replace(&mut self.first_of_block[block.index()], NONE);
        while at != NONE {
            let next = self.entry(at).next_of_block;
            removed(self.entry(at).key);
            self.unlink(at);
            self.entry_mut(at).next_same_key = self.first_unused;
            self.first_unused = at;
            self.len -= 1;
            at = next;
        }
    }

    /// Takes an entry out of its bucket and its ring.
    fn unlink(&mut self, at: u32) {
        let Entry { key, next_in_bucket, prev_same_key: prev, next_same_key: next, .. } = *self.entry(at);
        let bucket = self.bucket(&key);
        // Only the first entry of a ring is in the bucket's chain; the next in the ring takes its place there.
        let heir = if next == at {
            next_in_bucket
        } else {
            self.entry_mut(prev).next_same_key = next;
            self.entry_mut(next).prev_same_key = prev;
            next
        };
        let mut link = self.buckets[bucket];
        if link == at {
            self.buckets[bucket] = heir;
        } else {
            while link != NONE && self.entry(link).next_in_bucket != at {
                link = self.entry(link).next_in_bucket;
            }
            // Not in the chain: not the first of its ring, whose links are all there was to change.
            if link == NONE {
                return;
            }
            self.entry_mut(link).next_in_bucket = heir;
        }
        if next != at {
            self.entry_mut(next).next_in_bucket = next_in_bucket;
        }
    }

    /// Removes all keys of all blocks.
    pub(super) fn clear(&mut self) {
        self.buckets.fill(NONE);
        self.first_of_block.fill(NONE);
        self.entries.clear();
        self.first_unused = NONE;
        self.len = 0;
    }

    /// I4: both directions name the same entries.
    pub(super) fn audit(&self) -> Result<()> {
        let broken = |text: String| Err(Error::Invariant(format!("I4: hash index: {text}")));
        // By key: rings are closed and keys lie in their buckets. Each entry is met once, so no walk is endless.
        let mut met = vec![false; self.entries.len()];
        let mut of_keys = 0;
        for (bucket, &first) in self.buckets.iter().enumerate() {
            let mut at = first;
            while at != NONE {
                let key = self.entry(at).key;
                if self.bucket(&key) != bucket {
                    return broken(format!("{key:?} is in the wrong bucket"));
                }
                let mut same = at;
                loop {
                    let entry = self.entry(same);
                    if entry.key != key || self.entry(entry.next_same_key).prev_same_key != same {
                        return broken(format!("the ring of {key:?} is not closed"));
                    }
                    if std::mem::replace(&mut met[same as usize], true) {
                        return broken(format!("an entry of {key:?} is listed twice"));
                    }
                    of_keys += 1;
                    same = entry.next_same_key;
                    if same == at {
                        break;
                    }
                }
                at = self.entry(at).next_in_bucket;
            }
        }
        // By block: exactly the same entries.
        let mut of_blocks = 0;
        for (number, &first) in (0_u32..).zip(&self.first_of_block) {
            let mut at = first;
            while at != NONE {
                let entry = self.entry(at);
                if entry.block.0 != number {
                    return broken(format!("block {number} lists an entry of block {}", entry.block));
                }
                if !std::mem::replace(&mut met[at as usize], false) {
                    return broken(format!("block {number} carries {:?}, which is not found", entry.key));
                }
                of_blocks += 1;
                at = entry.next_of_block;
            }
        }
        // What is not in use is linked as unused.
        let mut unused = 0;
        let mut at = self.first_unused;
        while at != NONE && unused <= self.entries.len() {
            unused += 1;
            at = self.entry(at).next_same_key;
        }
        if of_keys + unused != self.entries.len() {
            return broken(format!("{of_keys} entries in use and {unused} unused of {}", self.entries.len()));
        }
        if of_blocks != self.len || of_keys != self.len {
            return broken(format!("{of_blocks} entries by block, {of_keys} by key, {} counted", self.len));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u8) -> Key {
        Key::new(&[number; 32]).expect("in range")
    }

    fn removed(index: &mut HashIndex, block: u32) -> Vec<Key> {
        let mut keys = Vec::new();
        index.remove_block(BlockId(block), |key| keys.push(key));
        index.audit().expect("sound");
        keys
    }

    #[test]
    fn entries_fit_a_cache_line() {
        assert!(size_of::<Entry>() <= 64);
    }

    #[test]
    fn duplicates_are_found_in_order_and_removed_alone() -> Result<()> {
        let mut index = HashIndex::new(8)?;
        for block in [3, 1, 2] {
            assert!(index.insert(key(7), BlockId(block)));
        }
        assert!(!index.insert(key(7), BlockId(1)), "a block carries a key once");
        assert_eq!(index.first(&key(7)), Some(BlockId(3)));
        assert_eq!(removed(&mut index, 1), [key(7)]);
        assert_eq!(index.first(&key(7)), Some(BlockId(3)));
        assert_eq!(removed(&mut index, 3), [key(7)]);
        assert_eq!(index.first(&key(7)), Some(BlockId(2)));
        assert_eq!(removed(&mut index, 2), [key(7)]);
        assert_eq!(index.first(&key(7)), None);
        assert_eq!(index.len(), 0);
        Ok(())
    }

    #[test]
    fn a_block_gives_up_all_its_keys_in_order() -> Result<()> {
        let mut index = HashIndex::new(4)?;
        for number in [5, 3, 9] {
            index.insert(key(number), BlockId(2));
        }
        index.insert(key(3), BlockId(1));
        assert_eq!(index.keys_of(BlockId(2)).collect::<Vec<_>>(), [key(5), key(3), key(9)]);
        assert_eq!(removed(&mut index, 2), [key(5), key(3), key(9)]);
        assert_eq!(index.first(&key(3)), Some(BlockId(1)));
        Ok(())
    }

    #[test]
    fn more_keys_than_blocks_only_lengthen_chains() -> Result<()> {
        let mut index = HashIndex::new(2)?;
        for number in 0..100 {
            index.insert(key(number), BlockId(u32::from(number) % 2));
        }
        index.audit()?;
        assert_eq!(removed(&mut index, 0).len(), 50);
        assert_eq!(index.first(&key(51)), Some(BlockId(1)));
        assert_eq!(index.first(&key(50)), None);
        index.clear();
        assert_eq!(index.first(&key(51)), None);
        index.audit()
    }

    #[test]
    fn audit_sees_what_does_not_fit() -> Result<()> {
        let sound = || -> Result<HashIndex> {
            let mut index = HashIndex::new(4)?;
            index.insert(key(1), BlockId(1));
            index.insert(key(1), BlockId(2));
            index.audit()?;
            Ok(index)
        };
        let mut index = sound()?;
        index.entries[1].block = BlockId(3);
        assert!(index.audit().is_err());
        let mut index = sound()?;
        index.first_of_block[1] = NONE;
        assert!(index.audit().is_err());
        let mut index = sound()?;
        index.buckets.fill(NONE);
        assert!(index.audit().is_err());
        let mut index = sound()?;
        index.len = 3;
        assert!(index.audit().is_err());
        Ok(())
    }
}
