//! Which of a request's leading tokens are in the pool already, in all sets at once.

use super::Coordinator;
use super::classes::LookupClass;
use crate::error::{Error, Result};
use crate::groups::{self, Query};
use crate::hash::BlockHashes;
use crate::ids::{BlockId, GroupId};
use crate::pool::Generation;

/// A prefix found in the pool. It holds no references: it goes stale when one of its blocks loses its keys, and
/// using it then is an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixHit {
    coordinator: u64,
    num_tokens: u64,
    /// The most tokens that any set could offer.
    longest: u64,
    /// One per set.
    rows: Vec<HitRow>,
    set_of_group: Vec<usize>,
    /// The pool's count of losses at the lookup; while it stands, no block can have gone stale.
    losses: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct HitRow {
    blocks: Vec<BlockId>,
    generations: Vec<Generation>,
}

impl PrefixHit {
    /// Tokens found; the same for every group.
    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
    }

    /// Tokens behind the hit that a set which was looked up earlier has and a later one lacks: a prefix that requests
    /// share, but that is not cached everywhere. Like vLLM's figure it depends on the order of the groups.
    pub fn num_uncached_tokens(&self) -> u64 {
        self.longest - self.num_tokens
    }

    /// Number of groups.
    pub fn num_groups(&self) -> usize {
        self.set_of_group.len()
    }

    /// The blocks found for a group, in the order of the tokens; empty if there is no such group.
    pub fn block_ids(&self, group: GroupId) -> &[BlockId] {
        self.set_of_group.get(group.0 as usize).map_or(&[], |&set| self.row(set))
    }

    /// Whether hashes that repeat have led to one block twice.
    pub(super) fn names_a_block_twice(&self) -> bool {
        let mut seen = hashbrown::HashSet::new();
        self.rows.iter().flat_map(|row| &row.blocks).any(|block| !block.is_null() && !seen.insert(*block))
    }

    /// The blocks found for a set.
    pub(super) fn row(&self, set: usize) -> &[BlockId] {
        &self.rows[set].blocks
    }
}

impl Coordinator {
    /// Finds the longest prefix of at most `max_tokens` tokens whose blocks all sets have.
    ///
    /// `hashes` holds one hash per [`Coordinator::hash_block_tokens`] tokens. As the last token of a prompt must be
    /// computed to go on from it, callers pass the number of tokens less one.
    ///
    /// # Errors
    /// [`Error::Config`] if one of the hashes that are looked at is not a block hash.
    pub fn find_longest_hit<H: BlockHashes + ?Sized>(&mut self, hashes: &H, max_tokens: u64) -> Result<PrefixHit> {
        let mut rows = vec![Vec::new(); self.geometry.sets.len()];
        let (num_tokens, longest) =
            if self.config.enable_caching { self.longest_common(hashes, max_tokens, &mut rows)? } else { (0, 0) };
        self.lookups += 1;
        self.lookup_tokens = self.lookup_tokens.saturating_add(max_tokens);
        self.hit_tokens += num_tokens;
        let rows = rows.into_iter().map(|blocks| self.hit_row(blocks)).collect();
        Ok(self.hit(num_tokens, longest, rows))
    }

    /// The longest length that every class accepts. Each class in turn accepts the length so far or lowers it; a lower
    /// length is offered to all again until none objects. Also tells the most that any class could offer.
    fn longest_common<H: BlockHashes + ?Sized>(
        &self,
        hashes: &H,
        max_tokens: u64,
        rows: &mut [Vec<BlockId>],
    ) -> Result<(u64, u64)> {
        let geometry = &self.geometry;
        if geometry.classes.is_empty() {
            return Ok((0, 0));
        }
        let alone = self.config.groups.len() == 1;
        let mut longest = 0;
        let mut found = vec![None; geometry.classes.len()];
        // Classes that have left their last block at the length so far: it is left once per length.
        let mut left = vec![false; geometry.classes.len()];
        let mut class_rows = Vec::new();
        let mut candidate = max_tokens;
        loop {
            let mut length = candidate;
            for (at, class) in geometry.classes.iter().enumerate() {
                if let (true, Some(tokens)) = (class.behaviour.is_downward_closed(), found[at]) {
                    length = length.min(tokens);
                    continue;
                }
                let drop = class.drops_last_block && !left[at];
                let accepted = self.look_up_class(class, drop, hashes, length, &mut class_rows)?;
                if drop {
                    left[at] = true;
                } else if accepted < length {
                    left.fill(false);
                }
                length = accepted;
                found[at] = Some(length);
                longest = longest.max(length);
                for (&set, row) in class.sets.iter().zip(&mut class_rows) {
                    rows[set as usize] = std::mem::take(row);
                }
            }
            let settled = length >= candidate;
            candidate = length;
            // One group has nobody to agree with. With two classes of which the first accepts any shorter length, the
            // second one's answer is the answer.
            let two = geometry.classes.len() == 2 && geometry.classes[0].behaviour.is_downward_closed();
            if settled || alone || two {
                break;
            }
        }
        for (set, row) in rows.iter_mut().enumerate() {
            if geometry.behaviour(set).is_downward_closed() {
                groups::trim(std::slice::from_mut(row), candidate, geometry.span(set));
            }
        }
        Ok((candidate, longest))
    }

    /// The longest prefix of about `length` tokens that all sets of a class have, and its blocks.
    fn look_up_class<H: BlockHashes + ?Sized>(
        &self,
        class: &LookupClass,
        drop_last_block: bool,
        hashes: &H,
        length: u64,
        class_rows: &mut Vec<Vec<BlockId>>,
    ) -> Result<u64> {
        let geometry = &self.geometry;
        // With several groups a class that will drop its last block, or hash, may match one more, so that the drop lands on
        // the length offered. A single group matches within the length and drops below it, as vLLM does.
        let drops = drop_last_block && class.behaviour.drops_last_block() && self.config.groups.len() > 1;
        let is_fine_grained = geometry.is_fine_grained && class.behaviour.can_end_inside_a_block();
        let unit = if is_fine_grained { geometry.hash_block_tokens } else { class.tokens_per_block };
        let margin = if drops { unit } else { 0 };
        let hashed_tokens = (hashes.count() as u64).saturating_mul(geometry.hash_block_tokens);
        let query = Query {
            pool: &self.pool,
            hashes,
            hashes_per_block: geometry.hashes_per_block(class.sets[0] as usize),
            tokens_per_block: class.tokens_per_block,
            max_tokens: if margin > 0 { length.saturating_add(margin).min(hashed_tokens) } else { length },
            alignment: geometry.alignment,
            drop_last_block,
        };
        class_rows.resize_with(class.sets.len(), Vec::new);
        class.behaviour.find_hit(&query, &class.sets, class_rows)
    }

    /// What each group would find by itself: its blocks, and the tokens they hold. A lookup that other groups cannot
    /// shorten; nothing can be allocated with it.
    ///
    /// # Errors
    /// As [`Coordinator::find_longest_hit`].
    pub fn find_hit_per_group<H: BlockHashes + ?Sized>(
        &self,
        hashes: &H,
        max_tokens: u64,
    ) -> Result<Vec<(Vec<BlockId>, u64)>> {
        let mut of_set = vec![(Vec::new(), 0); self.geometry.sets.len()];
        let classes = if self.config.enable_caching { &self.geometry.classes[..] } else { &[] };
        for class in classes {
            let mut rows = Vec::new();
            let tokens = self.look_up_class(class, class.drops_last_block, hashes, max_tokens, &mut rows)?;
            for (&set, row) in class.sets.iter().zip(rows) {
                of_set[set as usize] = (row, tokens);
            }
        }
        Ok(self.geometry.set_of_group.iter().map(|&set| of_set[set].clone()).collect())
    }

    /// A hit on blocks that the caller knows to hold a request's first `num_tokens` tokens, one row per group. Groups whose
    /// blocks are never shared have empty rows, and those of windows and states may end before the hit if the rest will be
    /// loaded.
    ///
    /// # Errors
    /// [`Error::Config`] if the rows are not those of `num_tokens` tokens in every group, if groups of one set have
    /// different rows, or if a block does not exist, is the null block or cannot be found by any hash.
    pub fn hit_of(&self, rows: &[&[BlockId]], num_tokens: u64) -> Result<PrefixHit> {
        let (geometry, groups) = (&self.geometry, self.config.groups.len());
        if rows.len() != groups {
            return Err(Error::config(format!("there must be one row per group: {groups}, got {}", rows.len())));
        }
        let mut of_set: Vec<Option<&[BlockId]>> = vec![None; geometry.sets.len()];
        for (group, (&row, &set)) in rows.iter().zip(&geometry.set_of_group).enumerate() {
            let (blocks, span) = (row.len(), geometry.span(set));
            let full = if geometry.is_found(set) { num_tokens.div_ceil(span) } else { 0 };
            let ends_inside = full > 0 && !num_tokens.is_multiple_of(span);
            let ends_right =
                !ends_inside || (geometry.is_fine_grained && num_tokens.is_multiple_of(geometry.hash_block_tokens));
            // What is missing at the end of windows and states will be loaded.
            let may_be_short = !ends_inside && !geometry.behaviour(set).is_downward_closed();
            let is_complete = blocks as u64 == full || (may_be_short && (blocks as u64) < full);
            if !ends_right || !is_complete {
                return Err(Error::config(format!(
                    "{num_tokens} tokens are not {blocks} blocks of {span} tokens in group {group}"
                )));
            }
            if of_set[set].is_some_and(|other| other != row) {
                return Err(Error::config(format!("group {group} has another row than its lockstep set")));
            }
            // Null blocks stand for what is not needed.
            let unneeded = geometry.behaviour(set).skipped_by_hit(span, num_tokens);
            for (_, &block) in row.iter().enumerate().filter(|&(at, block)| at >= unneeded || !block.is_null()) {
                self.pool.check_real(block)?;
                let of_this_set = |key: &crate::pool::Key| key.split_block().1 as usize == set;
                if !self.pool.keys_of(block)?.iter().any(of_this_set) {
                    return Err(Error::config(format!("block {block} holds no prefix of group {group}")));
                }
            }
            of_set[set] = Some(row);
        }
        let rows = of_set.into_iter().map(|row| self.hit_row(row.unwrap_or(&[]).to_vec())).collect();
        let hit = self.hit(num_tokens, num_tokens, rows);
        if hit.names_a_block_twice() {
            return Err(Error::config("a block stands for two places of a prefix"));
        }
        Ok(hit)
    }

    fn hit_row(&self, blocks: Vec<BlockId>) -> HitRow {
        let generations = blocks.iter().map(|&block| self.pool.generation(block)).collect();
        HitRow { blocks, generations }
    }

    fn hit(&self, num_tokens: u64, longest: u64, rows: Vec<HitRow>) -> PrefixHit {
        let set_of_group = self.geometry.set_of_group.clone();
        PrefixHit { coordinator: self.id, num_tokens, longest, rows, set_of_group, losses: self.pool.losses() }
    }

    /// Refuses a hit that was not found here or has gone stale.
    pub(super) fn check_fresh(&self, hit: &PrefixHit) -> Result<()> {
        if hit.coordinator != self.id {
            return Err(Error::config("the hit was found by another coordinator"));
        }
        if hit.losses == self.pool.losses() {
            return Ok(());
        }
        for row in &hit.rows {
            for (&block, &generation) in row.blocks.iter().zip(&row.generations) {
                if self.pool.generation(block) != generation {
                    return Err(Error::StaleHit { block });
                }
            }
        }
        Ok(())
    }
}
