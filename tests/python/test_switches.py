"""Switches that operators read when they are launched are part of a call's signature."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pygraph import runtime

_cuda, _cudnn = torch.backends.cuda, torch.backends.cudnn


def _signature() -> bytes:
    return bytes(runtime.engine().signature([torch.ones(2), 3], 0))


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = _signature()
    yield
    assert _signature() == before


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (_cudnn, "enabled"),
        (_cudnn, "benchmark"),
        (_cudnn, "benchmark_limit"),
        (_cudnn, "deterministic"),
        (_cudnn, "allow_tf32"),
        (_cuda.matmul, "allow_tf32"),
        (_cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        (_cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        (_cuda.matmul, "allow_fp16_accumulation"),
        (torch.utils.deterministic, "fill_uninitialized_memory"),
    ],
)
def test_attributes(owner: Any, name: str) -> None:
    before, usual = _signature(), getattr(owner, name)
    setattr(owner, name, 3 if name == "benchmark_limit" else not usual)
    changed = _signature()
    setattr(owner, name, usual)
    assert changed != before


@pytest.mark.parametrize("kind", ["flash", "mem_efficient", "math", "cudnn"])
def test_attention_backends(kind: str) -> None:
    before = _signature()
    switch = getattr(_cuda, f"enable_{kind}_sdp")
    switch(False)
    assert _signature() != before
    switch(True)


@pytest.mark.parametrize("warn_only", [False, True])
def test_deterministic_algorithms(warn_only: bool) -> None:
    before = _signature()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    assert _signature() != before
    torch.use_deterministic_algorithms(False)


def test_older_and_newer_ways_to_set_a_precision_may_be_mixed() -> None:
    usual = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    before = _signature()
    _cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    assert _signature() != before
    torch.set_float32_matmul_precision(usual)
