//! The queue of free blocks: a doubly linked ring of indices, first out first.
//!
//! Block 0 is the null block and never queued, so its link serves as the ring's anchor.

use crate::error::{Error, Result};
use crate::ids::BlockId;

/// Marks a link that is not in the queue.
const OUT: u32 = u32::MAX;
const ANCHOR: usize = 0;

#[derive(Clone, Copy, Debug)]
struct Link {
    prev: u32,
    next: u32,
}

/// A queue over the blocks `1..num_blocks`, with removal from the middle.
#[derive(Clone, Debug)]
pub(super) struct FreeList {
    links: Vec<Link>,
    len: usize,
}

impl FreeList {
    /// All blocks but the null block, in ascending order. `num_blocks` is at least 1.
    pub(super) fn new(num_blocks: u32) -> Result<Self> {
        let mut links = super::reserve(num_blocks as usize, "the free list")?;
        let last = num_blocks - 1;
        links.extend(
            (0..num_blocks).map(|at| Link {
                prev: if at == 0 { last } else { at - 1 },
                next: if at == last { 0 } else { at + 1 },
            }),
        );
        Ok(Self { links, len: last as usize })
    }

    /// Number of queued blocks.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Whether the block is queued. Never true for the null block.
    #[inline]
    pub(super) fn contains(&self, block: BlockId) -> bool {
        !block.is_null() && self.links[block.index()].next != OUT
    }

    /// Takes the first block out.
    #[inline]
    pub(super) fn pop_front(&mut self) -> Option<BlockId> {
        let first = BlockId(self.links[ANCHOR].next);
        if first.is_null() {
            return None;
        }
        self.remove(first);
        Some(first)
    }

    /// Takes a queued block out.
    #[inline]
    pub(super) fn remove(&mut self, block: BlockId) {
        let Link { prev, next } = self.links[block.index()];
        debug_assert_ne!(next, OUT, "block {block} is not queued");
        self.links[prev as usize].next = next;
        self.links[next as usize].prev = prev;
        self.links[block.index()] = Link { prev: OUT, next: OUT };
        self.len -= 1;
    }

    /// Queues a block behind `after`; the null block stands for the place before the first.
    #[inline]
    pub(super) fn insert_after(&mut self, after: BlockId, block: BlockId) {
        debug_assert_eq!(self.links[block.index()].next, OUT, "block {block} is queued already");
        let next = self.links[after.index()].next;
        self.links[block.index()] = Link { prev: after.0, next };
        self.links[after.index()].next = block.0;
        self.links[next as usize].prev = block.0;
        self.len += 1;
    }

    /// Queues a block last.
    #[inline]
    pub(super) fn push_back(&mut self, block: BlockId) {
        self.insert_after(BlockId(self.links[ANCHOR].prev), block);
    }

    /// The queued blocks, first out first.
    pub(super) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        let step = |block: &BlockId| Some(BlockId(self.links[block.index()].next)).filter(|next| !next.is_null());
        std::iter::successors(step(&BlockId::NULL), step)
    }

    /// I1, the half about the queue: links agree in both directions, and the length is the number of links.
    pub(super) fn audit(&self) -> Result<()> {
        let broken = |text: String| Err(Error::Invariant(format!("I1: free list: {text}")));
        let mut seen = 0;
        let mut at = ANCHOR;
        loop {
            let next = self.links[at].next as usize;
            if next >= self.links.len() {
                return broken(format!("block {at} is queued before {next}, which does not exist"));
            }
            if self.links[next].prev as usize != at {
                return broken(format!("block {at} is followed by {next}, which follows {}", self.links[next].prev));
            }
            if next == ANCHOR {
                break;
            }
            seen += 1;
            if seen > self.links.len() {
                return broken("the ring does not close".into());
            }
            at = next;
        }
        let marked = self.links.iter().skip(1).filter(|link| link.next != OUT).count();
        if seen != self.len || marked != self.len {
            return broken(format!("{seen} blocks linked, {marked} marked, {} counted", self.len));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(list: &FreeList) -> Vec<u32> {
        list.iter().map(|block| block.0).collect()
    }

    #[test]
    fn starts_in_ascending_order_without_the_null_block() -> Result<()> {
        assert_eq!(order(&FreeList::new(4)?), [1, 2, 3]);
        assert_eq!(order(&FreeList::new(1)?), [0; 0]);
        assert_eq!(FreeList::new(1)?.pop_front(), None);
        Ok(())
    }

    #[test]
    fn removes_from_the_middle_and_queues_at_both_ends() -> Result<()> {
        let mut list = FreeList::new(6)?;
        list.remove(BlockId(3));
        assert_eq!(list.pop_front(), Some(BlockId(1)));
        assert!(!list.contains(BlockId(3)) && list.contains(BlockId(2)) && !list.contains(BlockId::NULL));
        list.push_back(BlockId(1));
        list.insert_after(BlockId::NULL, BlockId(3));
        assert_eq!(order(&list), [3, 2, 4, 5, 1]);
        assert_eq!(list.len(), 5);
        list.audit()
    }

    #[test]
    fn audit_sees_broken_links() -> Result<()> {
        let mut list = FreeList::new(5)?;
        list.links[2].prev = 4;
        assert!(list.audit().is_err());
        let mut list = FreeList::new(5)?;
        list.len = 3;
        assert!(list.audit().is_err());
        let mut list = FreeList::new(5)?;
        list.links[3].next = 2;
        assert!(list.audit().is_err());
        Ok(())
    }
}
