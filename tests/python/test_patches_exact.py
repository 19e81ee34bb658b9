"""With the exact patches, guards notice what Dynamo's full guards notice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import config

from tests.python.compiled_programs import ReducingBackend, X
from tests.python.patched_programs import Layer, Model


def _replace_dict(model: Model) -> Any:
    kept = model.layers[1].__dict__
    model.layers[1].__dict__ = copy.deepcopy(Layer(7.0).__dict__)
    return kept


def _replace_class(model: Model) -> Any:
    class Negative(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -super().forward(x)

    model.layers[1].__class__ = Negative


class _Computed(Layer):
    pass


def _give_property(model: Model) -> Any:
    model.layers[1].__class__ = _Computed
    found = {"weight": nn.Parameter(torch.full((3,), 8.0)), "bias": nn.Parameter(torch.ones(3))}
    _Computed._parameters = property(lambda self: found)  # type: ignore[assignment]


@pytest.mark.parametrize("change", [_replace_dict, _replace_class, _give_property])
def test_whatever_full_guards_notice_is_noticed(change: Callable[[Model], Any]) -> None:
    """And nothing but that."""
    found = []
    with config.patch(use_recursive_dict_tags_for_guards=False):
        for reduces in (False, True):
            torch._dynamo.reset()
            model = Model()
            compiled = torch.compile(model, backend=ReducingBackend(reduces))
            for _ in range(3):
                torch.testing.assert_close(compiled(X), model(X))
            kept = change(model)
            try:
                found.append([torch.equal(compiled(X), model(X)) for _ in range(3)])
            finally:
                if "_parameters" in _Computed.__dict__:
                    del _Computed._parameters
            del kept
    assert found[0] == found[1]
    assert all(found[0]) or change is _give_property  # whose class was seen to have none
