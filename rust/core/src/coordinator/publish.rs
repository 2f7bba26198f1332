//! Making a request's computed blocks findable.

use super::config::Geometry;
use super::requests::{Row, Tail};
use super::{Coordinator, CoordinatorConfig};
use crate::error::{Error, Result};
use crate::groups::{Reach, Retention};
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
    /// The end of a prefix that requests share and some set has lost, 0 if there is none: windows keep the blocks before it.
    pub shared_prefix_boundary: u64,
}

impl Publication {
    /// So many leading tokens of a request with this prompt.
    pub fn new(num_tokens: u64, num_prompt_tokens: Option<u64>) -> Self {
        Self { num_tokens, num_prompt_tokens, shared_prefix_boundary: 0 }
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
        for set in 0..geometry.sets.len() {
            let lengths = row(set);
            let slots = (lengths.0 as u64).saturating_mul(geometry.span(set));
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
        let Self { config, geometry, pool, requests, .. } = self;
        if !config.enable_caching {
            return Ok(());
        }
        for (set, row) in requests.get_mut(request_id)?.rows.iter_mut().enumerate() {
            Plan::new(config, geometry, set, row.lengths(), publication).carry_out(request_id, hashes, row, pool)?;
        }
        self.debug_audit();
        Ok(())
    }
}

/// What is to be published of one row.
struct Plan {
    set: u32,
    tokens_per_block: u64,
    hash_block_tokens: u64,
    hashes_per_block: usize,
    retention: Retention,
    reach: Reach,
    /// Blocks of the row.
    first: usize,
    end: usize,
    /// Number of hashes up to and including the one that ends inside a block, and that block.
    tail: Option<(usize, usize)>,
}

impl Plan {
    fn new(
        config: &CoordinatorConfig,
        geometry: &Geometry,
        set: usize,
        (row_length, num_published): (usize, usize),
        publication: &Publication,
    ) -> Self {
        let &Publication { num_tokens, num_prompt_tokens, shared_prefix_boundary } = publication;
        let span = geometry.span(set);
        let hash_block_tokens = geometry.hash_block_tokens;
        let drops_last_block = geometry.classes[geometry.class_of_set[set]].drops_last_block;
        // Hits across groups are multiples of the alignment, so blocks behind the last multiple cannot be hit; a draft
        // model's group needs one more, which its lookups match and drop.
        let publishable = if config.groups.len() == 1 {
            num_tokens
        } else {
            let aligned = num_tokens - num_tokens % geometry.alignment;
            if drops_last_block && aligned > 0 { num_tokens.min(aligned.saturating_add(span)) } else { aligned }
        };
        let retention = geometry.retention(set);
        let tail = num_prompt_tokens.filter(|_| retention == Retention::Full).and_then(|prompt| {
            // A resent prompt can match all its tokens but the last; a draft model's lookup reads them all.
            let limit = if drops_last_block { prompt } else { prompt.saturating_sub(1) };
            let end = limit - limit % hash_block_tokens;
            let inside = !end.is_multiple_of(span) && end <= publishable;
            let block = usize::try_from(end / span).ok().filter(|&block| inside && block < row_length)?;
            Some((usize::try_from(end / hash_block_tokens).ok()?, block))
        });
        Self {
            #[allow(clippy::cast_possible_truncation, reason = "sets are numbered with 32 bits")]
            set: set as u32,
            tokens_per_block: span,
            hash_block_tokens,
            hashes_per_block: geometry.hashes_per_block(set),
            retention,
            reach: Reach {
                tokens_per_block: span,
                alignment: geometry.alignment,
                drops_last_block,
                interval: config.retention_interval,
                boundaries: geometry.resume_points(num_prompt_tokens, shared_prefix_boundary),
            },
            first: num_published,
            // Bounded by the row: num_tokens does not exceed its slots.
            end: usize::try_from(publishable / span).unwrap_or(row_length).max(num_published),
            tail,
        }
    }

    /// Whether a block of the row can ever be part of a hit.
    fn is_reachable(&self, at: usize) -> bool {
        self.retention.is_reachable(at as u64, &self.reach)
    }

    /// The hash of a block of the row.
    fn hash<H: BlockHashes + ?Sized>(&self, hashes: &H, block: usize) -> Result<BlockHash> {
        hashes.get((block + 1) * self.hashes_per_block - 1)
    }

    /// Refuses hashes that are too few or malformed.
    fn check<H: BlockHashes + ?Sized>(&self, hashes: &H) -> Result<()> {
        let for_blocks = if self.first < self.end { self.end * self.hashes_per_block } else { 0 };
        let needed = self.tail.map_or(for_blocks, |(count, _)| for_blocks.max(count));
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
        if let Some((count, _)) = self.tail {
            for at in count.saturating_sub(2)..count {
                hashes.get(at)?;
            }
        }
        Ok(())
    }

    fn carry_out<H: BlockHashes + ?Sized>(
        &self,
        request: &str,
        hashes: &H,
        row: &mut Row,
        pool: &mut BlockPool,
    ) -> Result<()> {
        if self.first < self.end {
            let mut keys = Vec::new();
            let mut starts = Vec::new();
            for at in self.first..self.end {
                let block = row.blocks[at];
                if block.is_null() || !self.is_reachable(at) {
                    continue;
                }
                let key = Key::of_block(self.hash(hashes, at)?.as_bytes(), self.set);
                replace_key(pool, block, key);
                if pool.events.enabled() {
                    keys.push(key);
                    starts.push(at as u64 * self.tokens_per_block);
                }
            }
            let parent = if self.first == 0 { None } else { Some(self.hash(hashes, self.first - 1)?) };
            pool.events.push(|| PoolEvent::Stored {
                request: request.into(),
                set: self.set,
                keys: keys.into(),
                starts: starts.into(),
                parent: parent.map(|hash| hash.as_bytes().into()),
                start_token: self.first as u64 * self.tokens_per_block,
                end_token: self.end as u64 * self.tokens_per_block,
                tokens_per_key: self.tokens_per_block,
            });
            row.num_published = self.end;
            // A full key takes the place of all that its block was known by.
            if row.tail.tokens / self.tokens_per_block < self.end as u64 {
                row.tail.stands_alone = false;
            }
        }
        if let Some((count, at)) = self.tail {
            let stands_alone = !pool.has_keys(row.blocks[at]) || at >= row.num_published;
            if self.publish_tail(request, hashes, count, row.blocks[at], at < row.num_published, pool)? {
                let tokens = count as u64 * self.hash_block_tokens;
                if tokens >= row.tail.tokens {
                    row.tail = Tail { tokens, stands_alone };
                }
            }
        }
        Ok(())
    }

    /// Publishes a block under the hash of a prefix that ends inside it. Returns whether it was not before.
    fn publish_tail<H: BlockHashes + ?Sized>(
        &self,
        request: &str,
        hashes: &H,
        count: usize,
        block: BlockId,
        block_is_published: bool,
        pool: &mut BlockPool,
    ) -> Result<bool> {
        let key = Key::of_block(hashes.get(count - 1)?.as_bytes(), self.set);
        if block.is_null() || pool.carries(block, &key) {
            return Ok(false);
        }
        if block_is_published {
            pool.insert_key(block, key);
        } else {
            replace_key(pool, block, key);
        }
        let parent = if count < 2 { None } else { Some(hashes.get(count - 2)?) };
        let start_token = (count as u64 - 1) * self.hash_block_tokens;
        pool.events.push(|| PoolEvent::Stored {
            request: request.into(),
            set: self.set,
            keys: Box::new([key]),
            starts: Box::new([start_token]),
            parent: parent.map(|hash| hash.as_bytes().into()),
            start_token,
            end_token: start_token + self.hash_block_tokens,
            tokens_per_key: self.hash_block_tokens,
        });
        Ok(true)
    }
}

/// Publishes a block under `key` alone: what it was known by so far covers fewer tokens than it holds now.
fn replace_key(pool: &mut BlockPool, block: BlockId, key: Key) {
    if pool.has_keys(block) && !pool.carries(block, &key) {
        pool.forget(block);
    }
    pool.insert_key(block, key);
}
