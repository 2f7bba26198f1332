//! Keys that were evicted and are remembered for a while, in two lists.

use std::hash::DefaultHasher;

use hashbrown::HashMap;

use crate::error::{Error, Result};
use crate::offload::policy::lists::Lists;
use crate::pool::{self, Key};

/// The remembered keys. Each is a node of the lists.
#[derive(Clone, Debug)]
pub(super) struct Ghosts {
    nodes: HashMap<Key, u32>,
    keys: Vec<Key>,
    /// Nodes that hold no key.
    unused: Vec<u32>,
    lists: Lists<2>,
}

impl Ghosts {
    /// Nothing remembered, with room for `capacity` keys.
    pub(super) fn new(capacity: usize) -> Result<Self> {
        let mut nodes = HashMap::new();
        nodes
            .try_reserve(capacity)
            .map_err(|_| Error::config(format!("not enough memory to remember {capacity} evicted keys")))?;
        Ok(Self {
            nodes,
            keys: pool::reserve(capacity, "evicted keys")?,
            unused: Vec::new(),
            lists: Lists::new(capacity)?,
        })
    }

    /// Keys in the list.
    #[inline]
    pub(super) fn len(&self, list: usize) -> usize {
        self.lists.len(list)
    }

    /// The list that remembers the key.
    #[inline]
    pub(super) fn find(&self, key: &Key) -> Option<usize> {
        self.lists.list_of(*self.nodes.get(key)?)
    }

    /// Remembers a key as the newest of the list.
    pub(super) fn push_newest(&mut self, list: usize, key: Key) {
        let node = if let Some(node) = self.unused.pop() {
            self.keys[node as usize] = key;
            node
        } else {
            // At most twice the number of slots are remembered, and those are at most 2^27.
            #[allow(clippy::cast_possible_truncation, reason = "see above")]
            let node = self.keys.len() as u32;
            self.keys.push(key);
            node
        };
        self.nodes.insert(key, node);
        self.lists.push_newest(list, node);
    }

    /// Forgets a key.
    pub(super) fn remove(&mut self, key: &Key) {
        if let Some(node) = self.nodes.remove(key) {
            self.lists.remove(node);
            self.unused.push(node);
        }
    }

    /// Forgets the oldest key of the list. Returns whether there was one.
    pub(super) fn remove_oldest(&mut self, list: usize) -> bool {
        let Some(node) = self.lists.oldest(list) else { return false };
        self.remove(&self.keys[node as usize].clone());
        true
    }

    /// Forgets all keys.
    pub(super) fn clear(&mut self) {
        self.nodes.clear();
        self.keys.clear();
        self.unused.clear();
        self.lists.clear();
    }

    /// O5, the half about ghosts: each is found under its own key, and is not present.
    pub(super) fn audit(&self, is_present: impl Fn(&Key) -> bool) -> Result<()> {
        self.lists.audit()?;
        let broken = |text: String| Err(Error::Invariant(format!("O5: ghosts: {text}")));
        let listed = self.len(0) + self.len(1);
        if self.nodes.len() != listed || self.keys.len() != listed + self.unused.len() {
            return broken(format!("{} are found, {listed} are listed", self.nodes.len()));
        }
        for (key, &node) in &self.nodes {
            if self.lists.list_of(node).is_none() || self.keys.get(node as usize) != Some(key) {
                return broken(format!("{key:?} is found at node {node}, which is not its own"));
            }
            if is_present(key) {
                return broken(format!("{key:?} is remembered as evicted, but is present"));
            }
        }
        Ok(())
    }

    /// Feeds the lists into a hasher.
    pub(super) fn hash_state(&self, into: &mut DefaultHasher) {
        self.lists.hash_state(into, |node| self.keys[node as usize]);
    }
}

#[cfg(test)]
impl Ghosts {
    /// The keys of the list, oldest first.
    pub(super) fn iter(&self, list: usize) -> impl Iterator<Item = Key> + '_ {
        self.lists.iter(list).map(|node| self.keys[node as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u8) -> Key {
        Key::new(&[number]).expect("in range")
    }

    #[test]
    fn keys_are_forgotten_oldest_first_and_their_nodes_are_used_again() -> Result<()> {
        let mut ghosts = Ghosts::new(4)?;
        for (list, number) in [(0, 1), (1, 2), (0, 3)] {
            ghosts.push_newest(list, key(number));
        }
        assert!(ghosts.remove_oldest(0));
        ghosts.push_newest(1, key(4));
        assert_eq!(ghosts.keys.len(), 3);
        assert_eq!([1, 2, 3, 4].map(|number| ghosts.find(&key(number))), [None, Some(1), Some(0), Some(1)]);
        assert!(ghosts.remove_oldest(0) && !ghosts.remove_oldest(0));
        ghosts.audit(|_| false)?;
        assert!(ghosts.audit(|other| *other == key(2)).is_err(), "present");
        ghosts.keys[1] = key(9);
        assert!(ghosts.audit(|_| false).is_err());
        ghosts.clear();
        ghosts.audit(|_| true)
    }
}
