"""Why the merges are needed, and that they are right: local choices do not add up to the global choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")


from sparse_mla_model import SHAPE
from sparse_mla_modes import MAX_MODEL_LEN, MODES, CacheKind, Mode
from sparse_mla_rank import best, merge_outputs
from sparse_mla_reference import reference
from sparse_mla_wire import shard_groups
from sparse_mla_world import Run, run_world

TOP_K = SHAPE.top_k


def unmerged(choice: str) -> Run:
    (mode,) = [mode for mode in MODES[4] if mode.choice == choice]
    return run_world(4)[mode.name]


def test_the_union_of_local_bests_is_more_than_the_global_best() -> None:
    """Every rank attends to the best of its own shard: tokens come in that the model does not look at."""
    run = unmerged("union")
    more = same = 0
    for first, *others in zip(*[rank.computed for rank in run.ranks], strict=True):
        right = reference(run.decisions.finished[first.request])
        for row in range(len(first.logits)):
            # In the first layer nothing has gone wrong yet.
            expected = positions(right.chosen[0, first.start + row])
            union = set().union(*(positions(part.chosen[0, row]) for part in (first, *others)))
            assert expected <= union
            more, same = more + (expected < union), same + (expected == union)
    assert same
    assert more > same, "only the first tokens of a request have nothing to choose"
    assert worst_logit(run) > 0.1


def test_the_best_few_of_each_shard_are_not_the_global_best() -> None:
    """Every rank attends to the best top_k / D of its own shard: as many in all, but others."""
    run = unmerged("share")
    other = 0
    for parts in zip(*[rank.computed for rank in run.ranks], strict=True):
        right = reference(run.decisions.finished[parts[0].request])
        for row in range(len(parts[0].logits)):
            expected = positions(right.chosen[0, parts[0].start + row])
            found = set().union(*(positions(part.chosen[0, row]) for part in parts))
            assert len(found) <= TOP_K
            other += not expected <= found
    assert other > 100
    assert worst_logit(run) > 0.1


def test_the_load_has_ties_at_the_border() -> None:
    """So the order of equal scores is not left to chance: ReLU makes scores that are exactly 0."""
    run = run_world(4)[Mode(4, 4).name]
    assert sum(reference(tokens).ties for tokens in run.decisions.finished.values()) > 0


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("interleave", [1, 4])
def test_the_merge_of_local_bests_is_the_global_best(shards: int, interleave: int) -> None:
    """For scores full of ties, and for fewer tokens than shards or than `top_k`."""
    kind = CacheKind("indexer", 0, SHAPE.index, 16, shards, interleave, 4)
    generator = torch.Generator().manual_seed(5)
    for count in range(1, MAX_MODEL_LEN):
        scores = torch.randint(-3, 4, (5, count), generator=generator).double()
        expected = [sorted(range(count), key=lambda at: (-row[at], at))[:TOP_K] for row in scores.tolist()]
        parts = []
        for rank in range(shards):
            own = kind.positions(int(kind.lengths(torch.tensor(count), rank)), rank)
            parts.append(best(scores[:, own], own.expand(5, len(own)), TOP_K))
        all_scores, all_positions = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        merged_scores, merged = best(all_scores, all_positions, TOP_K)
        missing = max(TOP_K - count, 0)
        assert merged.long().tolist() == [row + [-1] * missing for row in expected]
        assert torch.equal(merged_scores[:, : TOP_K - missing], scores.gather(1, torch.tensor(expected)))


def test_outputs_merge_to_attention_over_all_tokens() -> None:
    """A rank that had no token adds nothing."""
    generator = torch.Generator().manual_seed(6)
    match = torch.randn(7, 3, 12, generator=generator, dtype=torch.float64) * 5
    latents = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    parts = []
    for own in ([0, 5], [], [1, 2, 3, 4, 6, 7, 8, 9, 10], [11]):
        output = torch.softmax(match[..., own], dim=-1) @ latents[own]
        parts.append(torch.cat([output, match[..., own].logsumexp(dim=-1, keepdim=True)], dim=-1))
    expected = torch.softmax(match, dim=-1) @ latents
    torch.testing.assert_close(merge_outputs(torch.stack(parts)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("ranks", "shards"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4)])
def test_every_shard_group_has_each_shard_once(ranks: int, shards: int) -> None:
    groups = shard_groups(ranks, shards)
    assert sorted(rank for members in groups for rank in members) == list(range(ranks))
    assert all(sorted(rank % shards for rank in members) == list(range(shards)) for members in groups)
    assert all(members == list(range(members[0], members[0] + shards)) for members in groups)


def positions(chosen: torch.Tensor) -> set[int]:
    return {position for position in chosen.tolist() if position >= 0}


def worst_logit(run: Run) -> float:
    """The largest distance of a logit from the right one for the tokens that this run has made."""
    return max(
        float(
            (part.logits - reference(run.decisions.finished[part.request]).logits[part.start :][: len(part.logits)])
            .abs()
            .max()
        )
        for part in run.ranks[0].computed
    )
