"""Calls that differ in what does not matter: one method of many layers, warnings that are ignored."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import pygraph
from pygraph.callables.host import host_state

from .attacked import X, reasons, replays


@pytest.mark.parametrize("layers", [8, 12, 70])
def test_a_method_of_several_layers(partitions: Any, layers: int) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        @pygraph.graph
        def forward(self, x: Any) -> Any:
            return x + torch.relu(self.linear(x))

    model = torch.nn.Sequential(*(Block() for _ in range(layers)))
    with torch.no_grad():
        for _ in range(30):
            model(torch.randn(2, 4))
    assert replays(partitions) > 0, reasons()


def test_warnings_are_ignored_around_each_call(
    partitions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call walks all that is reached: milliseconds to some 100 ms for a large model."""
    walks = []
    init = host_state.HostState.__init__

    def counting(self: Any, *args: Any, **kwargs: Any) -> None:
        walks.append(self)
        init(self, *args, **kwargs)

    def step(x: Any) -> Any:
        if x.shape[0] > 100:
            warnings.warn("a large batch", stacklevel=1)
        return x * 2

    graphed = pygraph.graph(step)

    def call() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graphed(X)

    for _ in range(12):
        call()
    assert replays(partitions) > 0
    monkeypatch.setattr(host_state.HostState, "__init__", counting)
    for _ in range(10):
        call()
    assert len(walks) < 5
