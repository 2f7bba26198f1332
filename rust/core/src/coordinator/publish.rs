//! Making a request's computed blocks findable.

use super::geometry::Geometry;
use super::requests::Row;
use super::states::StateOffer;
use super::{Coordinator, CoordinatorConfig};
use crate::error::{Error, Result};
use crate::groups::{Behaviour, Reach};
use crate::hash::{BlockHash, BlockHashes};
use crate::ids::BlockId;
use crate::pool::events::PoolEvent;
use crate::pool::{BlockPool, Key};

/// What is to be published of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Publication {
    /// The full blocks of so many leading tokens.
    pub num_tokens: u64,
    /// The prompt's length. With it, sets whose blocks span several hashes also publish the last whole hash of the prompt if
    /// it ends inside a block, as vLLM does; the block's full key replaces it later. Where windows keep only some of their
    /// blocks, those before the prompt's end are kept.
    pub num_prompt_tokens: Option<u64>,
    /// The end of a prefix that requests share and some set has lost, 0 if there is none: windows keep the blocks before it,
    /// and states the one at it.
    pub shared_prefix_boundary: u64,
    /// Tokens computed before this step.
    pub computed_tokens: u64,
}

impl Publication {
    /// So many leading tokens of a request with this prompt.
    pub fn new(num_tokens: u64, num_prompt_tokens: Option<u64>) -> Self {
        Self { num_tokens, num_prompt_tokens, shared_prefix_boundary: 0, computed_tokens: 0 }
    }
}

impl Coordinator {
    /// Publishes what of this is not published yet.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`]; [`Error::Config`] if `num_tokens` exceeds the request's slots, if `hashes` are too few
    /// or if one that is needed is not a block hash.
    pub fn cache<H: BlockHashes + ?Sized>(
        &mut self,
        request_id: &str,
        hashes: &H,
        publication: &Publication,
    ) -> Result<()> {
        let request = self.requests.get(request_id)?;
        let row = |set: usize| request.rows[set].lengths();
        self.check_publication(request_id, hashes, publication, row)?;
        self.publish(request_id, hashes, publication)
    }

    /// Refuses what [`Coordinator::publish`] could not do in all sets. `row` tells for a set the length of the request's
    /// row, and how many of its leading blocks are published already.
    pub(super) fn check_publication<H: BlockHashes + ?Sized>(
        &self,
        request_id: &str,
        hashes: &H,
        publication: &Publication,
        row: impl Fn(usize) -> (usize, usize),
    ) -> Result<()> {
        let Self { config, geometry, .. } = self;
        if !config.enable_caching {
            return Ok(());
        }
        for set in (0..geometry.sets.len()).filter(|&set| geometry.is_found(set)) {
            let lengths = row(set);
            let places = lengths.0.saturating_sub(geometry.behaviour(set).num_draft_places());
            let slots = (places as u64).saturating_mul(geometry.span(set));
            let num_tokens = publication.num_tokens;
            if num_tokens > slots {
                return Err(Error::config(format!(
                    "num_tokens {num_tokens} exceeds the {slots} slots of request {request_id:?}"
                )));
            }
            Plan::new(config, geometry, set, lengths, publication).check(hashes)?;
        }
        Ok(())
    }

    /// [`Coordinator::cache`] after [`Coordinator::check_publication`].
    pub(super) fn publish<H: BlockHashes + ?Sized>(
        &mut self,
        request_id: &str,
        hashes: &H,
        publication: &Publication,
    ) -> Result<()> {
        let Self { config, geometry, pool, requests, unwritten, offers, .. } = self;
        if !config.enable_caching {
            return Ok(());
        }
        for (set, row) in requests.get_mut(request_id)?.rows.iter_mut().enumerate() {
            if !geometry.is_found(set) {
                continue;
            }
            let plan = Plan::new(config, geometry, set, row.lengths(), publication);
            let first = row.num_published;
            let new_tail = plan.new_tail(hashes, row, pool)?;
            plan.publish_blocks(request_id, hashes, row, pool)?;
            let end = row.num_published;
            if !plan.behaviour.is_state() {
                plan.publish_tail(request_id, hashes, row, pool)?;
                if let Some((key, block, tokens)) = new_tail {
                    // Whoever hits it copies the block before this step writes anything.
                    unwritten.note(key, request_id, block, tokens);
                }
                continue;
            }
            let is_aligned = matches!(plan.behaviour, Behaviour::AlignedState(_));
            if is_aligned && let Some((key, block, tokens)) = plan.publish_state(request_id, hashes, row, pool)? {
                unwritten.note(key, request_id, block, tokens);
            }
            for &block in row.blocks[first..end].iter().filter(|block| !block.is_null()) {
                let Some(key) = pool.first_key(block) else { continue };
                let tokens = pool.key_tokens(block);
                unwritten.note(key, request_id, block, tokens);
                if is_aligned {
                    let group = geometry.sets[set].group_ids[0];
                    offers[set].push(StateOffer { request_id: request_id.into(), group, block, tokens });
                }
            }
        }
        self.debug_audit();
        Ok(())
    }
}

/// What is to be published of one row.
pub(super) struct Plan {
    set: u32,
    pub(super) tokens_per_block: u64,
    pub(super) hash_block_tokens: u64,
    hashes_per_block: usize,
    behaviour: Behaviour,
    pub(super) reach: Reach,
    /// Leading tokens of which blocks can be published.
    pub(super) publishable: u64,
    pub(super) num_prompt_tokens: Option<u64>,
    pub(super) shared_prefix_boundary: u64,
    pub(super) computed_tokens: u64,
    pub(super) publishes_shared_prefix: bool,
    pub(super) has_draft: bool,
    /// Blocks of the row.
    first: usize,
    end: usize,
    /// Number of hashes up to and including the last whole one of the prompt if it ends inside a block, and that block.
    tail: Option<(usize, usize)>,
    /// Number of hashes up to a state that the step ends with.
    pub(super) state: Option<usize>,
}

impl Plan {
    fn new(
        config: &CoordinatorConfig,
        geometry: &Geometry,
        set: usize,
        (row_length, num_published): (usize, usize),
        publication: &Publication,
    ) -> Self {
        let &Publication { num_tokens, num_prompt_tokens, shared_prefix_boundary, computed_tokens } = publication;
        let span = geometry.span(set);
        let hash_block_tokens = geometry.hash_block_tokens;
        let drops_last_block = geometry.drops_last_block(set);
        let publishable = geometry.publishable(config, set, num_tokens);
        let behaviour = geometry.behaviour(set);
        let keeps_all = behaviour.is_downward_closed() && span > hash_block_tokens;
        let tail = num_prompt_tokens.filter(|_| keeps_all).and_then(|prompt| {
            // A resent prompt can match all its tokens but the last; a draft model's lookup reads them all.
            let limit = if drops_last_block { prompt } else { prompt.saturating_sub(1) };
            let end = limit - limit % hash_block_tokens;
            let inside = !end.is_multiple_of(span) && end <= publishable;
            let block = usize::try_from(end / span).ok().filter(|&block| inside && block < row_length)?;
            Some((usize::try_from(end / hash_block_tokens).ok()?, block))
        });
        let mut plan = Self {
            #[allow(clippy::cast_possible_truncation, reason = "sets are numbered with 32 bits")]
            set: set as u32,
            tokens_per_block: span,
            hash_block_tokens,
            hashes_per_block: geometry.hashes_per_block(set),
            behaviour,
            reach: Reach {
                tokens_per_block: span,
                alignment: geometry.alignment,
                drops_last_block,
                interval: config.retention_interval,
                boundaries: geometry.resume_points(num_prompt_tokens, shared_prefix_boundary),
            },
            publishable,
            num_prompt_tokens,
            shared_prefix_boundary,
            computed_tokens,
            publishes_shared_prefix: geometry.publishes_shared_prefix,
            has_draft: config.use_eagle,
            first: num_published,
            // Bounded by the row: num_tokens does not exceed its slots.
            end: usize::try_from(publishable / span).unwrap_or(row_length).max(num_published),
            tail,
            state: None,
        };
        // A step's last state is that of all its tokens. Where a draft model may compute the last ones again, the state before
        // them is nowhere, unless it is that of a full block.
        let is_there = config.num_prefill_lookahead <= 1 || publishable.is_multiple_of(span);
        if matches!(behaviour, Behaviour::AlignedState(_)) && is_there {
            plan.state = plan.last_state(row_length);
        }
        plan
    }

    /// Whether a block of the row can ever be part of a hit.
    fn is_reachable(&self, at: usize) -> bool {
        self.behaviour.is_reachable(at as u64, &self.reach)
    }

    /// Whether a block of the row is kept wherever requests resume.
    pub(super) fn is_kept_by_interval(&self, at: u64) -> bool {
        self.behaviour.is_reachable(at, &Reach { boundaries: [None; 3], ..self.reach })
    }

    /// The hash of a block of the row.
    fn hash<H: BlockHashes + ?Sized>(&self, hashes: &H, block: usize) -> Result<BlockHash> {
        hashes.get((block + 1) * self.hashes_per_block - 1)
    }

    /// Refuses hashes that are too few or malformed.
    fn check<H: BlockHashes + ?Sized>(&self, hashes: &H) -> Result<()> {
        let for_blocks = if self.first < self.end { self.end * self.hashes_per_block } else { 0 };
        let inside = [self.tail.map(|(count, _)| count), self.state];
        let needed = inside.into_iter().flatten().fold(for_blocks, usize::max);
        if needed > hashes.count() {
            let per = self.hash_block_tokens;
            return Err(Error::config(format!(
                "block_hashes holds {} hashes of {per} tokens, but {needed} are needed",
                hashes.count()
            )));
        }
        if self.first < self.end {
            for block in self.first.saturating_sub(1)..self.end {
                self.hash(hashes, block)?;
            }
        }
        for count in inside.into_iter().flatten() {
            for at in count.saturating_sub(2)..count {
                hashes.get(at)?;
            }
        }
        Ok(())
    }

    /// Publishes the row's full blocks.
    fn publish_blocks<H: BlockHashes + ?Sized>(
        &self,
        request: &str,
        hashes: &H,
        row: &mut Row,
        pool: &mut BlockPool,
    ) -> Result<()> {
        if self.first >= self.end {
            return Ok(());
        }
        let mut told = Vec::new();
        for at in self.first..self.end {
            let block = row.blocks[at];
            if block.is_null() || !self.is_reachable(at) {
                continue;
            }
            let key = Key::of_block(self.hash(hashes, at)?.as_bytes(), self.set);
            // What the block was known by so far covers fewer tokens than it holds now.
            if pool.has_keys(block) && !pool.carries(block, &key) {
                pool.forget(block);
            }
            pool.insert_key(block, key, (at as u64 + 1) * self.tokens_per_block);
            if pool.events.enabled() {
                told.push((at, key));
            }
        }
        for run in told.chunk_by(|(before, _), (after, _)| before + 1 == *after) {
            self.tell_stored(request, hashes, run, pool)?;
        }
        row.num_published = self.end;
        Ok(())
    }

    /// Notes that blocks side by side became findable. Readers hang them on the hash before them, which those kinds that
    /// publish only some blocks may not have reported.
    fn tell_stored<H: BlockHashes + ?Sized>(
        &self,
        request: &str,
        hashes: &H,
        run: &[(usize, Key)],
        pool: &mut BlockPool,
    ) -> Result<()> {
        let first = run.first().map_or(0, |(at, _)| *at);
        let before = if first == 0 { None } else { Some(self.hash(hashes, first - 1)?) };
        let is_reported = |hash: &BlockHash| {
            self.behaviour.is_downward_closed() || pool.lookup(&Key::of_block(hash.as_bytes(), self.set)).is_some()
        };
        let parent = before.filter(is_reported);
        let start = |at: usize| at as u64 * self.tokens_per_block;
        pool.events.push(|| PoolEvent::Stored {
            request: request.into(),
            set: self.set,
            keys: run.iter().map(|(_, key)| *key).collect(),
            starts: run.iter().map(|(at, _)| start(*at)).collect(),
            parent: parent.map(|hash| hash.as_bytes().into()),
            start_token: start(first),
            end_token: start(first + run.len()),
            tokens_per_key: self.tokens_per_block,
        });
        Ok(())
    }

    /// The number of hashes up to the prompt's last whole one where it ends inside a block that keeps all it holds, and that
    /// block.
    fn held_tail(&self, row: &Row) -> Option<(usize, BlockId)> {
        let (count, at) = self.tail?;
        row.blocks.get(at).filter(|block| !block.is_null()).map(|&block| (count, block))
    }

    /// The held tail's key, its block and the tokens before its end, if the block is not known by it.
    fn new_tail<H: BlockHashes + ?Sized>(
        &self,
        hashes: &H,
        row: &Row,
        pool: &BlockPool,
    ) -> Result<Option<(Key, BlockId, u64)>> {
        let Some((count, block)) = self.held_tail(row) else { return Ok(None) };
        let key = Key::of_block(hashes.get(count - 1)?.as_bytes(), self.set);
        Ok((!pool.carries(block, &key)).then_some((key, block, count as u64 * self.hash_block_tokens)))
    }

    /// Publishes the held tail.
    fn publish_tail<H: BlockHashes + ?Sized>(
        &self,
        request: &str,
        hashes: &H,
        row: &Row,
        pool: &mut BlockPool,
    ) -> Result<()> {
        if let Some((count, block)) = self.held_tail(row) {
            self.publish_inside(request, hashes, count, block, pool)?;
        }
        Ok(())
    }

    /// Publishes a held block under the hash number `count`, counted from 1, which ends inside it.
    pub(super) fn publish_inside<H: BlockHashes + ?Sized>(
        &self,
        request: &str,
        hashes: &H,
        count: usize,
        block: BlockId,
        pool: &mut BlockPool,
    ) -> Result<Key> {
        let key = Key::of_block(hashes.get(count - 1)?.as_bytes(), self.set);
        if pool.carries(block, &key) {
            return Ok(key);
        }
        let tokens = count as u64 * self.hash_block_tokens;
        if pool.has_keys(block) && pool.key_tokens(block) < tokens {
            pool.forget(block);
        }
        pool.insert_key(block, key, tokens);
        let parent = if count < 2 { None } else { Some(hashes.get(count - 2)?) };
        let start_token = tokens - self.hash_block_tokens;
        pool.events.push(|| PoolEvent::Stored {
            request: request.into(),
            set: self.set,
            keys: Box::new([key]),
            starts: Box::new([start_token]),
            parent: parent.map(|hash| hash.as_bytes().into()),
            start_token,
            end_token: tokens,
            tokens_per_key: self.hash_block_tokens,
        });
        Ok(key)
    }
}
