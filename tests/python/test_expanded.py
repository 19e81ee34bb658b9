"""Tensors that have one piece of memory at many places: read once, and never as large as they look."""

from __future__ import annotations

import random

import pytest
import torch

from pygraph.gpu.fingerprint import distinct, fingerprint
from pygraph.verify.bits import differing
from pygraph.verify.compare import Comparison

_MANY = 1 << 20  # of each of two dimensions; as many elements would take 4 TiB


def _expanded(value: float) -> torch.Tensor:
    return torch.full((1,), value).expand(_MANY, _MANY)


def _rows(value: float) -> torch.Tensor:
    return torch.full((3, 1), value).expand(3, _MANY * _MANY)


def _windows(value: float) -> torch.Tensor:
    return torch.full((2 * _MANY,), value).as_strided((_MANY, _MANY), (1, 1))


def _complex(value: float) -> torch.Tensor:
    return torch.full((2, 1), value, dtype=torch.complex64).expand(2, _MANY * _MANY)


LAYOUTS = [_expanded, _rows, _windows, _complex]


@pytest.mark.parametrize("make", LAYOUTS)
def test_fingerprints_and_bits(make: type) -> None:
    assert fingerprint(make(1.0)) == fingerprint(make(1.0)) != fingerprint(make(2.0))
    assert differing([make(1.0)], [make(1.0)], in_bits=True) == []
    assert differing([make(1.0)], [make(2.0)], in_bits=True) == [0]


@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize("error", [0.0, 1.0])
def test_comparisons(make: type, error: float) -> None:
    comparison = Comparison([make(1.0 + error)])
    comparison.find_unwritten([make(1.0 + error)])
    for _ in range(2):
        comparison.add_run([make(1.0)])
    comparison.add_replay([make(1.0 + error)])
    assert bool(comparison.mismatches()) == (error > 0)


def test_the_elements_are_those_of_the_tensor() -> None:
    chance = random.Random(0)
    memory = torch.arange(5000)
    for _ in range(2000):
        dimensions = chance.randrange(5)
        sizes = [chance.randrange(1, 6) for _ in range(dimensions)]
        strides = [chance.choice([0, 1, 2, 3, 4, 5, 6, 12, 30, 120]) for _ in range(dimensions)]
        tensor = memory.as_strided(sizes, strides, chance.randrange(9))
        found = distinct(tensor)
        assert set(found.flatten().tolist()) == set(tensor.flatten().tolist()), (sizes, strides)
        assert found.numel() <= tensor.numel()


def test_dense_tensors_have_one_dimension_in_the_order_of_memory() -> None:
    memory = torch.arange(24)
    for tensor in (memory.view(2, 3, 4), memory.view(2, 3, 4).permute(2, 0, 1), memory.view(4, 1, 6)):
        assert distinct(tensor).tolist() == list(range(24))


def test_a_change_of_any_element_shows() -> None:
    for position in range(6):
        memory = torch.zeros(2, 3)
        before = fingerprint(memory.unsqueeze(1).expand(2, 1000, 3))
        memory.view(-1)[position] = 1e-30
        assert fingerprint(memory.unsqueeze(1).expand(2, 1000, 3)) != before


def test_empty_tensors() -> None:
    assert distinct(torch.empty(0, 3)).shape == (0, 3)
    assert fingerprint(torch.empty(1, 0).expand(5, 0)) == 0
