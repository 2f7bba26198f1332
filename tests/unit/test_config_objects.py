"""Configuration objects are values: they compare, print, copy and pickle. Live objects refuse to."""

from __future__ import annotations

import copy
import pickle

import pytest

from lockstep_kv import BlockPool, Coordinator, CoordinatorConfig, GroupSpec, LayerSpec

LAYER = LayerSpec("model.layers.0", 4096)
GROUP = GroupSpec("sliding_window", 16, [LAYER, LayerSpec("b", 1)], kv_shards=2, sliding_window=64, is_eagle=True)
CONFIG = CoordinatorConfig(
    [GroupSpec("full", 16, [LAYER])],
    99,
    dcp_world_size=2,
    enable_caching=False,
    hash_block_tokens=8,
    max_model_len=1024,
    use_eagle=True,
    enable_events=True,
)


@pytest.mark.parametrize("value", [LAYER, GROUP, CONFIG], ids=lambda value: type(value).__name__)
def test_values_survive_copies_and_pickles(value: object) -> None:
    for same in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert same == value
        assert repr(same) == repr(value)
    assert value != object()


def test_specs_hash_as_they_compare() -> None:
    assert len({LAYER, LayerSpec("model.layers.0", 4096), LayerSpec("model.layers.0", 4097)}) == 2
    assert len({GROUP, copy.deepcopy(GROUP)}) == 1


@pytest.mark.parametrize("live", [Coordinator(CONFIG), BlockPool(4)], ids=lambda live: type(live).__name__)
def test_live_objects_refuse_to_be_copied(live: object) -> None:
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="pickle"):
            attempt(live)


def test_none_is_not_a_default() -> None:
    with pytest.raises(TypeError, match="enable_caching must be a bool, got NoneType"):
        BlockPool(4, None)  # type: ignore[arg-type]
