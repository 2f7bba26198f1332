//! What happened to keys and blocks, in order, for those who mirror the index or watch blocks elsewhere.

use crate::ids::BlockId;
use crate::pool::Key;

/// A change of the index, before it is told to each member group.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PoolEvent {
    /// Blocks of a range of a request's tokens became findable by these keys, all of one set.
    Stored {
        /// The request's name.
        request: Box<str>,
        /// The set.
        set: u32,
        /// The keys in the order of the request's tokens. Blocks of the range that can never be hit have none.
        keys: Box<[Key]>,
        /// The first token that each key's block covers.
        starts: Box<[u64]>,
        /// Block hash before the first one.
        parent: Option<Box<[u8]>>,
        /// First token of the range.
        start_token: u64,
        /// The token after the range.
        end_token: u64,
        /// Tokens per key.
        tokens_per_key: u64,
    },
    /// A key is gone.
    Removed(Key),
    /// All keys are gone.
    Cleared,
}

/// The events since they were last taken; silent unless switched on.
#[derive(Clone, Debug)]
pub(crate) struct EventLog {
    enabled: bool,
    queue: Vec<PoolEvent>,
}

impl EventLog {
    pub(crate) fn new(enabled: bool) -> Self {
        Self { enabled, queue: Vec::new() }
    }

    pub(crate) fn enabled(&self) -> bool {
        self.enabled
    }

    /// Notes an event if events are on.
    #[inline]
    pub(crate) fn push(&mut self, event: impl FnOnce() -> PoolEvent) {
        if self.enabled {
            self.queue.push(event());
        }
    }

    /// Hands out and forgets what was noted.
    pub(crate) fn take(&mut self) -> Vec<PoolEvent> {
        std::mem::take(&mut self.queue)
    }

    /// What was noted and not yet taken.
    pub(crate) fn pending(&self) -> &[PoolEvent] {
        &self.queue
    }
}

/// A use of a block, for those who watch how long content stays and how often it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockUse {
    /// Taken for new content; what it held is gone.
    Taken(BlockId),
    /// Found or pinned: its content is used once more.
    Used(BlockId),
    /// Its content can no longer be found, though it is not taken.
    Dropped(BlockId),
}

/// The uses since they were last taken; silent unless switched on.
#[derive(Clone, Debug, Default)]
pub(crate) struct UseLog(Option<Vec<BlockUse>>);

impl UseLog {
    pub(crate) fn new(enabled: bool) -> Self {
        Self(enabled.then(Vec::new))
    }

    #[inline]
    pub(crate) fn extend(&mut self, uses: impl Iterator<Item = BlockUse>) {
        if let Some(log) = &mut self.0 {
            log.extend(uses);
        }
    }

    /// Hands out and forgets what was noted.
    pub(crate) fn take(&mut self) -> Vec<BlockUse> {
        self.0.as_mut().map(std::mem::take).unwrap_or_default()
    }
}
