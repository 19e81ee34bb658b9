"""Numbers on the host that graphs follow, as arguments of the engine
(bindings/tensors/followed_number.h)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from pygraph import runtime


def _signature(*arguments: Any) -> bytes:
    return runtime.engine().signature(list(arguments), 0)


def test_they_are_numbers_to_python_and_to_pytorch() -> None:
    number = runtime.engine().FollowedNumber(0.25)
    assert isinstance(number, float) and number == 0.25 and number + 1 == 1.25
    assert torch.equal(torch.ones(2) * number, torch.full((2,), 0.25))
    assert type(copy.deepcopy(number)) is type(number)


def test_a_signature_leaves_their_value_out() -> None:
    make = runtime.engine().FollowedNumber
    assert _signature(make(0.25)) == _signature(make(0.5))
    assert _signature(make(0.25)) != _signature(0.25)
    assert _signature(make(0.25)) != _signature(make(0.25), make(0.25))
    assert _signature(0.25) != _signature(0.5)


@pytest.mark.parametrize("value", ["x", None])
def test_they_are_made_of_numbers(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        runtime.engine().FollowedNumber(value)
