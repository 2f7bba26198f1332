//! Blocks that are held for others than requests: transfers, deferred releases, callers with bookkeeping of their own.

use super::Coordinator;
use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::pool::BlockUse;

impl Coordinator {
    /// Adds a pin per occurrence: a pinned block is not handed out, whoever gives it up.
    ///
    /// # Errors
    /// [`Error::Config`] if a block does not exist or is the null block.
    pub fn pin(&mut self, blocks: &[BlockId]) -> Result<()> {
        self.pool.add_ref(blocks)?;
        self.pool.uses.extend(blocks.iter().copied().map(BlockUse::Used));
        for &block in blocks {
            *self.pins.entry(block).or_insert(0) += 1;
        }
        Ok(())
    }

    /// Gives back a pin per occurrence.
    ///
    /// # Errors
    /// [`Error::Config`] if a block does not exist or is the null block, [`Error::DoubleFree`] if it has fewer pins.
    pub fn unpin(&mut self, blocks: &[BlockId]) -> Result<()> {
        for (done, &block) in blocks.iter().enumerate() {
            let refused = match self.pool.check_real(block) {
                Ok(()) => match self.pins.get_mut(&block) {
                    Some(pins) if *pins > 0 => {
                        *pins -= 1;
                        continue;
                    }
                    _ => {
                        let times = |blocks: &[BlockId]| blocks.iter().filter(|&&other| other == block).count();
                        let count = |number| u32::try_from(number).unwrap_or(u32::MAX);
                        let (asked, held) = (count(times(blocks)), count(times(&blocks[..done])));
                        Error::DoubleFree { block, asked, held, what: "pins" }
                    }
                },
                Err(error) => error,
            };
            for block in &blocks[..done] {
                self.pins.entry(*block).and_modify(|pins| *pins += 1);
            }
            return Err(refused);
        }
        for block in blocks {
            if self.pins.get(block) == Some(&0) {
                self.pins.remove(block);
            }
        }
        self.pool.release(blocks)
    }

    /// Takes `count` blocks that are pinned instead of being part of a request; their keys are forgotten.
    ///
    /// # Errors
    /// [`Error::PoolExhausted`] if fewer are free.
    pub fn take_pinned(&mut self, count: usize) -> Result<Vec<BlockId>> {
        let taken = self.pool.take(count)?;
        for &block in &taken {
            self.pins.insert(block, 1);
        }
        Ok(taken)
    }

    /// Ends a request and leaves a pin wherever its rows named a block, so that the blocks can be given back later with
    /// [`Coordinator::unpin`]. Returns the rows, one set after the other, with the null blocks in them.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`].
    pub fn detach(&mut self, request_id: &str) -> Result<Vec<BlockId>> {
        let request = self.requests.remove(request_id)?;
        let blocks: Vec<_> = request.rows.iter().flat_map(|row| &row.blocks).copied().collect();
        for &block in blocks.iter().filter(|block| !block.is_null()) {
            *self.pins.entry(block).or_insert(0) += 1;
        }
        self.withdraw_offers(request_id);
        self.requests.recycle(request);
        self.debug_audit();
        Ok(blocks)
    }
}
