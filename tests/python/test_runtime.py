"""Whether graphs can be used in a process. On the CPU, with a GPU pretended."""

from __future__ import annotations

import types

import pytest
import torch

from pygraph import runtime


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    fake = types.SimpleNamespace(driver_version=lambda: 13000)
    monkeypatch.setattr(runtime, "engine", lambda: fake)


@pytest.mark.parametrize(
    ("version", "asked", "is_available"),
    [("2.11.0+cu130", "", True), ("2.16.1+cu130", "", False), ("2.16.1+cu130", "1", True)],
)
def test_releases_without_a_run_on_a_gpu_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, version: str, asked: str, is_available: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setenv("PYGRAPH_UNTESTED_RELEASES", asked)
    reason = runtime.unavailable_reason.__wrapped__()
    assert (reason is None) == is_available
    assert is_available or "PyTorch 2.16" in str(reason)
