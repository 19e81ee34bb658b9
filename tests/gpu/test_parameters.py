"""A graph reads the parameters that the model has at each call."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

import pygraph
from tests.python.test_parameters import CHANGES, Model, X, Y


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
@pytest.mark.parametrize("trains", [False, True])
def test_a_change_is_seen_at_the_next_call(change: Callable[[Model], None], trains: bool) -> None:
    model, x, y = Model().cuda(), X.cuda(), Y.cuda()
    expected = copy.deepcopy(model)
    compiled = torch.compile(model, backend="pygraph")

    def check() -> None:
        with torch.set_grad_enabled(trains):
            result, wanted = compiled(x, y), expected(x, y)
        torch.testing.assert_close(result, wanted)
        if not trains:
            return
        for each, total in ((model, result), (expected, wanted)):
            each.zero_grad()
            total.sum().backward()
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)

    for _ in range(4):
        check()
    assert any(graph.replays for graph in pygraph.stats())
    with torch.device("cuda"):
        for each in (model, expected):
            change(each)
    for _ in range(4):
        check()
