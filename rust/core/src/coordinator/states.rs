//! Recurrent states and shared blocks that end inside: what a step copies, what nobody can hit before the step has written
//! it, and what is handed to those who store states elsewhere.

use std::hash::{DefaultHasher, Hash};

use hashbrown::HashMap;

use super::Coordinator;
use super::publish::Plan;
use super::requests::{Row, SharedTail};
use crate::error::Result;
use crate::groups::mamba_align::{Checkpoint, Tail, resume_point};
use crate::hash::BlockHashes;
use crate::ids::{BlockId, GroupId};
use crate::pool::{BlockPool, BlockUse, Key};

/// A block that the step copies before it computes anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockCopy {
    /// The group, the first one of a lockstep set.
    pub group: GroupId,
    /// The block to read.
    pub from: BlockId,
    /// The block to write.
    pub to: BlockId,
}

/// A state that can be stored elsewhere once the step has written it. Its block is not kept for that: pin it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StateOffer {
    /// The request that computes it.
    pub request_id: Box<str>,
    /// The group.
    pub group: GroupId,
    /// The block that holds it.
    pub block: BlockId,
    /// The tokens before it.
    pub tokens: u64,
}

/// What steps have published and not written yet, by key: who finds the key of a state waits, whichever of its blocks it is
/// given. Two requests of one prompt publish the same key in one step.
#[derive(Debug, Default)]
pub(super) struct Unwritten {
    by_key: HashMap<Key, Vec<Writer>>,
}

/// Who writes a published block.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Writer {
    request: Box<str>,
    block: BlockId,
    /// Tokens up to the end of what is published.
    tokens: u64,
}

impl Unwritten {
    pub(super) fn note(&mut self, key: Key, request_id: &str, block: BlockId, tokens: u64) {
        self.by_key.entry(key).or_default().push(Writer { request: request_id.into(), block, tokens });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    pub(super) fn contains(&self, key: &Key) -> bool {
        self.by_key.contains_key(key)
    }

    /// Whether it is this block that is yet to be written. Others of the same key may be there.
    pub(super) fn is_in(&self, block: BlockId, key: &Key) -> bool {
        self.by_key.get(key).is_some_and(|writers| writers.iter().any(|writer| writer.block == block))
    }

    /// Keeps what `keeps` says of each key and writer.
    fn retain(&mut self, mut keeps: impl FnMut(&Key, &Writer) -> bool) {
        self.by_key.retain(|key, writers| {
            writers.retain(|writer| keeps(key, writer));
            !writers.is_empty()
        });
    }

    /// Feeds the state that later calls can observe into a hasher.
    pub(super) fn hash_state(&self, into: &mut DefaultHasher) {
        let mut sorted: Vec<_> = self.by_key.iter().map(|(key, writers)| (key.as_bytes(), writers)).collect();
        sorted.sort();
        sorted.hash(into);
    }
}

impl Coordinator {
    /// A new step begins: what earlier steps have published is written. Of the requests `in_flight`, whose last steps have not
    /// come back, that is so up to the tokens named.
    pub fn new_step(&mut self, in_flight: &[(&str, u64)]) {
        let processed: HashMap<&str, u64> = in_flight.iter().copied().collect();
        let is_in_flight = |writer: &Writer| processed.get(&*writer.request).is_some_and(|&end| writer.tokens > end);
        self.unwritten.retain(|_, writer| is_in_flight(writer));
    }

    /// Forgets the states behind `processed` tokens that a request has published, because it is given up before the steps that
    /// write them have come back.
    pub fn forget_unwritten(&mut self, request_id: &str, processed: u64) {
        let Self { unwritten, pool, geometry, .. } = self;
        unwritten.retain(|key, writer| {
            if *writer.request != *request_id || writer.tokens <= processed {
                return true;
            }
            // The block may have become somebody else's since.
            if geometry.behaviour(key.split_block().1 as usize).is_state() && pool.carries(writer.block, key) {
                pool.forget(writer.block);
            }
            false
        });
    }

    /// Hands out the copies that the step must make, one set after the other, in the order in which they were found
    /// necessary. Both blocks of each stay pinned until [`Coordinator::unpin`].
    pub fn take_block_copies(&mut self) -> Vec<BlockCopy> {
        self.copies.iter_mut().flat_map(std::mem::take).collect()
    }

    /// Hands out the states that requests of aligned states offer to be stored elsewhere, one set after the other.
    pub fn take_state_offers(&mut self) -> Vec<StateOffer> {
        self.offers.iter_mut().flat_map(std::mem::take).collect()
    }

    /// The blocks of a request that ends can be handed to others at once, so that what it has offered is withdrawn.
    pub(super) fn withdraw_offers(&mut self, request_id: &str) {
        self.offers.iter_mut().for_each(|offers| offers.retain(|offer| *offer.request_id != *request_id));
    }

    /// Takes from a request that ends the states inside a block that its last step has left as they are: no token behind
    /// them was computed.
    pub fn take_final_states(
        &mut self,
        request_id: &str,
        num_computed_tokens: u64,
        is_in_flight: bool,
    ) -> Vec<StateOffer> {
        let Self { requests, geometry, .. } = self;
        let Ok(request) = requests.get_mut(request_id) else { return Vec::new() };
        let mut offers = Vec::new();
        for (set, row) in request.rows.iter_mut().enumerate() {
            if let Some(tail) = row.states.tail.take()
                && !is_in_flight
                && tail.tokens == num_computed_tokens
            {
                let group = geometry.sets[set].group_ids[0];
                offers.push(StateOffer {
                    request_id: request_id.into(),
                    group,
                    block: tail.block,
                    tokens: tail.tokens,
                });
            }
        }
        offers
    }

    /// Hands out the blocks taken since the last call that must be cleared before they are used, one set after the other.
    /// Always empty unless the configuration asks for it.
    pub fn take_new_blocks(&mut self) -> Vec<BlockId> {
        self.to_clear.iter_mut().flat_map(std::mem::take).collect()
    }

    /// Notes a request's blocks from this token on as to be cleared: a load has left them unwritten.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`](crate::Error::UnknownRequest), or [`Error::Config`](crate::Error::Config) if the token is not
    /// the first of a block in every set whose blocks are cleared.
    pub fn note_unwritten(&mut self, request_id: &str, start_token: u64) -> Result<()> {
        let Self { requests, geometry, to_clear, config, .. } = self;
        let request = requests.get(request_id)?;
        let cleared = |set: usize| config.notes_new_blocks && geometry.behaviour(set).is_cleared();
        for set in (0..request.rows.len()).filter(|&set| cleared(set)) {
            let span = geometry.span(set);
            if !start_token.is_multiple_of(span) {
                return Err(crate::Error::config(format!(
                    "token {start_token} is not the first of a block of {span} tokens: clearing it would wipe what is before"
                )));
            }
        }
        for set in (0..request.rows.len()).filter(|&set| cleared(set)) {
            let first = usize::try_from(start_token / geometry.span(set)).unwrap_or(usize::MAX);
            let blocks = request.rows[set].blocks.get(first..).unwrap_or(&[]);
            to_clear[set].extend(blocks.iter().filter(|block| !block.is_null()));
        }
        Ok(())
    }

    /// Takes a block for a copy of the one that a row ends inside. A request that starts goes on with the copy, which is
    /// returned. One that runs keeps its block, as its table is known to the workers, and what was shared is found in the copy.
    pub(super) fn copy_shared_tail(
        &mut self,
        request_id: &str,
        set: usize,
        tail: SharedTail,
        is_running: bool,
    ) -> Result<Option<BlockId>> {
        let Self { pool, requests, pins, copies, offers, unwritten, geometry, .. } = self;
        let row = &mut requests.get_mut(request_id)?.rows[set];
        let SharedTail { place, block: source } = tail;
        let mut taken = Vec::with_capacity(1);
        pool.take_into(1, &mut taken)?;
        let copy = taken[0];
        let group = geometry.sets[set].group_ids[0];
        copies[set].push(BlockCopy { group, from: source, to: copy });
        *pins.entry(source).or_insert(0) += 1;
        *pins.entry(copy).or_insert(0) += 1;
        if !is_running {
            // The row's reference to the source becomes the pin.
            row.blocks[place] = copy;
            pool.add_ref(&[copy])?;
            return Ok(Some(copy));
        }
        pool.add_ref(&[source])?;
        pool.move_keys(source, copy);
        if let Some(Tail { tokens, .. }) = row.states.tail.take() {
            offers[set].push(StateOffer { request_id: request_id.into(), group, block: copy, tokens });
        }
        if let Some(key) = pool.first_key(copy) {
            unwritten.note(key, request_id, copy, pool.key_tokens(copy));
        }
        Ok(None)
    }
}

impl Plan {
    /// Publishes the state that a step ends with, or saves before its end, inside a block. Returns its key, its
    /// block and the tokens before it.
    pub(super) fn publish_state<H: BlockHashes + ?Sized>(
        &self,
        request: &str,
        hashes: &H,
        row: &mut Row,
        pool: &mut BlockPool,
    ) -> Result<Option<(Key, BlockId, u64)>> {
        match row.states.checkpoint {
            Some(checkpoint) => self.publish_checkpoint(request, hashes, checkpoint, row, pool),
            None => self.publish_last_state(request, hashes, row, pool),
        }
    }

    fn publish_checkpoint<H: BlockHashes + ?Sized>(
        &self,
        request: &str,
        hashes: &H,
        checkpoint: Checkpoint,
        row: &mut Row,
        pool: &mut BlockPool,
    ) -> Result<Option<(Key, BlockId, u64)>> {
        let Checkpoint { tokens, place } = checkpoint;
        let Some(&block) = row.blocks.get(place).filter(|block| !block.is_null()) else { return Ok(None) };
        let is_of_prompt =
            self.num_prompt_tokens.is_some_and(|prompt| tokens == self.resume_point(prompt, self.reach.alignment));
        let is_kept = tokens > 0
            && tokens.is_multiple_of(self.tokens_per_block)
            && self.is_kept_by_interval(tokens / self.tokens_per_block - 1);
        let count = usize::try_from(tokens / self.hash_block_tokens).unwrap_or(usize::MAX);
        if !(is_of_prompt || is_kept || tokens == self.shared_prefix_boundary) || count > hashes.count() {
            // The block is written over without being of use to anyone, so that its full key does not hold either.
            pool.forget(block);
            pool.uses.extend(std::iter::once(BlockUse::Dropped(block)));
            return Ok(None);
        }
        if pool.key_tokens(block) == tokens {
            return Ok(None);
        }
        pool.forget(block);
        self.publish_inside(request, hashes, count, block, pool).map(|key| Some((key, block, tokens)))
    }

    fn publish_last_state<H: BlockHashes + ?Sized>(
        &self,
        request: &str,
        hashes: &H,
        row: &mut Row,
        pool: &mut BlockPool,
    ) -> Result<Option<(Key, BlockId, u64)>> {
        let tokens = self.publishable;
        let Some(count) = self.state else { return Ok(None) };
        let place = usize::try_from(tokens.div_ceil(self.tokens_per_block)).unwrap_or(usize::MAX) - 1;
        let Some(&block) = row.blocks.get(place).filter(|block| !block.is_null()) else { return Ok(None) };
        if pool.key_tokens(block) > tokens {
            // The state is of later tokens already.
            return Ok(None);
        }
        let key = self.publish_inside(request, hashes, count, block, pool)?;
        if !tokens.is_multiple_of(self.tokens_per_block) {
            // The next step goes on in this block.
            row.shared_tail = Some(SharedTail { place, block });
            row.num_published = place;
            row.states.tail = Some(Tail { block, tokens });
        }
        Ok(Some((key, block, tokens)))
    }

    /// The number of hashes up to a state that the step ends with, if a later request can resume at it.
    pub(super) fn last_state(&self, row_length: usize) -> Option<usize> {
        let (tokens, unit) = (self.publishable, self.hash_block_tokens);
        let prompt = self.num_prompt_tokens?;
        let ends_shared_prefix = self.publishes_shared_prefix
            && tokens == self.shared_prefix_boundary
            && self.computed_tokens < tokens
            && tokens <= prompt;
        let resumes = tokens == self.resume_point(prompt, unit) || ends_shared_prefix;
        let place = usize::try_from(tokens.div_ceil(self.tokens_per_block)).ok()?.checked_sub(1)?;
        if tokens > 0 && tokens.is_multiple_of(unit) && resumes && place < row_length {
            usize::try_from(tokens / unit).ok()
        } else {
            None
        }
    }

    fn resume_point(&self, tokens: u64, alignment: u64) -> u64 {
        resume_point(tokens, alignment, self.has_draft)
    }
}
