"""Sparse MLA on real DCP ranks, caches in our pools: the same choices, logits and tokens as one process without pages.

Every mode runs the same load in 2 or 4 gloo processes, with ids from one `Coordinator` that is audited twice a step.
The pool holds about half of what the load wants at once. New blocks are filled with NaN before they are used.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
else:
    torch = pytest.importorskip("torch")

from sparse_mla_model import SHAPE
from sparse_mla_modes import MODES, SPAN, Mode
from sparse_mla_reference import Reference, reference
from sparse_mla_scheduler import jobs
from sparse_mla_world import Run, run_world

RIGHT = [mode for modes in MODES.values() for mode in modes if mode.choice == "merged"]
TOLERANCE = 1e-9

all_modes = pytest.mark.parametrize("mode", [pytest.param(mode, id=mode.name) for mode in RIGHT])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_of(mode: Mode) -> Run:
    return run_world(mode.ranks)[mode.name]


def right_answers(run: Run) -> dict[str, Reference]:
    return {name: reference(tokens) for name, tokens in run.decisions.finished.items()}


@all_modes
def test_every_rank_chooses_and_computes_what_the_reference_does(mode: Mode) -> None:
    run = run_of(mode)
    right = right_answers(run)
    for rank in run.ranks:
        assert sum(len(part.logits) for part in rank.computed) == computed_tokens(run)
        for part in rank.computed:
            rows = slice(part.start, part.start + len(part.logits))
            assert torch.equal(part.chosen, right[part.request].chosen[:, rows]), (part.request, part.start)
            assert_close(part.logits, right[part.request].logits[rows])


@all_modes
def test_the_greedy_tokens_are_the_reference_s(mode: Mode) -> None:
    run = run_of(mode)
    assert run.decisions.finished.keys() == {job.name for job in jobs()}
    for job in jobs():
        tokens = run.decisions.finished[job.name]
        before = run.decisions.finished[job.after] if job.after else ()
        assert tokens[: -job.new_tokens] == (*before, *job.prompt)
        best = reference(tokens).logits.argmax(dim=-1).tolist()
        assert tokens[-job.new_tokens :] == tuple(best[-job.new_tokens - 1 : -1])


@all_modes
def test_the_pages_hold_the_records_of_every_token_hits_included(mode: Mode) -> None:
    """Read back over the block tables when a request ends: of every layer, on every rank, exactly its shard."""
    run = run_of(mode)
    for kind in mode.kinds:
        for name, right in right_answers(run).items():
            count = len(run.decisions.finished[name]) - 1  # The last token was never fed.
            records = right.ckv if kind.name == "ckv" else right.index_key
            copies = torch.zeros(count, dtype=torch.int64)
            for rank, of_rank in enumerate(run.ranks):
                (held,) = [held for held in of_rank.held if (held.request, held.kind) == (name, kind.name)]
                assert len(held.positions) == kind.lengths(torch.tensor(count), rank)
                assert torch.equal(held.positions, kind.positions(len(held.positions), rank))
                assert_close(held.records, records[:, held.positions])
                copies[held.positions] += 1
            assert copies.tolist() == [mode.ranks // kind.shards] * count


@all_modes
def test_the_load_chunks_hits_evicts_and_preempts(mode: Mode) -> None:
    decisions = run_of(mode).decisions
    works = [work for plan in decisions.trace for work in plan.works]
    assert max(len(plan.works) for plan in decisions.trace) == 4, "several requests at once"
    assert any(work.start and len(work.tokens) > 1 and not work.samples for work in works), "a chunk in the middle"
    assert any(not work.start and work.samples for work in works), "a prompt in one go"
    assert any({len(work.tokens) for work in plan.works} > {1} for plan in decisions.trace), "decodes beside a prefill"
    assert decisions.stats["evicted_blocks"] > 10
    assert len(decisions.preempted) >= 3
    assert any(admission.resumed and admission.hit_tokens for admission in decisions.admissions)
    assert any(admission.resumed and admission.hit_tokens == 0 for admission in decisions.admissions)
    later = [admission for admission in decisions.admissions if admission.evicted and not admission.resumed]
    assert any(admission.hit_tokens for admission in later), "a hit after evictions"
    # What a request continues was cached whole when that ended.
    whole = {
        job.name: (len(decisions.finished[job.after]) - 1) // SPAN * SPAN for job in jobs() if job.after is not None
    }
    assert any(0 < one.hit_tokens < whole[one.name] for one in later if one.name in whole), "an eviction cut a hit"
    assert decisions.free_blocks == mode.num_blocks - 1
    # What was hit is not computed, all else is.
    for name, tokens in decisions.finished.items():
        hits = [admission.hit_tokens for admission in decisions.admissions if admission.name == name]
        seen = {work.start + at for work in works if work.name == name for at in range(len(work.tokens))}
        assert seen == set(range(min(hits), len(tokens) - 1))


@all_modes
def test_the_groups_share_a_row_of_ids_or_never_an_id(mode: Mode) -> None:
    decisions = run_of(mode).decisions
    assert decisions.lockstep == ([False, False] if mode.apart else [not mode.joined])
    for plan in decisions.trace:
        rows = [work.rows for work in plan.works]
        if not mode.apart:
            assert all(row == of_request[0] for of_request in rows for row in of_request)
        else:
            ckv = {block for of_request in rows for block in of_request[0]}
            assert ckv.isdisjoint({block for of_request in rows for block in of_request[1]})


def test_ids_and_steps_are_the_same_whichever_way_the_indexer_is_held() -> None:
    """Sharded, partial or replicated, on 2 ranks or 4: the span is the same, and so is every decision."""
    runs = [run_of(mode) for mode in RIGHT if not mode.apart]
    first = runs[0].decisions
    for run in runs[1:]:
        assert run.decisions.finished == first.finished
        assert (run.decisions.admissions, run.decisions.preempted) == (first.admissions, first.preempted)
        for plan, expected in zip(run.decisions.trace, first.trace, strict=True):
            assert plan.new_blocks == expected.new_blocks
            assert [(work.name, work.start, work.tokens, work.rows[0]) for work in plan.works] == [
                (work.name, work.start, work.tokens, work.rows[0]) for work in expected.works
            ]


def test_candidates_are_sent_only_inside_shard_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank sends top_k candidates per token and layer to the others of its shard group, and to nobody else."""
    lines = [f"{'mode':22} {'tokens':>7} {'gathers':>8} {'candidates':>11} {'bytes':>10}    per token and layer"]
    for mode in RIGHT:
        run = run_of(mode)
        sent = [rank.sent["candidates"] for rank in run.ranks if "candidates" in rank.sent]
        entries, tokens = sum(one.entries for one in sent), computed_tokens(run)
        calls = sum(one.calls for one in sent)
        each = SHAPE.top_k * (mode.index_shards - 1) * mode.ranks
        assert entries == each * tokens * SHAPE.layers
        assert calls == (mode.index_shards > 1) * mode.ranks * SHAPE.layers * len(run.decisions.trace)
        num_bytes = sum(one.num_bytes for one in sent)
        lines.append(f"{mode.name:22} {tokens:7} {calls:8} {entries:11} {num_bytes:10}    {each}")
        # Attention's merge is the same in every mode.
        outputs = sum(rank.sent["outputs"].entries for rank in run.ranks)
        assert outputs == SHAPE.heads * (mode.ranks - 1) * mode.ranks * tokens * SHAPE.layers
    with capsys.disabled():
        sys.stdout.write("\nCandidates of the indexer sent between ranks:\n" + "\n".join(lines) + "\n")

    sharded, partial, replicated = (candidates(Mode(4, shards)) for shards in (4, 2, 1))
    assert 0 == replicated < partial < sharded
    assert sharded == 3 * partial
    assert 0 == candidates(Mode(2, 1)) < candidates(Mode(2, 2))


@all_modes
def test_pages_of_different_layers_never_overlap(mode: Mode) -> None:
    """Fill every page with a number of its own; then all are still there, read as kernels read them."""
    pool = mode.pool()
    sets = pool.layout.sets
    # Sets alias: a block belongs to one of them at a time. Here they take turns.
    owned = [sets[block % len(sets)].group_ids for block in range(pool.num_blocks)]
    pages = [
        (block, kind.layer(layer), kind)
        for block, groups in enumerate(owned)
        for kind in mode.kinds
        for layer in range(SHAPE.layers)
        if kind.group in groups
    ]
    for mark, (block, name, _) in enumerate(pages):
        pool.layer(name, torch.float64)[block] = mark
    for mark, (block, name, kind) in enumerate(pages):
        first, per_block = block * kind.block_size // kind.kernel, kind.block_size // kind.kernel
        found = pool.kernel_pages(name, kind.kernel, torch.float64)[first : first + per_block]
        assert found.shape == (per_block, kind.kernel, kind.record)
        assert (found == mark).all(), (block, name)


def candidates(mode: Mode) -> int:
    return sum(rank.sent["candidates"].entries for rank in run_of(mode).ranks if "candidates" in rank.sent)


def computed_tokens(run: Run) -> int:
    return sum(len(work.tokens) for plan in run.decisions.trace for work in plan.works)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
