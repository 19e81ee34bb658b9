"""Inputs that only PyGraph has (bindings/replay/own_inputs.h), as far as they need no GPU. Replays with
them are in tests/gpu/test_graph_state.py."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from pygraph import runtime
from pygraph.partition.signature import PartitionInfo
from pygraph.partition.tuple_arguments import unpacked_info


def _callable() -> Any:
    return runtime.engine().graphed_callable(list, list, 0)


def test_a_callable_keeps_its_own_inputs_as_long_as_it_lives() -> None:
    callable_ = _callable()
    tensors = [torch.ones(2), torch.ones(3)]
    ends = [weakref.ref(tensor) for tensor in tensors]
    runtime.engine().own_inputs(callable_, tensors, 1)
    tensors.clear()
    assert all(end() is not None for end in ends)
    runtime.engine().own_inputs(callable_, [torch.ones(1)], 0)  # in place of those
    assert all(end() is None for end in ends)
    del callable_


def test_a_cycle_through_own_inputs_is_collected() -> None:
    callable_ = _callable()
    tensor: Any = torch.ones(2)
    tensor.callable = callable_
    runtime.engine().own_inputs(callable_, [tensor], 0)
    end = weakref.ref(tensor)
    del callable_, tensor
    gc.collect()
    assert end() is None


@pytest.mark.parametrize(
    "wrong", [1, torch.ones(4)[1:], torch.eye(2).to_sparse()], ids=["number", "view", "sparse"]
)
def test_what_cannot_be_an_own_input(wrong: Any) -> None:
    with pytest.raises(ValueError, match="own inputs"):
        runtime.engine().own_inputs(_callable(), [torch.ones(2), wrong], 0)
    with pytest.raises(ValueError, match="graphed_callable"):
        runtime.engine().own_inputs(wrong, [torch.ones(2)], 0)


def test_a_partition_of_unpacked_tuples_has_none() -> None:
    info = PartitionInfo("p", "inference", 0, 2, True, own=([torch.ones(1)], 1))
    assert unpacked_info(info, (2, None)).own is None
