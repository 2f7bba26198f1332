//! Giving a request the blocks for its tokens: first the hits are referenced in all sets, then blocks are taken for what
//! an external tier will load, then for what will be computed.

use super::publish::Publication;
use super::requests::Request;
use super::{Coordinator, PrefixHit};
use crate::error::{Error, Result};
use crate::hash::BlockHashes;
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
    /// Refuse unless this many tokens would fit as well, whatever is reserved; 0 = do not ask.
    pub whole_tokens: u64,
    /// Free blocks that must be left over of both.
    pub watermark_blocks: u64,
    /// First give back what is not needed any more once so many tokens are processed. That is kept even if the request is
    /// refused.
    pub processed_tokens: u64,
}

impl<'a> AllocateRequest<'a> {
    /// Slots for `num_tokens` tokens, with no hit, nothing external and nothing reserved.
    pub fn new(request_id: &'a str, num_tokens: u64) -> Self {
        Self {
            request_id,
            num_tokens,
            hit: None,
            num_external_tokens: 0,
            reserved_blocks: 0,
            whole_tokens: 0,
            watermark_blocks: 0,
            processed_tokens: 0,
        }
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
        if self.take_slots(ask, hit, computed)? { self.allocation(ask.request_id).map(Some) } else { Ok(None) }
    }

    /// [`Coordinator::allocate`] and then [`Coordinator::cache`], if the slots are there. Either both are done or nothing
    /// is.
    ///
    /// # Errors
    /// As those two.
    pub fn allocate_and_cache<H: BlockHashes + ?Sized>(
        &mut self,
        ask: &AllocateRequest<'_>,
        hashes: &H,
        publication: &Publication,
    ) -> Result<Option<Allocation<'_>>> {
        let hit = ask.hit.filter(|hit| hit.num_tokens() > 0);
        let computed = self.check_ask(ask, hit)?;
        let held = self.requests.get(ask.request_id).ok();
        let row_at_end = |set: usize| {
            let slots = self.geometry.blocks_for(set, computed.max(ask.num_tokens));
            if let Some(request) = held {
                let (length, published) = request.rows[set].lengths();
                return (length.max(slots), published);
            }
            let (skipped, hit_row) = self.geometry.start_of_row(set, hit, computed);
            let start = skipped + hit_row.len();
            (start.max(slots), start)
        };
        self.check_publication(ask.request_id, hashes, publication, row_at_end)?;
        if !self.take_slots(ask, hit, computed)? {
            return Ok(None);
        }
        self.publish(ask.request_id, hashes, publication)?;
        self.allocation(ask.request_id).map(Some)
    }

    /// How many blocks that are free now a request would take to have slots for `num_tokens` tokens, the idle ones of a
    /// hit included. A question only: more tokens than `max_model_len` may be asked for. `computed_tokens`: what a new request
    /// finds or has loaded. `capped`: windows and chunks count for what they hold at most at a time.
    ///
    /// # Errors
    /// [`Error::Config`] or [`Error::StaleHit`] if the hit cannot be used.
    pub fn blocks_needed(
        &self,
        request_id: &str,
        num_tokens: u64,
        hit: Option<&PrefixHit>,
        computed_tokens: u64,
        capped: bool,
    ) -> Result<usize> {
        hit.map_or(Ok(()), |hit| self.check_fresh(hit))?;
        Ok(self.count(request_id, hit, computed_tokens, num_tokens, capped))
    }

    /// What a request got last.
    fn allocation(&self, request_id: &str) -> Result<Allocation<'_>> {
        let request = self.requests.get(request_id)?;
        Ok(Allocation { request, set_of_group: &self.geometry.set_of_group, new_from: &self.new_from })
    }

    /// The free blocks that a request would take to have slots for `num_tokens` tokens, over all sets. What is counted
    /// here is what is taken: hits that nobody holds leave the queue as well.
    fn count(&self, request_id: &str, hit: Option<&PrefixHit>, computed: u64, num_tokens: u64, capped: bool) -> usize {
        let held = self.requests.get(request_id).ok();
        let longest = self.config.max_model_len;
        let in_flight = self.config.max_in_flight_tokens.unwrap_or(longest);
        let mut needed = 0_usize;
        for set in 0..self.geometry.sets.len() {
            let geometry = &self.geometry;
            let mut at_end = geometry.blocks_for(set, computed.max(num_tokens));
            if let (true, Some(most)) =
                (capped, geometry.retention(set).most_blocks(geometry.span(set), in_flight, longest))
            {
                at_end = at_end.min(usize::try_from(most).unwrap_or(usize::MAX));
            }
            let (there, hit_row) = if let Some(request) = held {
                (request.rows[set].blocks.len(), &[][..])
            } else {
                let (skipped, hit_row) = geometry.start_of_row(set, hit, computed);
                (skipped + hit_row.len(), hit_row)
            };
            let idle = hit_row.iter().filter(|&&block| self.pool.is_free(block)).count();
            needed = needed.saturating_add(at_end.saturating_sub(there)).saturating_add(idle);
        }
        needed
    }

    /// Refuses what does not fit, and otherwise appends to the request's rows and notes where its new blocks start.
    fn take_slots(&mut self, ask: &AllocateRequest<'_>, hit: Option<&PrefixHit>, computed: u64) -> Result<bool> {
        if ask.processed_tokens > 0 && self.requests.contains(ask.request_id) {
            self.release_skipped(ask.request_id, ask.processed_tokens)?;
        }
        let free = self.pool.num_free_blocks();
        let blocks = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        let needed = self.count(ask.request_id, hit, computed, ask.num_tokens, false);
        let left_over = blocks(ask.reserved_blocks).saturating_add(blocks(ask.watermark_blocks));
        // Even a request that needs no block is refused if fewer are free than must be left over.
        let fits = needed.saturating_add(left_over) <= free;
        let whole_fits = || {
            let needed = self.count(ask.request_id, hit, computed, ask.whole_tokens, true);
            needed.saturating_add(blocks(ask.watermark_blocks)) <= free
        };
        if !fits || (ask.whole_tokens > 0 && !whole_fits()) {
            self.refusals += 1;
            return Ok(false);
        }

        let is_new = !self.requests.contains(ask.request_id);
        let starts = is_new && computed > 0;
        let geometry = &self.geometry;
        let request = self.requests.get_or_insert(ask.request_id, geometry.sets.len());
        if starts {
            for (set, row) in request.rows.iter_mut().enumerate() {
                let (skipped, hit_row) = geometry.start_of_row(set, hit, computed);
                row.blocks.resize(skipped, BlockId::NULL);
                row.blocks.extend_from_slice(hit_row);
                row.num_published = row.blocks.len();
                self.pool.add_ref_to_real(hit_row)?;
            }
        }
        self.new_from.clear();
        for (set, row) in request.rows.iter_mut().enumerate() {
            let external = if starts && geometry.has_external(set, computed, ask.num_external_tokens) {
                geometry.blocks_for(set, computed).saturating_sub(row.blocks.len())
            } else {
                0
            };
            self.pool.take_into(external, &mut row.blocks)?;
            self.new_from.push(row.blocks.len());
        }
        for (set, row) in request.rows.iter_mut().enumerate() {
            let missing = geometry.blocks_for(set, ask.num_tokens).saturating_sub(row.blocks.len());
            self.pool.take_into(missing, &mut row.blocks)?;
        }
        debug_assert!(self.is_consumed(hit, free, needed), "I5: the test and the allocation differ");
        self.allocations += 1;
        self.debug_audit();
        Ok(true)
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
