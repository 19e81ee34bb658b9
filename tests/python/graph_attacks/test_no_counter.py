"""Tensors without a version counter that are no inference tensors any more."""

from __future__ import annotations

from typing import Any

import torch

import pygraph

from .attacked import X


def test_a_tensor_of_inference_mode_with_other_data(partitions: Any) -> None:
    with torch.inference_mode():
        at = torch.ones(4)
    at.data = torch.full((4,), 3.0)
    assert not at.is_inference()
    call = torch.no_grad()(lambda x: x * at)
    graphed = pygraph.graph(call)
    for _ in range(8):
        assert torch.equal(graphed(X), call(X))
