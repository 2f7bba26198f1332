"""What a step has published and not written yet: who waits for it, and what is left of it after an abort."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from lockstep_kv import ConfigError, Coordinator, CoordinatorConfig, GroupSpec, LayerSpec, PrefixHit

Group = tuple[str, int, dict[str, Any]]

STATE: Group = ("mamba", 4, {"mamba_cache_mode": "all"})
ALIGNED: Group = ("mamba", 16, {"mamba_cache_mode": "align"})
PROMPT = list(range(64))


def coordinator(*groups: Group, unit: int | None = None) -> Coordinator:
    specs = [
        GroupSpec(kind, size, [LayerSpec(f"layer{at}", 64)], **options)
        for at, (kind, size, options) in enumerate(groups)
    ]
    return Coordinator(CoordinatorConfig(specs, 40, max_model_len=200, hash_block_tokens=unit))


def hashes(num_tokens: int, unit: int = 4) -> list[bytes]:
    found, last = [], b""
    for end in range(unit, num_tokens + 1, unit):
        last = hashlib.sha256(last + bytes(PROMPT[end - unit : end])).digest()
        found.append(last)
    return found


def publish(c: Coordinator, *names: str) -> None:
    """Requests of one prompt of 8 tokens in one step."""
    for name in names:
        assert c.allocate(name, 8) is not None
        c.cache(name, hashes(8), 8)


def test_what_was_written_before_outlives_a_request_that_is_given_up() -> None:
    c = coordinator(STATE)
    publish(c, "a")
    c.new_step()
    c.free("a")
    publish(c, "b")
    c.forget_unwritten("b", 0)
    c.free("b")
    assert c.find_longest_hit(hashes(8), 8).block_ids == ([0, 2],)
    c.audit()


def test_of_two_writers_one_is_given_up() -> None:
    c = coordinator(STATE)
    publish(c, "a", "b")
    c.forget_unwritten("a", 0)
    c.free("a")
    hit = c.find_longest_hit(hashes(8), 8)
    assert hit.block_ids == ([0, 4],)
    assert c.allocate("c", 9, hit=hit) is None, "the other one has not written it yet"
    c.new_step()
    assert c.allocate("c", 9, hit=hit) is not None
    c.audit()


@pytest.mark.parametrize("late", ["a", "b"])
def test_of_two_writers_one_has_come_back(late: str) -> None:
    c = coordinator(STATE)
    publish(c, "a", "b")
    c.new_step({late: 0})
    hit = c.find_longest_hit(hashes(8), 8)
    assert c.allocate("c", 9, hit=hit) is None, "a request takes the block that is found first, whoever writes it"
    c.new_step()
    assert c.allocate("c", 9, hit=hit) is not None
    c.audit()


def test_a_block_that_became_another_ones_is_not_forgotten() -> None:
    c = coordinator(STATE)
    publish(c, "a")
    c.evict(c.block_ids("a")[0])
    publish(c, "b")
    c.new_step({"a": 0})
    c.forget_unwritten("a", 0)
    assert c.find_longest_hit(hashes(8), 8).block_ids == ([0, 4],)
    c.audit()


def run(c: Coordinator, name: str, start: int, end: int, prompt: int, hit: PrefixHit | None = None) -> object:
    """One step of a request."""
    return c.allocate_slots(
        name,
        end,
        hit=hit,
        computed_tokens=start,
        block_hashes=hashes(end),
        cache_tokens=end,
        num_prompt_tokens=prompt,
    )


def test_a_block_is_not_copied_before_it_is_written() -> None:
    c = coordinator(("full", 16, {}), ALIGNED, unit=4)
    for start, end in ((0, 16), (16, 20), *((at, at + 1) for at in range(20, 33))):
        assert run(c, "a", start, end, 21) is not None
        c.new_step()
    blocks = c.block_ids("a")[0]
    c.free("a")
    c.evict(blocks)
    c.take_block_copies()
    # The blocks of attention are computed again, the state inside of them is still there.
    assert run(c, "b", 0, 32, 21) is not None
    hit = c.find_longest_hit(hashes(20), 20)
    assert hit.num_tokens == 20
    digest = c.state_digest()
    assert run(c, "c", 20, 21, 21, hit) is None
    assert c.state_digest() == digest
    c.new_step()
    assert run(c, "c", 20, 21, 21, hit) is not None
    assert [group for group, _, _ in c.take_block_copies()] == [0, 1]


def test_a_block_that_was_written_before_can_be_copied_by_many() -> None:
    c = coordinator(("full", 8, {}), ALIGNED, unit=4)
    for start, end in ((0, 20), (20, 21), (21, 22)):
        assert run(c, "a", start, end, 21) is not None
        c.new_step()
    assert run(c, "a", 22, 23, 21) is not None
    for name in ("b", "c"):
        hit = c.find_longest_hit(hashes(20), 20)
        assert hit.num_tokens == 20
        assert run(c, name, 20, 21, 21, hit) is not None, "the others publish blocks of their own under the same key"


def test_a_state_is_not_named_by_fewer_tokens_than_it_holds() -> None:
    c = coordinator(("full", 4, {}), ALIGNED, unit=4)
    c.allocate("a", 16)
    c.cache("a", hashes(16), 16)
    c.cache("a", hashes(16), 12, num_prompt_tokens=13)
    c.new_step()
    assert c.find_longest_hit(hashes(12), 12).num_tokens == 0
    assert c.find_longest_hit(hashes(16), 16).num_tokens == 16


@pytest.mark.parametrize("missing", [[1], [3], [1, 3], [0, 1, 2, 3]])
def test_a_window_with_a_hole_is_no_hit(missing: list[int]) -> None:
    c = coordinator(("full", 4, {}), ("sliding_window", 4, {"sliding_window": 12}))
    c.allocate("a", 16)
    c.cache("a", hashes(16), 16)
    full, window = c.block_ids("a")
    row = [0 if at in missing else block for at, block in enumerate(window)]
    digest = c.state_digest()
    with pytest.raises(ConfigError, match="null block"):
        c.hit_of([full, row], 16)
    assert c.state_digest() == digest
    assert c.allocate("b", 17, hit=c.hit_of([full, [0, *window[1:]]], 16)) is not None


def test_nothing_is_found_where_nothing_can_be() -> None:
    groups: list[Group] = [
        ("circular_buffer", 4, {}),
        ("sliding_window", 4, {"sliding_window": 8, "prefix_cacheable": False}),
    ]
    for group in groups:
        c = coordinator(group)
        hit = c.find_longest_hit(hashes(16), 15)
        assert (hit.num_tokens, hit.block_ids) == (0, ([],))
        assert c.allocate("a", 16, hit=hit) is not None
        assert c.stats()["hit_tokens"] == 0


def test_rows_that_no_machine_can_hold_are_refused() -> None:
    layers = [LayerSpec("layer", 64)]
    for group in (
        GroupSpec("mamba", 4, layers, mamba_cache_mode="align"),
        GroupSpec("sliding_window", 4, layers, sliding_window=4),
    ):
        with pytest.raises(ConfigError, match="max_model_len"):
            CoordinatorConfig([group], 20, max_model_len=2**64 - 1)


def test_the_retention_interval_is_part_of_the_state() -> None:
    c = coordinator(("sliding_window", 4, {"sliding_window": 8}))
    digest = c.state_digest()
    c.set_retention_interval(8)
    assert c.state_digest() != digest
