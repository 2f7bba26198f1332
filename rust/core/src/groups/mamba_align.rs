//! Recurrent state of mode "align": the scheduler ends steps at the ends of blocks, so that the states there can be shared.
//!
//! * needs: the state the running step starts from, the one it writes, blocks for the states behind drafts, and in some
//!   steps one for a state saved before the step's end. A row has null blocks at all other places;
//! * may drop: the state before the last, once the step that read it is processed;
//! * a hit requires: one state, as for the other modes. It may stand inside a block: then it is copied before the request
//!   goes on from it, because a step writes its own state over it.
//!
//! A row is laid out by its end: `[.. states .., running state, drafts ..]`. When the row grows, draft blocks whose places
//! become those of tokens move to the new end.

use crate::error::Result;
use crate::geometry::StateSpec;
use crate::ids::BlockId;
use crate::pool::BlockPool;

/// A state that a step saves before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Checkpoint {
    /// Tokens before it.
    pub(crate) tokens: u64,
    /// The place of the block it is saved in.
    pub(crate) place: usize,
}

/// A published state inside a block, which the request's next step writes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tail {
    pub(crate) block: BlockId,
    /// Tokens before it.
    pub(crate) tokens: u64,
}

/// What a row of states remembers from step to step.
#[derive(Clone, Debug, Default, Hash)]
pub(crate) struct States {
    /// Whether the request has had slots for a step: then the row's last places are the running state and the drafts.
    pub(crate) has_run: bool,
    /// The place of the state that the last step started from.
    pub(crate) last: Option<usize>,
    /// Leading places that have been given back.
    pub(crate) num_retired: usize,
    /// What the running step saves before its end.
    pub(crate) checkpoint: Option<Checkpoint>,
    /// What the request has published inside a block, until its next step.
    pub(crate) tail: Option<Tail>,
}

/// The last length before `tokens` at which a later request with the same tokens can resume; 0 if there is none. It computes
/// its last token anew, or, with a draft model, one alignment.
pub(crate) fn resume_point(tokens: u64, alignment: u64, has_draft: bool) -> u64 {
    let limit = if has_draft { tokens } else { tokens.saturating_sub(1) };
    let end = limit - limit % alignment;
    if has_draft { end.saturating_sub(alignment) } else { end }
}

/// A step of a request, as far as a state that is saved before its end depends on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) span: u64,
    pub(crate) hash_block_tokens: u64,
    /// Hits are multiples of this.
    pub(crate) alignment: u64,
    pub(crate) has_draft: bool,
    /// Tokens before the step.
    pub(crate) start: u64,
    /// Tokens after it.
    pub(crate) end: u64,
    /// Tokens of the whole prefill if only its last step saves a state; 0 if every step does.
    pub(crate) prefill_end: u64,
}

impl Step {
    /// What the step saves before its end, if the backend can and the row has a place for it.
    pub(crate) fn checkpoint(&self, spec: StateSpec, states: &States, row: &[BlockId]) -> Option<Checkpoint> {
        let &Self { span, hash_block_tokens: unit, start, end, .. } = self;
        let distance = u64::from(spec.checkpoint_alignment?);
        let tokens = resume_point(end, self.alignment, self.has_draft);
        let columns = end.div_ceil(span);
        let can_be_saved = start.is_multiple_of(unit)
            && columns > start.div_ceil(span) + 1
            && start + unit <= tokens
            && start < tokens
            && tokens < end
            && (tokens - start).is_multiple_of(distance);
        if end < self.prefill_end || !can_be_saved {
            return None;
        }
        let place = usize::try_from(columns - 2).ok()?;
        let drafts_from = row.len().saturating_sub(spec.speculative_blocks as usize);
        let is_unused = row.get(place).is_none_or(|block| block.is_null()) || (states.has_run && place >= drafts_from);
        is_unused.then_some(Checkpoint { tokens, place })
    }
}

/// How a row grows by a step.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Growth {
    /// Whether anything changes at all.
    is_needed: bool,
    nulls: usize,
    moved: usize,
    /// Blocks to append behind null and moved ones.
    pub(crate) new: usize,
}

impl States {
    /// How a row of `length` places grows to `required`. `is_copied`: its last state is replaced by a copy.
    pub(crate) fn growth(
        &self,
        spec: StateSpec,
        length: usize,
        required: usize,
        has_checkpoint: bool,
        is_copied: bool,
    ) -> Growth {
        if required <= length && !is_copied && !has_checkpoint {
            return Growth::default();
        }
        let drafts = spec.speculative_blocks as usize;
        let running = required.saturating_sub(drafts + 1);
        let unused_end = running.saturating_sub(usize::from(has_checkpoint));
        let nulls = if length < running { unused_end.saturating_sub(length) } else { 0 };
        let moved = if self.has_run { unused_end.min(length).saturating_sub(length.saturating_sub(drafts)) } else { 0 };
        Growth { is_needed: true, nulls, moved, new: required.saturating_sub(length + nulls + moved) }
    }

    /// Lays out a row's places up to the new blocks, which the caller appends.
    pub(crate) fn grow(&mut self, spec: StateSpec, growth: Growth, row: &mut Vec<BlockId>) {
        if growth.is_needed {
            let drafts_from = row.len().saturating_sub(spec.speculative_blocks as usize);
            if self.has_run {
                self.last = drafts_from.checked_sub(1);
            } else if !row.is_empty() {
                self.last = Some(row.len() - 1);
            }
            row.resize(row.len() + growth.nulls, BlockId::NULL);
            for place in drafts_from..drafts_from + growth.moved {
                let block = std::mem::replace(&mut row[place], BlockId::NULL);
                row.push(block);
            }
        }
        self.has_run = true;
    }

    /// vLLM's estimate of the blocks that a row of `length` places, or a hit of as many, takes to grow to `required`. It
    /// counts the copy, but not what an external tier loads.
    pub(crate) fn estimate(
        &self,
        spec: StateSpec,
        length: usize,
        required: usize,
        has_checkpoint: bool,
        is_copied: bool,
    ) -> usize {
        let missing = required.saturating_sub(length) + usize::from(is_copied);
        let drafts = if self.has_run { 0 } else { spec.speculative_blocks as usize };
        missing.min(1 + usize::from(is_copied) + usize::from(has_checkpoint) + drafts)
    }

    /// Gives back the states of a row that are not needed any more once `computed` tokens are processed.
    pub(crate) fn retire(&mut self, span: u64, computed: u64, row: &mut [BlockId], pool: &mut BlockPool) -> Result<()> {
        let skipped = usize::try_from(super::mamba::skipped_tokens(computed) / span).unwrap_or(usize::MAX);
        let end = skipped.min(row.len());
        if self.num_retired < end {
            let unneeded = &mut row[self.num_retired..end];
            pool.release_in_order(unneeded.iter().rev().copied().filter(|block| !block.is_null()))?;
            unneeded.fill(BlockId::NULL);
            self.num_retired = end;
        }
        // The state a step started from, unless it is the one that the next step starts from.
        let next = usize::try_from(computed.div_ceil(span)).unwrap_or(usize::MAX);
        if let Some(place) = self.last.filter(|last| last + 1 < next)
            && let Some(block) = row.get_mut(place).filter(|block| !block.is_null())
        {
            pool.release(&[*block])?;
            *block = BlockId::NULL;
        }
        Ok(())
    }
}

/// The state a step starts from, the one it writes, those behind drafts, and one saved before the end.
pub(super) fn planned_blocks(spec: StateSpec) -> u64 {
    2 + u64::from(spec.speculative_blocks) + u64::from(spec.checkpoint_alignment.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::StateMode;

    fn spec(drafts: u32) -> StateSpec {
        StateSpec { mode: StateMode::Align, speculative_blocks: drafts, checkpoint_alignment: Some(2) }
    }

    /// A row after it has grown to `required` places, with new blocks numbered from 100.
    fn grown(states: &mut States, drafts: u32, row: &[u32], required: usize, has_checkpoint: bool) -> Vec<u32> {
        let mut row: Vec<BlockId> = row.iter().copied().map(BlockId).collect();
        let growth = states.growth(spec(drafts), row.len(), required, has_checkpoint, false);
        states.grow(spec(drafts), growth, &mut row);
        row.iter().map(|block| block.0).chain((100..).take(growth.new)).collect()
    }

    #[test]
    fn a_row_has_blocks_at_its_end_only() {
        let mut states = States::default();
        assert_eq!(grown(&mut states, 1, &[], 5, false), [0, 0, 0, 100, 101]);
        assert_eq!(states.last, None);
        // The draft block moves behind the place that the next step ends at.
        assert_eq!(grown(&mut states, 1, &[0, 0, 0, 1, 2], 7, false), [0, 0, 0, 1, 0, 2, 100]);
        assert_eq!(states.last, Some(3));
        assert_eq!(grown(&mut states, 1, &[0, 0, 0, 1, 0, 2, 3], 7, false), [0, 0, 0, 1, 0, 2, 3]);
    }

    #[test]
    fn a_state_saved_inside_a_step_has_the_place_before_the_last() {
        let mut states = States::default();
        assert_eq!(grown(&mut states, 0, &[], 4, true), [0, 0, 100, 101]);
        let mut started = States::default();
        assert_eq!(grown(&mut started, 0, &[0, 5], 4, true), [0, 5, 100, 101]);
        assert_eq!(started.last, Some(1), "the state of the hit");
    }

    #[test]
    fn a_step_saves_where_a_resent_prompt_can_go_on() {
        let step =
            Step { span: 16, hash_block_tokens: 4, alignment: 4, has_draft: false, start: 0, end: 40, prefill_end: 0 };
        let saved = |step: Step, row: &[BlockId]| {
            step.checkpoint(spec(0), &States::default(), row).map(|checkpoint| (checkpoint.tokens, checkpoint.place))
        };
        assert_eq!(saved(step, &[]), Some((36, 1)));
        assert_eq!(saved(Step { has_draft: true, ..step }, &[]), Some((36, 1)));
        assert_eq!(saved(Step { end: 41, ..step }, &[]), Some((40, 1)));
        assert_eq!(saved(Step { end: 16, ..step }, &[]), None, "one block: its state is the last");
        assert_eq!(saved(Step { start: 35, ..step }, &[]), None, "not at a hash");
        assert_eq!(saved(Step { prefill_end: 41, ..step }, &[]), None, "not the last step of the prefill");
        assert_eq!(saved(step, &[BlockId(1), BlockId(2)]), None, "the place holds a state");
        assert_eq!(saved(step, &[BlockId(1), BlockId::NULL]), Some((36, 1)));
    }

    #[test]
    fn resume_points_leave_a_token_or_what_a_draft_model_reads() {
        assert_eq!(resume_point(17, 4, false), 16);
        assert_eq!(resume_point(16, 4, false), 12);
        assert_eq!(resume_point(16, 4, true), 12);
        assert_eq!(resume_point(3, 4, true), 0);
        assert_eq!(resume_point(0, 4, false), 0);
    }
}
