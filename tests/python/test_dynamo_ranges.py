"""Dynamo's range around the loading of arguments is left out, and only for PyGraph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo import config
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from pygraph import dynamo_ranges


def _without_range(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    dynamo_ranges.leave_out()
    return gm.forward


def _has_range(function: Callable[..., Any], backend: Any) -> bool:
    torch._dynamo.reset()
    assert torch.equal(torch.compile(function, backend=backend)(torch.ones(2)), torch.ones(2) + 1)
    (entry,) = _debug_get_cache_entry_list(function.__code__)
    return "record_pregraph_bytecode_enter" in entry.code.co_names


def test_the_range_is_left_out_of_one_program_and_no_other() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert config.record_runtime_overhead
    assert _has_range(function, "eager")
    for _ in range(2):
        assert not _has_range(function, _without_range)
        assert config.record_runtime_overhead
    assert _has_range(function, "eager")


def test_nothing_changes_outside_of_a_compilation() -> None:
    dynamo_ranges.leave_out()
    assert config.record_runtime_overhead


def test_a_value_that_the_user_has_set_stays() -> None:
    with config.patch(record_runtime_overhead=False):
        assert not _has_range(lambda x: x + 1, _without_range)
        assert not config.record_runtime_overhead
