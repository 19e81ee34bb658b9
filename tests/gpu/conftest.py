"""Fixtures of the GPU tests: a clean compiler before each test, no leaked memory after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import pygraph
from pygraph import learned_cuts, recording_policy, runtime


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Tests count replays; selection has tests of its own.
    monkeypatch.setenv("PYGRAPH_SELECT", "always")
    # Tests call few times; that varying shapes are recorded late is a test of its own.
    monkeypatch.setattr(recording_policy, "_RECORDED_AT_ONCE", 100)
    monkeypatch.setattr(recording_policy, "_RECORDED_AT_ONCE_IF_DYNAMIC", 100)
    torch._dynamo.reset()
    runtime.partitions.clear()
    monkeypatch.setattr(learned_cuts, "_learned", {})
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    pygraph.reset()
