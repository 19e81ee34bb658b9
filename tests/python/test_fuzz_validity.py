"""Generated programs are valid at every size that they are called with.

What an invalid one gives depends on what lies in memory, and differs between any two runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fuzz import custom_ops
from tests.fuzz.generate import generate
from tests.fuzz.program import Input, Program, from_json, is_valid, meta_inputs, namespace
from tests.fuzz.scope import Scope

pytestmark = pytest.mark.filterwarnings("ignore")

# At size 4 the kernel reads four elements of a2, of which one is in memory. The next one was, in the
# uncaptured run, what an earlier call had left there: its result v7.
READS_BEHIND: dict[str, Any] = {
    "seed": 113462,
    "level": "partition",
    "kind": "forward",
    "inputs": [
        {
            "name": "a0",
            "shape": ["s"],
            "dtype": "float32",
            "layout": "misaligned",
            "is_parameter": True,
            "values": "normal",
        },
        {
            "name": "a1",
            "shape": ["s", 33],
            "dtype": "bfloat16",
            "layout": "plain",
            "is_parameter": True,
            "values": "normal",
        },
        {
            "name": "a2",
            "shape": ["s"],
            "dtype": "float32",
            "layout": "expanded",
            "is_parameter": False,
            "values": "small",
        },
    ],
    "statements": [
        {
            "outputs": ["v4"],
            "template": "ops.triton_scale({0})",
            "args": ["a2"],
            "meta": "",
            "writes": [],
            "cut": False,
            "chance": False,
            "fragile": False,
            "draws": False,
        }
    ],
    "returns": ["v4", "a1", "v4"],
    "calls": [
        {"size": 0, "reuse": {}, "values": "", "before": [], "after": []},
        {"size": 1, "reuse": {"a0": "same"}, "values": "", "before": [], "after": []},
    ],
    "sizes": [1, 4],
    "cuts": [],
    "settings": {
        "frees": True,
        "hints": "exact",
        "shipped": False,
        "mode": "concurrent",
        "lanes": 8,
        "away": False,
    },
}


def test_a_kernel_that_reads_behind_its_argument_at_one_size_is_not_valid() -> None:
    program = from_json(READS_BEHIND)
    assert not is_valid(program)
    program.sizes = [1]
    program.calls = program.calls[:1]
    assert is_valid(program)


def test_the_triton_kernels_get_contiguous_tensors_of_one_shape() -> None:
    given = []
    for seed in (113462, 111796, *range(60)):  # the first two read behind an argument once
        program = generate(seed, "partition")
        given += [tensors for size in program.sizes for tensors in _given_to_triton(program, size)]
    assert len(given) > 8
    assert all(t.is_contiguous() and t.shape == tensors[0].shape for tensors in given for t in tensors)


def _given_to_triton(program: Program, size: int) -> list[list[torch.Tensor]]:
    values = {**namespace("meta"), **meta_inputs(program, size)}
    found = []
    for statement in program.statements:
        if "ops.triton" in statement.template:
            found.append([values[name] for name in statement.args])
        exec(statement.source(on_meta=True), values)
    return found


def test_a_value_is_picked_for_what_it_is_at_all_sizes() -> None:
    inputs = [Input("a0", ["s"], layout="expanded"), Input("a1", ["s"])]
    scope = Scope(random.Random(1), inputs, [1, 4], is_compiled=False)
    assert {scope.pick(torch.Tensor.is_contiguous) for _ in range(50)} == {"a1"}
    assert {scope.writable() for _ in range(50)} == {"a1"}
    assert {scope.pick() for _ in range(50)} == {"a0", "a1"}


@pytest.mark.parametrize(
    "call",
    [
        lambda x: custom_ops.triton_scale(x[:1].expand(4)),
        lambda x: custom_ops.triton_add(x, x[:1]),
        lambda x: custom_ops.triton_where_large(x, x[:2].repeat(2)[::2]),
    ],
)
def test_what_the_triton_kernels_cannot_take_is_refused_without_a_gpu_too(
    call: Callable[[torch.Tensor], object],
) -> None:
    with pytest.raises(ValueError, match="contiguous tensors of one shape"):
        call(torch.ones(4))
