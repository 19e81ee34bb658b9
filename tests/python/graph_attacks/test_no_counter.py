"""Tensors without a version counter that are no inference tensors any more."""

from __future__ import annotations

from typing import Any

import torch

import pygraph

from .attacked import X


def test_a_model_of_inference_mode_that_was_converted(partitions: Any) -> None:
    with torch.inference_mode():
        model = torch.nn.Linear(4, 4)
    model.double().float()  # sets the data of its parameters
    assert not model.weight.is_inference()
    call = torch.no_grad()(lambda x: model(x))
    graphed = pygraph.graph(call)
    for _ in range(8):
        assert torch.equal(graphed(X), call(X))
