"""vLLM's sparse indexer between processes, with fewer shards than ranks: keys, choices and what is sent.

vLLM's own groups, layer, metadata, scoring and Triton kernels; plain torch in place of CUDA kernels; no attention. Each
mode computes what one rank computes without decode context parallelism: prompts in chunks and together, decodes beside
them, a prefix that another request has computed, speculated tokens. See `indexer_world`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

import torch
from engines import ENVIRONMENT, SUPPORT
from indexer_kernels import keys_of, places, token_bytes
from indexer_modes import BLOCKS, CHOSEN, MODES, PAGE, Mode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from indexer_modes import Work

SECONDS = 600
POISON = 0xA5


@cache
def world(processes: int) -> list[dict[str, Any]]:
    """What each rank of so many processes found, by mode."""
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    with TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(  # noqa: S603
                [sys.executable, SUPPORT / "indexer_world.py", str(rank), str(processes), folder],
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(processes)
        ]
        try:
            errors = [rank.communicate(timeout=SECONDS)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert [rank.returncode for rank in ranks] == [0] * processes, "\n".join(text[-3000:] for text in errors)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(processes)]


def found(mode: Mode) -> list[dict[str, Any]]:
    """What each rank found in a mode."""
    return [of_rank[mode.name] for of_rank in world(max(mode.ranks, 1))]


def one_rank(mode: Mode) -> dict[str, Any]:
    """What one rank finds with the same load."""
    answers: dict[str, Any] = world(1)[0][mode.reference]
    return answers


def written(mode: Mode) -> Iterator[tuple[str, int]]:
    """The tokens that a load computes, each once."""
    yield from dict.fromkeys(
        (name, position) for works in mode.steps for name, first, end in works for position in range(first, end)
    )


def expected_keys(mode: Mode, rank: int) -> torch.Tensor:
    """A rank's whole indexer memory: one rank's bytes where they belong, and nothing written anywhere else."""
    (plain,) = [one for one in MODES[1] if one.name == mode.reference]
    keys = one_rank(mode)["keys"]
    pages = torch.full((BLOCKS * mode.ranks // mode.shards, PAGE, 132), POISON, dtype=torch.uint8)
    for name, position in written(mode):
        at = torch.tensor([position])
        slot = mode.slots(name, at, rank, mode.shards)
        if slot >= 0:
            pages.view(len(pages), -1)[places(slot)] = token_bytes(keys, plain.slots(name, at, 0, 1))
    return pages


def sets(chosen: list[torch.Tensor]) -> list[list[int]]:
    """The tokens chosen for each computed token of all steps, in order."""
    return [sorted(row) for step in chosen for row in step.tolist()]


ALL = [mode for processes in (2, 4) for mode in MODES[processes]]
RIGHT = [mode for mode in ALL if mode.without is None]
WRONG = {mode.name: mode for mode in ALL if mode.without is not None}
modes = pytest.mark.parametrize("mode", RIGHT, ids=lambda mode: f"{mode.ranks} ranks, {mode.name}")


@modes
def test_each_key_is_where_its_shard_belongs(mode: Mode) -> None:
    for rank, answers in enumerate(found(mode)):
        assert torch.equal(answers["keys"], expected_keys(mode, rank)), rank


@pytest.mark.parametrize("mode", [mode for mode in RIGHT if mode.layer == "fused"], ids=lambda mode: mode.name)
def test_latent_vectors_stay_sharded_over_all_ranks(mode: Mode) -> None:
    (plain,) = [one for one in MODES[1] if one.name == mode.reference]
    latents = one_rank(mode)["latents"].flatten(0, 1)
    for rank, answers in enumerate(found(mode)):
        expected = torch.full_like(answers["latents"].flatten(0, 1), 7.25)
        for name, position in written(mode):
            at = torch.tensor([position])
            slot = int(mode.slots(name, at, rank, mode.ranks))
            if slot >= 0:
                expected[slot] = latents[int(plain.slots(name, at, 0, 1))]
        assert torch.equal(answers["latents"].flatten(0, 1), expected), rank


@modes
def test_every_rank_chooses_what_one_rank_chooses(mode: Mode) -> None:
    expected = sets(one_rank(mode)["chosen"])
    assert len({tuple(row) for row in expected}) > 20, "tokens have choices of their own"
    for rank, answers in enumerate(found(mode)):
        assert sets(answers["chosen"]) == expected, rank


def stays(mode: Mode, number: int, name: str, position: int) -> bool:
    """Whether no later step writes this token or one before it again, as after rejected drafts."""
    later = [work for works in mode.steps[number + 1 :] for work in works]
    return not any(work[0] == name and work[1] <= position for work in later)


@pytest.mark.parametrize("mode", MODES[1], ids=lambda mode: mode.name)
def test_one_rank_chooses_the_best_of_all_scores(mode: Mode) -> None:
    """From the bytes of its keys, without pages: for each token the scores of all up to itself."""
    answers = one_rank(mode)
    checked = 0
    for number, works in enumerate(mode.steps):
        computed = [(name, position) for name, first, end in works for position in range(first, end)]
        for row, (name, position) in enumerate(computed):
            if not stays(mode, number, name, position):
                continue
            slots = mode.slots(name, torch.arange(position + 1), 0, 1)
            keys = keys_of(token_bytes(answers["keys"], slots))
            query, weights = (part[row].double() for part in answers["scored"][number])
            scores = ((keys @ query.T).relu() * weights).sum(1)
            chosen = answers["chosen"][number][row]
            chosen = chosen[chosen >= 0].long()
            assert len(set(chosen.tolist())) == len(chosen) == min(CHOSEN, position + 1)
            torch.testing.assert_close(
                scores[chosen].sort().values, scores.topk(len(chosen), sorted=True).values.flip(0)
            )
            checked += 1
    assert checked > 90


def rows_of(works: list[Work], *, prefill: bool) -> int:
    """How many rows a step scores of prompts, or of all."""
    return sum(end - first for _, first, end in works if end - first > 1 or not prefill)


@modes
def test_candidates_are_sent_among_the_shards_only(mode: Mode) -> None:
    """Two numbers for each chosen token: none with one shard, those of a shard group, or those of all ranks."""
    rows = sum(rows_of(works, prefill=False) for works in mode.steps)
    for answers in found(mode):
        candidates = [(group, count) for group, call, count in answers["sent"] if call == "all_gather"]
        if mode.shards == 1:
            assert candidates == []
            continue
        group = "dcp" if mode.shards == mode.ranks else "indexer_shard"
        assert {name for name, _ in candidates} == {group}
        sent = sum(count for _, count in candidates)
        if mode.split_rows:
            assert sent < rows * CHOSEN * 2, "each copy of a shard merges its own rows"
        elif mode.drafts != 1:  # With one draft rows are padded.
            assert sent == rows * CHOSEN * 2


@pytest.mark.parametrize("mode", [mode for mode in RIGHT if mode.split_rows], ids=lambda mode: mode.name)
def test_copies_of_a_shard_share_the_rows_of_prompts(mode: Mode) -> None:
    """Of all prompts with eight rows a copy and more; then the choices of all rows are brought together."""
    parts = [[sent for sent in answers["sent"] if sent[1] == "all_gatherv"] for answers in found(mode)]
    assert {group for of_rank in parts for group, _, _ in of_rank} == {
        "tp" if mode.shards == 1 else "indexer_query_split"
    }
    for step, works in enumerate(mode.steps[:3]):
        sizes = [of_rank[step][2] for of_rank in parts]
        assert sum(sizes) == rows_of(works, prefill=True) * CHOSEN * mode.shards
        assert len(set(sizes)) > 1, "later rows cost more"
        for shard in range(mode.shards):
            assert sum(sizes[shard :: mode.shards]) == sum(sizes) // mode.shards
    assert [len(of_rank) for of_rank in parts] == [3] * mode.ranks, "decodes are not split"


@pytest.mark.parametrize("mode", [mode for mode in RIGHT if not mode.split_rows], ids=lambda mode: mode.name)
def test_nothing_else_is_sent(mode: Mode) -> None:
    for answers in found(mode):
        assert {call for _, call, _ in answers["sent"]} <= {"all_gather"}


# What goes wrong without each patch.


@pytest.mark.parametrize("name", ["without its slots", "without its launch", "scoring alone, without its world"])
def test_without_a_patch_tokens_or_choices_are_wrong(name: str) -> None:
    mode = WRONG[name]
    answers = found(mode)
    right_keys = all(torch.equal(of_rank["keys"], expected_keys(mode, rank)) for rank, of_rank in enumerate(answers))
    expected = sets([one_rank(mode)["chosen"][0][:70]])
    right_choices = all(sets(of_rank["chosen"]) == expected for of_rank in answers)
    assert not (right_keys and right_choices)


@pytest.mark.parametrize("name", ["without its world", "without its group"])
def test_without_a_patch_of_scoring_choices_are_wrong(name: str) -> None:
    mode = WRONG[name]
    expected = sets([one_rank(mode)["chosen"][0][:70]])
    for rank, of_rank in enumerate(found(mode)):
        assert torch.equal(of_rank["keys"], expected_keys(mode, rank))
        assert sets(of_rank["chosen"]) != expected
