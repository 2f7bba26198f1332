//! What an allocation takes, counted before anything is taken.

use super::allocate::AllocateRequest;
use super::requests::Row;
use super::{Coordinator, PrefixHit};
use crate::error::Result;
use crate::geometry::StateSpec;
use crate::groups::mamba_align::{States, Step};
use crate::groups::{Behaviour, Slots};
use crate::ids::BlockId;

/// Free blocks that an allocation needs, over all sets.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Need {
    /// How many must be free. More than `taken` only where vLLM estimates and does not count.
    pub(super) asked: usize,
    /// How many leave the queue. Hits that nobody holds do as well.
    pub(super) taken: usize,
}

impl Need {
    fn add(&mut self, asked: usize, taken: usize) {
        self.asked = self.asked.saturating_add(asked.max(taken));
        self.taken = self.taken.saturating_add(taken);
    }
}

impl Coordinator {
    /// How many free blocks a request must find to have slots as asked for, the idle ones of a hit included. A question only:
    /// more tokens than `max_model_len` may be asked for. `computed_tokens`: what a new request finds or has loaded. `capped`:
    /// windows and chunks count for what they hold at most at a time.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) or [`Error::StaleHit`](crate::Error::StaleHit) if the hit cannot be used.
    pub fn blocks_needed(&self, ask: &AllocateRequest<'_>, capped: bool) -> Result<usize> {
        ask.hit.map_or(Ok(()), |hit| self.check_fresh(hit))?;
        // What is computed and not found is loaded.
        let found = ask.hit.map_or(0, PrefixHit::num_tokens);
        let ask = AllocateRequest { num_external_tokens: ask.computed_tokens.saturating_sub(found), ..*ask };
        Ok(self.need(&ask, ask.hit, ask.computed_tokens, &ask.slots(), capped).asked)
    }

    /// What a request needs to have these slots. `computed`: tokens that are there or will be loaded when it starts.
    pub(super) fn need(
        &self,
        ask: &AllocateRequest<'_>,
        hit: Option<&PrefixHit>,
        computed: u64,
        slots: &Slots,
        capped: bool,
    ) -> Need {
        let held = self.requests.get(ask.request_id).ok();
        let longest = self.config.max_model_len;
        let in_flight = self.config.max_in_flight_tokens.unwrap_or(longest);
        let mut need = Need::default();
        for set in 0..self.geometry.sets.len() {
            let geometry = &self.geometry;
            let behaviour = geometry.behaviour(set);
            if self.ends_with_unwritten(set, hit) {
                // More than there are: the request has to wait for the next step.
                need.asked = need.asked.saturating_add(self.pool.num_blocks() + 1);
                need.taken = usize::MAX;
                continue;
            }
            if let Behaviour::AlignedState(spec) = behaviour {
                let row = held.map(|request| &request.rows[set]);
                self.add_need_of_states(&mut need, set, spec, row, ask, (hit, computed), slots);
                continue;
            }
            let mut at_end = geometry.row_length(set, slots);
            if let (true, Some(most)) = (capped, behaviour.most_blocks(geometry.span(set), in_flight, longest)) {
                at_end = at_end.min(usize::try_from(most).unwrap_or(usize::MAX));
            }
            let (there, hit_row) = if let Some(request) = held {
                (request.rows[set].blocks.len(), &[][..])
            } else {
                let (skipped, hit_row) = geometry.start_of_row(set, hit, computed);
                (skipped + hit_row.len(), hit_row)
            };
            let copies = usize::from(geometry.shared_place(set, hit, hit_row).is_some());
            let blocks = at_end.saturating_sub(there).saturating_add(copies).saturating_add(self.num_idle(hit_row));
            need.add(blocks, blocks);
        }
        need
    }

    /// As [`Coordinator::need`] for one set of aligned states.
    #[allow(clippy::too_many_arguments, reason = "what the caller has at hand for every set")]
    fn add_need_of_states(
        &self,
        need: &mut Need,
        set: usize,
        spec: StateSpec,
        row: Option<&Row>,
        ask: &AllocateRequest<'_>,
        (hit, computed): (Option<&PrefixHit>, u64),
        slots: &Slots,
    ) {
        let geometry = &self.geometry;
        let none = States::default();
        let (states, blocks) = row.map_or((&none, &[][..]), |row| (&row.states, &row.blocks));
        let required = geometry.row_length(set, slots);
        let step = self.step(set, ask, computed, slots.main_tokens);
        let has_checkpoint = step.checkpoint(spec, states, blocks).is_some();
        let is_shared = row.is_some_and(|row| row.shared_tail().is_some());

        let whole_hit = if row.is_none() { hit.map_or(&[][..], |hit| hit.row(set)) } else { &[] };
        let is_copied = is_shared || geometry.shared_place(set, hit, whole_hit).is_some();
        let length = blocks.len() + whole_hit.len();
        let asked = states.estimate(spec, length, required, has_checkpoint, is_copied) + self.num_idle(whole_hit);

        let (skipped, hit_row) = if row.is_none() { geometry.start_of_row(set, hit, computed) } else { (0, &[][..]) };
        let is_copied = is_shared || geometry.shared_place(set, hit, hit_row).is_some();
        let start = blocks.len() + skipped + hit_row.len();
        let loaded =
            if row.is_none() { geometry.external_blocks(set, computed, ask.num_external_tokens, start) } else { 0 };
        let growth = states.growth(spec, start + loaded, required, has_checkpoint, is_copied);
        let taken = loaded + growth.new + usize::from(is_copied) + self.num_idle(hit_row);
        need.add(asked, taken);
    }

    /// Blocks of a hit that nobody holds.
    fn num_idle(&self, hit_row: &[BlockId]) -> usize {
        hit_row.iter().filter(|&&block| self.pool.is_free(block)).count()
    }

    /// Whether a hit ends with a state that a request of this step has yet to write, or has to be copied from a block that is
    /// yet to be written.
    fn ends_with_unwritten(&self, set: usize, hit: Option<&PrefixHit>) -> bool {
        let Some(hit) = hit.filter(|_| !self.unwritten.is_empty()) else { return false };
        let Some(&last) = hit.row(set).last() else { return false };
        if self.geometry.behaviour(set).is_state() {
            return self.pool.first_key(last).is_some_and(|key| self.unwritten.contains(&key));
        }
        self.geometry.shared_place(set, Some(hit), hit.row(set)).is_some()
            && self.pool.keys_of(last).is_ok_and(|keys| keys.iter().any(|key| self.unwritten.is_in(last, key)))
    }

    /// The step that an allocation is for, up to `end` tokens.
    pub(super) fn step(&self, set: usize, ask: &AllocateRequest<'_>, computed: u64, end: u64) -> Step {
        let geometry = &self.geometry;
        Step {
            span: geometry.span(set),
            hash_block_tokens: geometry.hash_block_tokens,
            alignment: geometry.alignment,
            has_draft: self.config.use_eagle,
            start: computed.max(ask.computed_tokens),
            end,
            // Only where nothing but the ends of prompts is kept, the other steps of a prompt save nothing.
            prefill_end: if self.config.retention_interval == Some(0) { ask.prefill_end } else { 0 },
        }
    }

    /// Notes in the rows of aligned states what the step will save before its end.
    pub(super) fn plan_checkpoints(&mut self, ask: &AllocateRequest<'_>, computed: u64) -> Result<()> {
        for set in 0..self.geometry.sets.len() {
            let Behaviour::AlignedState(spec) = self.geometry.behaviour(set) else { continue };
            let step = self.step(set, ask, computed, ask.slots().main_tokens);
            let row = &mut self.requests.get_mut(ask.request_id)?.rows[set];
            row.states.checkpoint = step.checkpoint(spec, &row.states, &row.blocks);
        }
        Ok(())
    }
}
