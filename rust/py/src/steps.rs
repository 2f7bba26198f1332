//! What a coordinator hands over once per step: copies, states to store elsewhere, blocks to clear.

use lockstep_kv_core::BlockId;
use lockstep_kv_core::coordinator::StateOffer;
use lockstep_kv_core::pool::BlockUse;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::args::{Given, text, uint};
use crate::coordinator::Coordinator;
use crate::errors::raise;
use crate::lists::list_of_ids;

/// States as tuples: (request, group, block, tokens).
fn list_of_offers(py: Python<'_>, offers: Vec<StateOffer>) -> PyResult<Bound<'_, PyList>> {
    let offers = offers.into_iter();
    let tuples = offers.map(|offer| (offer.request_id.into_string(), offer.group.0, offer.block.0, offer.tokens));
    PyList::new(py, tuples.collect::<Vec<_>>())
}

#[pymethods]
impl Coordinator {
    /// A new step begins: states that earlier steps have published are written and can be hit. Only groups of kind "mamba"
    /// depend on steps. `in_flight` names requests whose last steps have not come back, each with the tokens up to which it is
    /// processed: states behind these still wait.
    #[pyo3(signature = (in_flight=None))]
    fn new_step(&mut self, in_flight: Option<&Bound<'_, PyDict>>) -> PyResult<()> {
        let given: Vec<_> = in_flight.map_or(Vec::new(), |given| given.iter().collect());
        let one = |(name, tokens)| Ok((text(name, "in_flight")?, uint(tokens, "in_flight")?));
        let named = given.iter().map(|(name, tokens)| one((name, tokens))).collect::<PyResult<Vec<_>>>()?;
        self.0.new_step(&named);
        Ok(())
    }

    /// Forget the states behind `processed_tokens` that a request has published, because it is given up before the steps that
    /// write them have come back.
    fn forget_unwritten(&mut self, request_id: &Bound<'_, PyAny>, processed_tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let processed = uint(processed_tokens, "processed_tokens")?;
        self.0.forget_unwritten(text(request_id, "request_id")?, processed);
        Ok(())
    }

    /// The copies that the step must make before it computes anything: (group, from, to) tuples, one lockstep set after the
    /// other, in the order in which they were found necessary. Both blocks of each stay pinned until `unpin`.
    fn take_block_copies<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyList>> {
        let copies = slf.try_borrow_mut()?.0.take_block_copies();
        PyList::new(slf.py(), copies.iter().map(|copy| (copy.group.0, copy.from.0, copy.to.0)).collect::<Vec<_>>())
    }

    /// The states of mode "align" that can be stored elsewhere once the step has written them: (request, group, block, tokens
    /// before it) tuples. Their blocks are not kept for that: pin them.
    fn take_state_offers<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyList>> {
        let offers = slf.try_borrow_mut()?.0.take_state_offers();
        list_of_offers(slf.py(), offers)
    }

    /// The states inside a block that a request which ends has left as they are, as `take_state_offers` gives them.
    #[pyo3(
        signature = (request_id, num_computed_tokens, *, is_in_flight=Given::NO),
        text_signature = "($self, request_id, num_computed_tokens, *, is_in_flight=False)"
    )]
    fn take_final_states<'py>(
        slf: &Bound<'py, Self>,
        request_id: &Bound<'py, PyAny>,
        num_computed_tokens: &Bound<'py, PyAny>,
        is_in_flight: Given<'py>,
    ) -> PyResult<Bound<'py, PyList>> {
        let (request_id, computed) =
            (text(request_id, "request_id")?, uint(num_computed_tokens, "num_computed_tokens")?);
        let is_in_flight = is_in_flight.flag("is_in_flight", false)?;
        let offers = slf.try_borrow_mut()?.0.take_final_states(request_id, computed, is_in_flight);
        list_of_offers(slf.py(), offers)
    }

    /// The blocks taken since the last call that must be cleared before they are used, one lockstep set after the other.
    /// Always empty unless `notes_new_blocks` was set.
    fn take_new_blocks<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyList>> {
        let blocks: Vec<BlockId> = slf.try_borrow_mut()?.0.take_new_blocks();
        list_of_ids(slf.py(), &blocks)
    }

    /// How blocks were used since the last call, oldest first: pairs of "taken" (for new content), "used" (found or pinned) or
    /// "dropped" (can no longer be found, though it is not taken), and the block. Always empty unless `notes_uses` was set.
    fn take_uses<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyList>> {
        let uses = slf.try_borrow_mut()?.0.take_uses();
        let pair = |block_use: &BlockUse| match block_use {
            BlockUse::Taken(block) => ("taken", block.0),
            BlockUse::Used(block) => ("used", block.0),
            BlockUse::Dropped(block) => ("dropped", block.0),
        };
        PyList::new(slf.py(), uses.iter().map(pair).collect::<Vec<_>>())
    }

    /// Note a request's blocks from this token on as to be cleared: a load has left them unwritten.
    fn note_unwritten(&mut self, request_id: &Bound<'_, PyAny>, start_token: &Bound<'_, PyAny>) -> PyResult<()> {
        let start_token = uint(start_token, "start_token")?;
        self.0.note_unwritten(text(request_id, "request_id")?, start_token).map_err(raise)
    }
}
