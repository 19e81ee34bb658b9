"""Versions after replays move where an uncaptured call moves them. Replays here count nothing by
themselves, as those of graphs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import pygraph

from ..graphed_programs import Training, adamw, assert_same, batches, fused_sgd, sgd
from ..test_served_calls import begun, served

pytestmark = pytest.mark.skipif(
    os.environ.get("PYGRAPH_SHORT_CHECKS") == "0", reason="all calls are left to Python"
)


def _foreach_sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)


def _versions(training: Training) -> list[int]:
    moments = [value for of in training.optimizer.state.values() for value in of.values()]
    found = [*training.model.state_dict(keep_vars=True).values(), *moments]
    return [tensor._version for tensor in found]


@pytest.mark.parametrize("optimizer", [adamw, fused_sgd, sgd, _foreach_sgd])
def test_versions_move_where_an_uncaptured_step_moves_them(partitions: Any, optimizer: Any) -> None:
    ours, theirs = Training(optimizer), Training(optimizer)
    graphed = pygraph.graph(ours.step)
    count = 0
    for x, y in batches(20):
        before = _versions(ours), _versions(theirs)
        graphed(x, y)
        theirs.step(x, y)
        after = _versions(ours), _versions(theirs)
        if not served(graphed):
            continue
        count += 1
        moved = [[a != b for a, b in zip(*of, strict=True)] for of in zip(before, after, strict=True)]
        assert moved[0] == moved[1]
    assert count > 5
    assert_same(ours.state(), theirs.state())


def test_owners_that_the_observed_call_sees_late_are_counted(partitions: Any) -> None:
    """It writes through another tensor first: whether the second one's version moved is not known."""
    at = torch.zeros(2)
    alias = at.detach()

    def call(x: torch.Tensor) -> torch.Tensor:
        alias.add_(1)
        return at + x

    graphed = begun(call, torch.zeros(2))
    version = at._version
    graphed(torch.zeros(2))
    assert served(graphed) == 1 and at._version > version


def test_a_write_that_autograd_is_not_told_of(partitions: Any) -> None:
    at = torch.zeros(2)
    graphed = begun(lambda x: (at.data.add_(1), at + x)[1], torch.zeros(2))
    before = graphed(torch.zeros(2)).clone()
    assert served(graphed) == 1 and torch.equal(graphed(torch.zeros(2)), before + 1)
