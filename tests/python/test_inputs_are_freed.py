"""A compiled program keeps none of the tensors that it was compiled with."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch

from .graphs_on_the_cpu import CpuGraphs, install


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuGraphs]:
    torch._dynamo.reset()
    yield install(monkeypatch)
    torch._dynamo.reset()


@pytest.mark.parametrize("goes_backward", [False, True])
@pytest.mark.parametrize("is_leaf", [False, True])
def test_of_a_program_for_training(graphs: CpuGraphs, goes_backward: bool, is_leaf: bool) -> None:
    """Its backward is compiled later, so what its forward was compiled with is at hand for long."""
    model = torch.nn.Linear(8, 8)
    options = {"pygraph.optimizers": "auto"}  # for which the backend notes parameters
    compiled = torch.compile(model, backend="pygraph", options=options)
    x = torch.randn(4, 8, requires_grad=is_leaf)
    result = compiled(x)
    if goes_backward:
        result.sum().backward()
    assert graphs.infos
    kept = weakref.ref(x)
    del x, result
    assert kept() is None
