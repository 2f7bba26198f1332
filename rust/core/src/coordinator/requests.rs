//! The requests that hold blocks, by name.

use hashbrown::HashMap;

use crate::error::{Error, Result};
use crate::groups::mamba_align::States;
use crate::ids::BlockId;

/// Finished requests whose buffers are kept for the next ones.
const SPARE: usize = 64;

/// A request's blocks in one set, in the order of its tokens.
#[derive(Clone, Debug, Default, Hash)]
pub(super) struct Row {
    pub(super) blocks: Vec<BlockId>,
    /// How many leading blocks need not be published any more.
    pub(super) num_published: usize,
    /// A shared block that the row's tokens end inside: the next allocation puts a copy in its place.
    pub(super) shared_tail: Option<SharedTail>,
    /// For rows of aligned states.
    pub(super) states: States,
}

/// A block that a request shares and ends inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SharedTail {
    pub(super) place: usize,
    pub(super) block: BlockId,
}

impl Row {
    /// The number of blocks, and how many of them need not be published any more.
    pub(super) fn lengths(&self) -> (usize, usize) {
        (self.blocks.len(), self.num_published)
    }

    /// The shared block that the row's tokens end inside, as long as the row names it.
    pub(super) fn shared_tail(&self) -> Option<SharedTail> {
        self.shared_tail.filter(|tail| self.blocks.get(tail.place) == Some(&tail.block))
    }

    /// Empties the row, but keeps its buffer.
    fn clear(&mut self) {
        let mut blocks = std::mem::take(&mut self.blocks);
        blocks.clear();
        *self = Self { blocks, ..Self::default() };
    }
}

/// A request: one row per set.
#[derive(Clone, Debug, Default, Hash)]
pub(super) struct Request {
    pub(super) rows: Vec<Row>,
}

/// All requests.
#[derive(Debug, Default)]
pub(super) struct Requests {
    by_name: HashMap<String, Request>,
    spare: Vec<Request>,
}

impl Requests {
    pub(super) fn len(&self) -> usize {
        self.by_name.len()
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &Request)> {
        self.by_name.iter().map(|(name, request)| (name.as_str(), request))
    }

    /// # Errors
    /// [`Error::UnknownRequest`].
    pub(super) fn get(&self, name: &str) -> Result<&Request> {
        self.by_name.get(name).ok_or_else(|| Error::UnknownRequest(name.into()))
    }

    /// # Errors
    /// [`Error::UnknownRequest`].
    pub(super) fn get_mut(&mut self, name: &str) -> Result<&mut Request> {
        self.by_name.get_mut(name).ok_or_else(|| Error::UnknownRequest(name.into()))
    }

    /// The request of this name, made with `num_sets` empty rows if it is new.
    pub(super) fn get_or_insert(&mut self, name: &str, num_sets: usize) -> &mut Request {
        let Self { by_name, spare } = self;
        by_name.entry_ref(name).or_insert_with(|| {
            let mut request = spare.pop().unwrap_or_default();
            request.rows.resize_with(num_sets, Row::default);
            request
        })
    }

    /// # Errors
    /// [`Error::UnknownRequest`].
    pub(super) fn remove(&mut self, name: &str) -> Result<Request> {
        self.by_name.remove(name).ok_or_else(|| Error::UnknownRequest(name.into()))
    }

    /// Keeps the buffers of a finished request.
    pub(super) fn recycle(&mut self, mut request: Request) {
        if self.spare.len() < SPARE {
            request.rows.iter_mut().for_each(Row::clear);
            self.spare.push(request);
        }
    }
}
