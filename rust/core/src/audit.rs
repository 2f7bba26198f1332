//! The invariants, and the check of the one that spans pool and requests.
//!
//! * **I1** free count = length of the queue = blocks - 1 - blocks with references; the queue has no repeats.
//! * **I2** references of a block = row entries naming it + pins; the rows are of one set, and so are its keys.
//! * **I3** a block is queued iff it has no references and is not the null block.
//! * **I4** every index entry names a block that carries exactly that key; a taken block carries none; duplicates of a
//!   key are all kept, the first inserted is returned, each is removed alone.
//! * **I5** the capacity test consumes exactly what the following allocation consumes.
//! * **I6** an operation that fails leaves all state unchanged.
//! * **I7** when all requests ended and all transfers completed: free = blocks - 1, no references.
//! * **I8** all sets' hits of a request are referenced before any set takes a block.
//! * **I9** a block that a transfer reads or writes is pinned and cannot be handed out.
//!
//! [`Coordinator::audit`](crate::Coordinator::audit) checks I1 to I4. I5 is asserted where blocks are allocated; I6 to I9
//! are about sequences of operations and are shown by tests.

use hashbrown::HashMap;

use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::pool::{BlockPool, Key};

/// Checks I2: references against all rows and pins.
pub(crate) fn check_references<'a>(
    pool: &BlockPool,
    rows: impl Iterator<Item = (usize, &'a [BlockId])>,
    pins: &HashMap<BlockId, u32>,
) -> Result<()> {
    let mut expected = vec![0_u64; pool.num_blocks()];
    let mut set_of = vec![None; pool.num_blocks()];
    for (set, row) in rows {
        for &block in row.iter().filter(|block| !block.is_null()) {
            expected[block.index()] += 1;
            if set_of[block.index()].replace(set).is_some_and(|other| other != set) {
                return Err(Error::Invariant(format!("I2: rows of two sets name block {block}")));
            }
        }
    }
    for (at, set) in (0_u32..).zip(&set_of) {
        let of_other = |key: &Key| set.is_some_and(|set| key.split_block().1 as usize != set);
        if pool.keys_of(BlockId(at))?.iter().any(of_other) {
            return Err(Error::Invariant(format!("I2: block {at} is in a row of one set and has a key of another")));
        }
    }
    for (block, &count) in pins {
        expected[block.index()] += u64::from(count);
    }
    for (at, &expected) in (0_u32..).zip(&expected) {
        let refs = pool.ref_count(BlockId(at))?;
        if u64::from(refs) != expected {
            return Err(Error::Invariant(format!(
                "I2: block {at} has {refs} references, rows and pins name it {expected} times"
            )));
        }
    }
    Ok(())
}
