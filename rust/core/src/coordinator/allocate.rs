//! Giving a request the blocks for its tokens: first the hits are referenced in all sets, then blocks are taken for what
//! an external tier will load, then for what will be computed.

use super::need::Need;
use super::publish::Publication;
use super::requests::{Request, SharedTail};
use super::{Coordinator, PrefixHit};
use crate::error::{Error, Result};
use crate::groups::{Behaviour, Slots};
use crate::hash::BlockHashes;
use crate::ids::{BlockId, GroupId};
use crate::pool::BlockUse;

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub struct AllocateRequest<'a> {
    /// The request's name. A name that holds no blocks starts a new request.
    pub request_id: &'a str,
    /// Slots for this many tokens in all, the hit and speculative ones included.
    pub num_tokens: u64,
    /// Those of them that the model itself computes, without what a draft model writes behind them; `None` = all. States
    /// are kept for these only.
    pub main_tokens: Option<u64>,
    /// Tokens of the encoder, for cross attention; needed when the request starts.
    pub encoder_tokens: u64,
    /// A prefix found for this request; only when it starts.
    pub hit: Option<&'a PrefixHit>,
    /// Tokens behind the hit that an external tier will load; only when the request starts.
    pub num_external_tokens: u64,
    /// Groups for which the blocks of external tokens need not be cleared, because the load writes them while the step runs.
    /// What holds for one group holds for its lockstep set.
    pub uncleared_groups: &'a [GroupId],
    /// Free blocks that must be left over.
    pub reserved_blocks: u64,
    /// Refuse unless this many tokens would fit as well, whatever is reserved; 0 = do not ask.
    pub whole_tokens: u64,
    /// Free blocks that must be left over of both.
    pub watermark_blocks: u64,
    /// First give back what is not needed any more once so many tokens are processed. That is kept even if the request is
    /// refused.
    pub processed_tokens: u64,
    /// Tokens computed before this step, of a request that holds blocks.
    pub computed_tokens: u64,
    /// The prompt's length, for kinds that keep prompts longer than what follows.
    pub num_prompt_tokens: Option<u64>,
    /// Tokens at which the request's prefill ends; 0 = not known.
    pub prefill_end: u64,
}

impl<'a> AllocateRequest<'a> {
    /// Slots for `num_tokens` tokens, with no hit, nothing external and nothing reserved.
    pub fn new(request_id: &'a str, num_tokens: u64) -> Self {
        Self {
            request_id,
            num_tokens,
            main_tokens: None,
            encoder_tokens: 0,
            hit: None,
            num_external_tokens: 0,
            uncleared_groups: &[],
            reserved_blocks: 0,
            whole_tokens: 0,
            watermark_blocks: 0,
            processed_tokens: 0,
            computed_tokens: 0,
            num_prompt_tokens: None,
            prefill_end: 0,
        }
    }

    pub(super) fn slots(&self) -> Slots {
        let main_tokens = self.main_tokens.unwrap_or(self.num_tokens);
        Slots { tokens: self.num_tokens, main_tokens, encoder_tokens: self.encoder_tokens }
    }
}

/// Where the blocks that an allocation added stand in a row.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Added {
    /// A copy that took the place of a shared block.
    copy: Option<BlockId>,
    /// The first place behind what was there.
    from: usize,
}

/// What an allocation added to the request's rows.
#[derive(Debug)]
pub struct Allocation<'a> {
    request: &'a Request,
    set_of_group: &'a [usize],
    /// Per set.
    added: &'a [Added],
}

impl Allocation<'_> {
    /// The blocks newly added to the group's row, those of the hit and of external tokens left out: a copy of a shared block,
    /// then what the row got at its end, null blocks included. Empty if there is no such group.
    pub fn new_ids(&self, group: GroupId) -> impl Iterator<Item = BlockId> + '_ {
        let set = self.set_of_group.get(group.0 as usize);
        let of_set = set.map(|&set| (&self.added[set], &self.request.rows[set].blocks));
        of_set.into_iter().flat_map(|(added, row)| added.copy.into_iter().chain(row[added.from..].iter().copied()))
    }

    /// Whether nothing was added to any row.
    pub fn is_empty(&self) -> bool {
        let ends = self.request.rows.iter().map(|row| row.blocks.len());
        self.added.iter().zip(ends).all(|(added, end)| added.copy.is_none() && added.from == end)
    }
}

impl Coordinator {
    /// Gives a request slots for `num_tokens` tokens in all. `None` if too few blocks are free, or if the hit ends with a
    /// state that this step's requests have yet to write.
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
            let slots = self.geometry.row_length(set, &ask.slots());
            if let Some(request) = held {
                let (length, published) = request.rows[set].lengths();
                return (length.max(slots), published);
            }
            let (skipped, hit_row) = self.geometry.start_of_row(set, hit, computed);
            let start = skipped + hit_row.len();
            let loaded = self.geometry.external_blocks(set, computed, ask.num_external_tokens, start);
            let published = self.geometry.shared_place(set, hit, hit_row).unwrap_or(start);
            ((start + loaded).max(slots), published)
        };
        self.check_publication(ask.request_id, hashes, publication, row_at_end)?;
        if !self.take_slots(ask, hit, computed)? {
            return Ok(None);
        }
        self.publish(ask.request_id, hashes, publication)?;
        self.allocation(ask.request_id).map(Some)
    }

    /// What a request got last.
    fn allocation(&self, request_id: &str) -> Result<Allocation<'_>> {
        let request = self.requests.get(request_id)?;
        Ok(Allocation { request, set_of_group: &self.geometry.set_of_group, added: &self.added })
    }

    /// Refuses what does not fit, and otherwise appends to the request's rows and notes where its new blocks start.
    fn take_slots(&mut self, ask: &AllocateRequest<'_>, hit: Option<&PrefixHit>, computed: u64) -> Result<bool> {
        if ask.processed_tokens > 0 && self.requests.contains(ask.request_id) {
            self.release_skipped(ask.request_id, ask.processed_tokens, ask.num_prompt_tokens)?;
        }
        let free = self.pool.num_free_blocks();
        let Some(need) = self.fits(ask, hit, computed, free) else {
            self.refusals += 1;
            return Ok(false);
        };

        let is_new = !self.requests.contains(ask.request_id);
        self.requests.get_or_insert(ask.request_id, self.geometry.sets.len());
        self.plan_checkpoints(ask, computed)?;
        if is_new && computed > 0 {
            self.start_rows(ask, hit, computed)?;
        }
        self.extend_rows(ask)?;
        debug_assert!(self.is_consumed(hit, free, need.taken), "I5: the test and the allocation differ");
        self.allocations += 1;
        self.debug_audit();
        Ok(true)
    }

    /// What the allocation will take, if that and what it must leave over is free.
    fn fits(&self, ask: &AllocateRequest<'_>, hit: Option<&PrefixHit>, computed: u64, free: usize) -> Option<Need> {
        let blocks = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        let watermark = blocks(ask.watermark_blocks);
        // Even a request that needs no block is refused if fewer are free than must be left over.
        let need = self.need(ask, hit, computed, &ask.slots(), false);
        let left_over = blocks(ask.reserved_blocks).saturating_add(watermark);
        if need.asked.saturating_add(left_over) > free {
            return None;
        }
        if ask.whole_tokens > 0 {
            let slots = Slots { tokens: ask.whole_tokens, main_tokens: ask.whole_tokens, ..ask.slots() };
            let whole = self.need(ask, hit, computed, &slots, true);
            if whole.asked.saturating_add(watermark) > free {
                return None;
            }
        }
        Some(need)
    }

    /// Starts a new request's rows with its hit and with blocks for what will be loaded.
    fn start_rows(&mut self, ask: &AllocateRequest<'_>, hit: Option<&PrefixHit>, computed: u64) -> Result<()> {
        let Self { geometry, pool, requests, to_clear, config, .. } = self;
        let rows = &mut requests.get_mut(ask.request_id)?.rows;
        for (set, row) in rows.iter_mut().enumerate() {
            let (skipped, hit_row) = geometry.start_of_row(set, hit, computed);
            row.blocks.resize(skipped, BlockId::NULL);
            row.blocks.extend_from_slice(hit_row);
            row.num_published = row.blocks.len();
            if let (Some(place), Some(&block)) = (geometry.shared_place(set, hit, hit_row), hit_row.last()) {
                row.shared_tail = Some(SharedTail { place, block });
                row.num_published = place;
            }
            pool.add_ref_to_real(hit_row)?;
            pool.uses.extend(hit_row.iter().copied().filter(|block| !block.is_null()).map(BlockUse::Used));
        }
        for (set, row) in rows.iter_mut().enumerate() {
            let length = row.blocks.len();
            let loaded = geometry.external_blocks(set, computed, ask.num_external_tokens, length);
            pool.take_into(loaded, &mut row.blocks)?;
            let is_uncleared = || ask.uncleared_groups.iter().any(|group| geometry.sets[set].group_ids.contains(group));
            if config.notes_new_blocks && geometry.behaviour(set).is_cleared() && !is_uncleared() {
                to_clear[set].extend_from_slice(&row.blocks[length..]);
            }
        }
        Ok(())
    }

    /// Extends a request's rows to what is asked for, and puts copies where they end inside a shared block.
    fn extend_rows(&mut self, ask: &AllocateRequest<'_>) -> Result<()> {
        let slots = ask.slots();
        self.added.clear();
        for set in 0..self.geometry.sets.len() {
            let behaviour = self.geometry.behaviour(set);
            let required = self.geometry.row_length(set, &slots);
            let row = &mut self.requests.get_mut(ask.request_id)?.rows[set];
            let from = row.blocks.len();
            let is_running = row.states.has_run;
            let shared_tail = row.shared_tail();
            row.shared_tail = None;
            if let Behaviour::AlignedState(spec) = behaviour {
                let has_checkpoint = row.states.checkpoint.is_some();
                let growth = row.states.growth(spec, from, required, has_checkpoint, shared_tail.is_some());
                row.states.grow(spec, growth, &mut row.blocks);
            }
            let copy = match shared_tail {
                Some(tail) => self.copy_shared_tail(ask.request_id, set, tail, is_running)?,
                None => None,
            };
            let Self { pool, requests, to_clear, config, added, .. } = self;
            let row = &mut requests.get_mut(ask.request_id)?.rows[set].blocks;
            let length = row.len();
            pool.take_into(required.saturating_sub(length), row)?;
            if config.notes_new_blocks && behaviour.is_cleared() {
                to_clear[set].extend(copy);
                to_clear[set].extend_from_slice(&row[length..]);
            }
            added.push(Added { copy, from });
        }
        Ok(())
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
        if let Some(main_tokens) = ask.main_tokens
            && (main_tokens == 0 || main_tokens > longest)
        {
            return Err(Error::config(format!(
                "main_tokens must be between 1 and max_model_len {longest}, got {main_tokens}"
            )));
        }
        if let Some(hit) = ask.hit {
            self.check_fresh(hit)?;
        }
        let groups = self.config.groups.len();
        if let Some(group) = ask.uncleared_groups.iter().find(|group| group.0 as usize >= groups) {
            return Err(Error::config(format!("group {} does not exist: there are {groups} groups", group.0)));
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
