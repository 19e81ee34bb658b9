"""The state of a graphed step whose memory moves, or is replaced, between replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph

from .graph_training import Training, adamw, batches, mlp, sgd
from .support import captured

Change = Callable[[Training], object]


def _moments(training: Training) -> list[torch.Tensor]:
    of = training.optimizer.state
    return [value for state in of.values() for value in state.values() if torch.is_tensor(value)]


def _grow(training: Training) -> None:
    """Storages get other memory, with the same contents; tensors stay as they are."""
    with torch.no_grad():
        for tensor in (*training.model.parameters(), *_moments(training)):
            storage = tensor.untyped_storage()
            storage.resize_(2 * storage.nbytes() + 512)


def _grow_one(training: Training) -> None:
    storage = next(training.model.parameters()).untyped_storage()
    storage.resize_(storage.nbytes() + 512)


def _replace_data(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.data = parameter.data.clone()


def _swap_data(training: Training) -> None:
    """Of two moments of one shape: exchanged memory."""
    first = next(iter(training.optimizer.state.values()))
    a, b = first["exp_avg"], first["exp_avg_sq"]
    a.data, b.data = b.data, a.data.abs()


def _write(training: Training) -> None:
    with torch.no_grad():
        for tensor in training.model.parameters():
            tensor.mul_(0.5)


def _move(training: Training) -> None:
    training.model.cpu()
    training.model.cuda()


def _nothing(training: Training) -> None:
    pass


@pytest.mark.parametrize(
    "change", [_nothing, _grow, _grow_one, _replace_data, _swap_data, _write, _move]
)
def test_a_step_is_right_after_its_state_has_moved(change: Any) -> None:
    uncaptured, graphed = Training(mlp, adamw), Training(mlp, adamw)
    step = pygraph.graph(graphed.step, select="always")
    data = batches(40)
    for training, run in ((uncaptured, uncaptured.step), (graphed, step)):
        torch.manual_seed(2)
        for i, (x, y) in enumerate(data):
            if i in (15, 16, 30):
                change(training)
            run(x, y)
    for a, b in zip(graphed.state(), uncaptured.state(), strict=True):
        assert torch.equal(a, b), pygraph.stats()
    assert captured(), pygraph.stats()


def test_memory_that_moves_needs_no_other_graph() -> None:
    training = Training(mlp, adamw)
    step = pygraph.graph(training.step, select="always")
    data = batches(20)
    for i, (x, y) in enumerate(data):
        if i > 14:
            _grow(training)
        step(x, y)
    (graph,) = captured()
    assert graph.replays >= 5, pygraph.stats()


def _versions(training: Training) -> list[int]:
    return [tensor._version for tensor in (*training.model.parameters(), *_moments(training))]


@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_versions_are_counted_as_by_an_uncaptured_step(optimizer: Any) -> None:
    ours, theirs = Training(mlp, optimizer), Training(mlp, optimizer)
    step = pygraph.graph(ours.step, select="always")
    data = batches(20)
    for x, y in data[:-1]:
        step(x, y)
        theirs.step(x, y)
    before = _versions(ours), _versions(theirs)
    step(*data[-1])
    theirs.step(*data[-1])
    after = _versions(ours), _versions(theirs)
    moved = [[a != b for a, b in zip(*of, strict=True)] for of in zip(before, after, strict=True)]
    assert moved[0] == moved[1] and any(moved[0])
    assert captured()[0].replays >= 10
