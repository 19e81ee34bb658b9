"""A module whose `forward` is graphed, inside of a model."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import pygraph

from .attacked import X, replays


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.encoder(x))


def _deepcopied(model: Any) -> Any:
    return copy.deepcopy(model)


def _pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def _saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [_deepcopied, _pickled, _saved])
def test_a_copy_has_parameters_of_its_own(partitions: Any, copied: Any) -> None:
    model = Model()
    model.encoder.forward = pygraph.graph(model.encoder.forward)  # type: ignore[method-assign]
    with torch.no_grad():
        for _ in range(8):
            model(X)
        other = copied(model)
        other.encoder.weight.mul_(2)
        plain = Model()
        plain.load_state_dict(other.state_dict())
        for i in range(8):
            assert torch.equal(other(X + i), plain(X + i)), i
            assert not torch.equal(other(X + i), model(X + i))
    assert [*dict(model.named_parameters())] == [*dict(Model().named_parameters())]
    assert replays(partitions) > 8
