"""Fixtures of the GPU tests: a clean compiler before each test, no leaked memory after it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pygraph
from pygraph import runtime, uncapturable
from pygraph.partition import recording_policy
from pygraph.select import decision_cache

from . import held_blocks, support


@pytest.fixture
def as_shipped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the test runs with what users get; see support.also_as_shipped."""
    is_shipped = bool(getattr(request, "param", False))
    monkeypatch.setattr(support, "_is_shipped", is_shipped)
    return is_shipped


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a cache of its own: two compilations must not find what another process tunes meanwhile."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.fixture
def holds_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs may hold blocks, of a memory that is the same on each GPU."""
    monkeypatch.delenv("PYGRAPH_HOLD_MEMORY", raising=False)
    with support.at_most(held_blocks.LIMIT):
        yield


@pytest.fixture(autouse=True)
def fresh_compiler(as_shipped: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    if as_shipped:
        monkeypatch.delenv("PYGRAPH_SELECT", raising=False)
        monkeypatch.setattr(
            decision_cache, "cache_dir", lambda: str(tmp_path)
        )  # none from earlier runs
    else:
        # Tests count replays; selection has tests of its own.
        monkeypatch.setenv("PYGRAPH_SELECT", "always")
        # Tests call few times; that varying shapes are recorded late is a test of its own.
        monkeypatch.setattr(recording_policy, "_RECORDED_AT_ONCE", 100)
        monkeypatch.setattr(recording_policy, "_RECORDED_AT_ONCE_IF_DYNAMIC", 100)
    _wait_for_the_end_of_a_profile()
    torch._dynamo.reset()
    # The whole process's in PyTorch 2.11: calls with dynamic=False in several threads leave it off.
    torch._dynamo.config.automatic_dynamic_shapes = True
    runtime.partitions.clear()
    uncapturable._found.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    pygraph.reset()


def _wait_for_the_end_of_a_profile() -> None:
    """Of an earlier test's: calls for some time after it are no samples of a trial."""
    engine = runtime.engine()
    end = time.monotonic() + 5
    while engine.needs_new_executable() and time.monotonic() < end:
        time.sleep(0.02)
