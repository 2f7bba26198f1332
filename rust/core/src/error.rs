//! The one error type. Every failing operation leaves all state as it was.

use crate::ids::BlockId;

/// Result of a core operation.
pub type Result<T> = std::result::Result<T, Error>;

/// Why an operation was refused. The message names the offending values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A configuration or an argument has a value that cannot be used.
    #[error("{0}")]
    Config(String),

    /// More blocks were asked for than are free.
    #[error("cannot take {requested} blocks: {free} are free")]
    PoolExhausted {
        /// Blocks asked for.
        requested: usize,
        /// Blocks free at the time.
        free: usize,
    },

    /// A prefix hit was used after one of its blocks lost the content it was found under.
    #[error("stale hit: block {block} no longer holds the prefix it was found under; look the prefix up again")]
    StaleHit {
        /// The first block of the hit that has changed.
        block: BlockId,
    },

    /// The request holds no blocks here: it was never allocated, or it was freed.
    #[error("unknown request {}: it was never allocated, or it was freed", shown(.0))]
    UnknownRequest(String),

    /// A reference was given back that is not held.
    #[error("double free: block {block} is given back {asked} times but has {held} {what}")]
    DoubleFree {
        /// The block.
        block: BlockId,
        /// How often the call gives it back.
        asked: u32,
        /// How many it has.
        held: u32,
        /// What is counted: "references" or "pins".
        what: &'static str,
    },

    /// A transfer was reported as complete that is not in flight.
    #[error("double completion: key {key} is completed {asked} times but has {held} {what} in flight")]
    DoubleComplete {
        /// The key, in hexadecimal.
        key: String,
        /// How often the call completes it.
        asked: usize,
        /// How many transfers of this kind it has.
        held: usize,
        /// What is counted: "stores" or "loads".
        what: &'static str,
    },

    /// `audit` found a broken invariant: a bug in this crate, never a caller's fault.
    #[error("broken invariant {0}")]
    Invariant(String),
}

/// The start of a name, quoted.
fn shown(name: &str) -> String {
    const SHOWN: usize = 80;
    match name.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{:?}...", &name[..end]),
        None => format!("{name:?}"),
    }
}

impl Error {
    /// Shorthand for [`Error::Config`].
    pub(crate) fn config(message: impl Into<String>) -> Self {
        Self::Config(message.into())
    }
}
