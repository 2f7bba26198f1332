//! Doubly linked lists over numbered nodes, each ordered from the oldest to the newest. A node is in at most one list.

use std::hash::{DefaultHasher, Hash};

use crate::error::{Error, Result};
use crate::pool;

/// No node, or in a link's `list` no list.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
    list: u32,
}

#[derive(Clone, Copy, Debug)]
struct Ends {
    oldest: u32,
    newest: u32,
    len: usize,
}

const EMPTY: Ends = Ends { oldest: NONE, newest: NONE, len: 0 };
const OUT: Link = Link { older: NONE, newer: NONE, list: NONE };

/// `N` lists. Nodes that were never in one have no link yet.
#[derive(Clone, Debug)]
pub(super) struct Lists<const N: usize> {
    links: Vec<Link>,
    ends: [Ends; N],
}

impl<const N: usize> Lists<N> {
    /// Empty lists with room for the nodes `0..num_nodes`.
    pub(super) fn new(num_nodes: usize) -> Result<Self> {
        Ok(Self { links: pool::reserve(num_nodes, "the eviction order")?, ends: [EMPTY; N] })
    }

    /// Nodes in the list.
    #[inline]
    pub(super) fn len(&self, list: usize) -> usize {
        self.ends[list].len
    }

    /// Which list the node is in.
    #[inline]
    pub(super) fn list_of(&self, node: u32) -> Option<usize> {
        self.links.get(node as usize).map(|link| link.list as usize).filter(|&list| list < N)
    }

    /// The oldest node of the list.
    #[inline]
    pub(super) fn oldest(&self, list: usize) -> Option<u32> {
        Some(self.ends[list].oldest).filter(|&node| node != NONE)
    }

    /// The node after this one in its list.
    #[inline]
    fn newer(&self, node: u32) -> Option<u32> {
        Some(self.links[node as usize].newer).filter(|&node| node != NONE)
    }

    /// The first node from `next` on that fits, with what `fits` says about it. `next` moves past it, so that the same
    /// nodes are not looked at again; the node may then be removed.
    #[inline]
    pub(super) fn next_that<T>(&self, next: &mut Option<u32>, fits: impl Fn(u32) -> Option<T>) -> Option<(u32, T)> {
        while let Some(node) = *next {
            *next = self.newer(node);
            if let Some(what) = fits(node) {
                return Some((node, what));
            }
        }
        None
    }

    /// Adds a node that is in no list as the newest of this one.
    #[inline]
    pub(super) fn push_newest(&mut self, list: usize, node: u32) {
        debug_assert_eq!(self.list_of(node), None, "node {node} is in a list already");
        let at = node as usize;
        if at >= self.links.len() {
            self.links.resize(at + 1, OUT);
        }
        let older = self.ends[list].newest;
        #[allow(clippy::cast_possible_truncation, reason = "N is a small constant")]
        let number = list as u32;
        self.links[at] = Link { older, newer: NONE, list: number };
        match older {
            NONE => self.ends[list].oldest = node,
            older => self.links[older as usize].newer = node,
        }
        self.ends[list].newest = node;
        self.ends[list].len += 1;
    }

    /// Takes a node out of its list, if it is in one.
    #[inline]
    pub(super) fn remove(&mut self, node: u32) {
        let Some(list) = self.list_of(node) else { return };
        let Link { older, newer, .. } = std::mem::replace(&mut self.links[node as usize], OUT);
        match older {
            NONE => self.ends[list].oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        match newer {
            NONE => self.ends[list].newest = older,
            newer => self.links[newer as usize].older = older,
        }
        self.ends[list].len -= 1;
    }

    /// Empties all lists.
    pub(super) fn clear(&mut self) {
        self.links.clear();
        self.ends = [EMPTY; N];
    }

    /// The nodes of the list, oldest first.
    pub(super) fn iter(&self, list: usize) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(self.oldest(list), |&node| self.newer(node))
    }

    /// O4, the half about links: they agree in both directions and with the counts.
    pub(super) fn audit(&self) -> Result<()> {
        let broken = |text: String| Err(Error::Invariant(format!("O4: eviction order: {text}")));
        for (list, ends) in self.ends.iter().enumerate() {
            let (mut older, mut at, mut seen) = (NONE, ends.oldest, 0);
            while at != NONE {
                let Some(link) = self.links.get(at as usize) else {
                    return broken(format!("list {list} names node {at}, which does not exist"));
                };
                seen += 1;
                if link.older != older || link.list as usize != list || seen > ends.len {
                    return broken(format!("list {list} does not fit together at node {at}"));
                }
                (older, at) = (at, link.newer);
            }
            let marked = self.links.iter().filter(|link| link.list as usize == list).count();
            if older != ends.newest || seen != ends.len || marked != ends.len {
                return broken(format!("list {list} has {seen} nodes linked, {marked} marked, {} counted", ends.len));
            }
        }
        Ok(())
    }

    /// Feeds the lists, each node as `show` shows it, into a hasher.
    pub(super) fn hash_state<T: Hash>(&self, into: &mut DefaultHasher, show: impl Fn(u32) -> T) {
        for list in 0..N {
            self.len(list).hash(into);
            self.iter(list).for_each(|node| show(node).hash(into));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(lists: &Lists<2>, list: usize) -> Vec<u32> {
        lists.iter(list).collect()
    }

    fn sound() -> Result<Lists<2>> {
        let mut lists = Lists::new(8)?;
        for (list, node) in [(0, 5), (0, 1), (1, 3), (0, 4)] {
            lists.push_newest(list, node);
        }
        lists.audit()?;
        Ok(lists)
    }

    #[test]
    fn nodes_are_kept_in_order_and_leave_from_anywhere() -> Result<()> {
        let mut lists = sound()?;
        assert_eq!((order(&lists, 0), order(&lists, 1)), (vec![5, 1, 4], vec![3]));
        assert_eq!((lists.list_of(3), lists.list_of(0), lists.list_of(7)), (Some(1), None, None));
        lists.remove(1);
        lists.remove(1);
        lists.remove(7);
        lists.push_newest(1, 1);
        assert_eq!((order(&lists, 0), order(&lists, 1)), (vec![5, 4], vec![3, 1]));
        lists.remove(5);
        lists.remove(4);
        assert_eq!((lists.len(0), lists.oldest(0), lists.len(1)), (0, None, 2));
        lists.audit()?;
        lists.clear();
        assert_eq!(order(&lists, 1), [0; 0]);
        lists.audit()
    }

    #[test]
    fn a_search_goes_on_where_it_stopped() -> Result<()> {
        let mut lists = sound()?;
        let mut next = lists.oldest(0);
        assert_eq!(lists.next_that(&mut next, |node| (node < 5).then_some(())), Some((1, ())));
        lists.remove(1);
        assert_eq!(lists.next_that(&mut next, Some), Some((4, 4)));
        assert_eq!(lists.next_that(&mut next, Some), None);
        Ok(())
    }

    #[test]
    fn audit_sees_what_does_not_fit() -> Result<()> {
        let breaks: [fn(&mut Lists<2>); 5] = [
            |lists| lists.links[1].older = 4,
            |lists| lists.links[1].newer = 99,
            |lists| lists.links[3].list = 0,
            |lists| lists.ends[0].len = 2,
            |lists| lists.ends[0].newest = 1,
        ];
        for broken in breaks {
            let mut lists = sound()?;
            broken(&mut lists);
            assert!(lists.audit().is_err(), "{lists:?}");
        }
        Ok(())
    }
}
