//! Giving a request the blocks for its tokens: first the hits are referenced in all sets, then blocks are taken for what
//! an external tier will load, then for what will be computed.

use super::requests::Request;
use super::{Coordinator, PrefixHit};
use crate::error::{Error, Result};
use crate::ids::{BlockId, GroupId};

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub struct AllocateRequest<'a> {
    /// The request's name. A name that holds no blocks starts a new request.
    pub request_id: &'a str,
    /// Slots for this many tokens in all, the hit and speculative ones included.
    pub num_tokens: u64,
    /// A prefix found for this request; only when it starts.
    pub hit: Option<&'a PrefixHit>,
    /// Tokens behind the hit that an external tier will load; only when the request starts.
    pub num_external_tokens: u64,
    /// Free blocks that must be left over.
    pub reserved_blocks: u64,
}

impl<'a> AllocateRequest<'a> {
    /// Slots for `num_tokens` tokens, with no hit, nothing external and nothing reserved.
    pub fn new(request_id: &'a str, num_tokens: u64) -> Self {
        Self { request_id, num_tokens, hit: None, num_external_tokens: 0, reserved_blocks: 0 }
    }
}

/// What an allocation added to the request's rows.
#[derive(Debug)]
pub struct Allocation<'a> {
    request: &'a Request,
    set_of_group: &'a [usize],
    /// Per set: where the new blocks start in its row.
    new_from: &'a [usize],
}

impl Allocation<'_> {
    /// The blocks newly added to the group's row, those of the hit and of external tokens left out; empty if there is
    /// no such group.
    pub fn new_ids(&self, group: GroupId) -> &[BlockId] {
        self.set_of_group.get(group.0 as usize).map_or(&[], |&set| &self.request.rows[set].blocks[self.new_from[set]..])
    }
}

impl Coordinator {
    /// Gives a request slots for `num_tokens` tokens in all. `None` if too few blocks are free.
    ///
    /// # Errors
    /// [`Error::Config`] if a number is out of range, or if a hit or external tokens come with a request that holds
    /// blocks already; [`Error::StaleHit`] if a block of the hit has lost its keys.
    pub fn allocate(&mut self, ask: &AllocateRequest<'_>) -> Result<Option<Allocation<'_>>> {
        let hit = ask.hit.filter(|hit| hit.num_tokens() > 0);
        let computed = self.check_ask(ask, hit)?;

        // Per set: the row's length after hits and external blocks, and at the end. What is counted here is what is
        // taken below: hits that nobody holds leave the queue as well.
        let geometry = &self.geometry;
        let held = self.requests.get(ask.request_id).ok();
        let mut needed = 0_usize;
        self.new_from.clear();
        for set in 0..geometry.sets.len() {
            let row = held.map_or(0, |request| request.rows[set].blocks.len());
            let hit_row = hit.map_or(&[][..], |hit| hit.row(set));
            let with_external = (row + hit_row.len()).max(geometry.blocks_for(set, computed));
            let at_end = with_external.max(geometry.blocks_for(set, ask.num_tokens));
            let idle = hit_row.iter().filter(|&&block| self.pool.is_free(block)).count();
            needed = needed.saturating_add(at_end - row - hit_row.len()).saturating_add(idle);
            self.new_from.push(with_external);
        }
        let free = self.pool.num_free_blocks();
        // Even a request that needs no block is refused if fewer are free than must be left over.
        let reserved = usize::try_from(ask.reserved_blocks).unwrap_or(usize::MAX);
        if needed.saturating_add(reserved) > free {
            self.refusals += 1;
            return Ok(None);
        }

        let request = self.requests.get_or_insert(ask.request_id, geometry.sets.len());
        if let Some(hit) = hit {
            for (set, row) in request.rows.iter_mut().enumerate() {
                self.pool.add_ref(hit.row(set))?;
                row.blocks.extend_from_slice(hit.row(set));
                row.num_published = row.blocks.len();
            }
        }
        for (row, &with_external) in request.rows.iter_mut().zip(&self.new_from) {
            self.pool.take_into(with_external - row.blocks.len(), &mut row.blocks)?;
        }
        for (set, row) in request.rows.iter_mut().enumerate() {
            let missing = geometry.blocks_for(set, ask.num_tokens).saturating_sub(row.blocks.len());
            self.pool.take_into(missing, &mut row.blocks)?;
        }
        debug_assert!(self.is_consumed(hit, free, needed), "I5: the test and the allocation differ");
        self.allocations += 1;
        self.debug_audit();
        let request = self.requests.get(ask.request_id)?;
        Ok(Some(Allocation { request, set_of_group: &self.geometry.set_of_group, new_from: &self.new_from }))
    }

    /// I5: what the test counted is what the allocation took. Only a hit that names a block twice, from hashes that repeat,
    /// is counted for more than it takes.
    fn is_consumed(&self, hit: Option<&PrefixHit>, free_before: usize, needed: usize) -> bool {
        let taken = free_before - self.pool.num_free_blocks();
        taken == needed || (taken < needed && hit.is_some_and(PrefixHit::names_a_block_twice))
    }

    /// Refuses what cannot be meant. Returns the tokens that are there already or will be loaded.
    fn check_ask(&self, ask: &AllocateRequest<'_>, hit: Option<&PrefixHit>) -> Result<u64> {
        let AllocateRequest { request_id, num_tokens, num_external_tokens, .. } = *ask;
        let longest = self.config.max_model_len;
        if num_tokens == 0 || num_tokens > longest {
            return Err(Error::config(format!(
                "num_tokens must be between 1 and max_model_len {longest}, got {num_tokens}"
            )));
        }
        if let Some(hit) = ask.hit {
            self.check_fresh(hit)?;
        }
        let hit_tokens = hit.map_or(0, PrefixHit::num_tokens);
        if self.requests.contains(request_id) && (hit_tokens > 0 || num_external_tokens > 0) {
            return Err(Error::config(format!(
                "request {request_id:?} holds blocks already: a hit of {hit_tokens} and {num_external_tokens} external \
                 tokens can only come with its first allocation"
            )));
        }
        let computed = hit_tokens.saturating_add(num_external_tokens);
        if computed > num_tokens {
            return Err(Error::config(format!(
                "a hit of {hit_tokens} and {num_external_tokens} external tokens exceed num_tokens {num_tokens}"
            )));
        }
        Ok(computed)
    }
}
