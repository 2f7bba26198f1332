//! Newtypes for the three kinds of small integers that must never be mixed up.

use std::fmt;

/// Index of a block in the pool. Block 0 is the null block: a placeholder that is never taken, counted, hashed,
/// referenced or freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The null block.
    pub const NULL: Self = Self(0);

    /// Whether this is the null block.
    #[inline]
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The id as an index into a per-block table.
    #[inline]
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Index of a cache group in the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(pub u32);

/// Index of a lockstep set. Sets are numbered in the order of their first group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SetId(pub u32);
