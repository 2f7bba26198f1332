"""A pytest plugin for vLLM's tests: loads lockstep-kv as `LOCKSTEP_KV` says, and records who managed each test.

Each test of pytest's JUnit report gets the property `nodeid`, and one property `manager` for each answer that was given
when it made a `KVCacheManager`: `lockstep`, or `stock: ` and the reason why vLLM's own manager runs.
"""

from __future__ import annotations

from typing import Any

import pytest

from lockstep_kv.vllm import plugin

FIXTURES = "tests.v1.kv_connector.unit.offloading_connector.conftest"
"""vLLM's, of the tests of its offloading connector: the tests run without the `conftest.py` files around them."""

_answers: set[str] = set()


def pytest_configure(config: pytest.Config) -> None:
    """Load lockstep-kv as vLLM does, before anything of the tests is imported."""
    plugin.register()
    if plugin.mode() != "off":
        _listen()
    config.pluginmanager.import_plugin(FIXTURES)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start a test."""
    _answers.clear()
    item.user_properties.append(("nodeid", item.nodeid))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Note what the test was told."""
    item.user_properties += [("manager", answer) for answer in sorted(_answers)]


def _listen() -> None:
    """Note what is decided whenever a manager is made."""
    from lockstep_kv.vllm import LockstepKVCacheManager
    from lockstep_kv.vllm.coverage import NotCoveredError

    decide = LockstepKVCacheManager.check_covered

    def check_covered(*args: Any, **kwargs: Any) -> Any:
        try:
            covered = decide(*args, **kwargs)
        except NotCoveredError as error:
            _answers.add(f"stock: {error}")
            raise
        _answers.add("lockstep")
        return covered

    LockstepKVCacheManager.check_covered = check_covered  # type: ignore[method-assign]
