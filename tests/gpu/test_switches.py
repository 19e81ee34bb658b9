"""Switches that kernels read when they are launched, flipped between calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import pygraph
from pygraph import runtime
from pygraph.options import Options
from pygraph.partition.partition import Partition
from pygraph.partition.signature import PartitionInfo

from .support import assert_same, captured, compiled, randn

_cuda, _cudnn = torch.backends.cuda, torch.backends.cudnn


@contextlib.contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


_SWITCHES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "matmul.allow_tf32": lambda: _set(_cuda.matmul, "allow_tf32", True),
    "cudnn.benchmark": lambda: _set(_cudnn, "benchmark", True),
    "cudnn.deterministic": lambda: _set(_cudnn, "deterministic", True),
    "cudnn.allow_tf32": lambda: _set(_cudnn, "allow_tf32", False),
    "fp16 reductions": lambda: _set(_cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "bf16 reductions": lambda: _set(_cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "fp16 accumulation": lambda: _set(_cuda.matmul, "allow_fp16_accumulation", True),
    "deterministic algorithms": _deterministic,
}


def _uncaptured(model: Any, *args: torch.Tensor) -> Any:
    with runtime.uncaptured():  # the same compiled code
        return model(*args)


def _program(x: torch.Tensor, half: torch.Tensor, image: torch.Tensor, w: torch.Tensor) -> Any:
    return x @ x, half @ half, torch.nn.functional.conv2d(image, w)


@pytest.mark.parametrize("name", list(_SWITCHES))
def test_a_call_under_another_switch_is_what_it_is_uncaptured(name: str) -> None:
    model = compiled(_program)
    args = randn(512, 512), randn(512, 512).half(), randn(2, 64, 32, 32), randn(64, 64, 3, 3)
    with torch.no_grad():
        for _ in range(4):
            model(*args)
        for _ in range(3):  # there and back
            for scope in (_SWITCHES[name], contextlib.nullcontext):
                with scope():
                    expected = _uncaptured(model, *args)
                    for _ in range(4):
                        result = model(*args)
                if name == "cudnn.benchmark":  # which may pick another algorithm
                    torch.testing.assert_close(result, expected, atol=1e-1, rtol=1e-2)
                else:
                    assert_same(result, expected)


def test_cudnn_is_switched_off() -> None:
    """Inductor's code asserts the strides that cuDNN gives: without cuDNN, the call raises."""
    model = compiled(_program)
    args = randn(512, 512), randn(512, 512).half(), randn(2, 64, 32, 32), randn(64, 64, 3, 3)
    with torch.no_grad():
        for _ in range(4):
            expected = model(*args)
        for call in (_uncaptured, lambda model, *args: model(*args)):
            with _set(_cudnn, "enabled", False), pytest.raises(AssertionError, match="stride"):
                call(model, *args)
        assert_same(model(*args), expected)


def test_tf32_of_convolutions_is_seen() -> None:
    model = compiled(lambda x, w: torch.nn.functional.conv2d(x, w))
    x, w = randn(4, 256, 32, 32), randn(256, 256, 3, 3)
    results = {}
    with torch.no_grad():
        for allowed in (True, False, True, False):
            with _set(_cudnn, "allow_tf32", allowed):
                for _ in range(4):
                    results[allowed] = model(x, w)
                assert_same(results[allowed], _uncaptured(model, x, w))
    assert not torch.equal(results[True], results[False])
    assert len(captured()) == 2


def test_the_newer_way_to_set_precisions() -> None:
    model = compiled(lambda x, w: torch.nn.functional.conv2d(x, w))
    x, w = randn(4, 256, 32, 32), randn(256, 256, 3, 3)
    with torch.no_grad():
        for precision in ("tf32", "ieee", "tf32", "ieee"):
            with _set(_cudnn.conv, "fp32_precision", precision):
                for _ in range(4):
                    result = model(x, w)
                assert_same(result, _uncaptured(model, x, w))
    assert len(captured()) == 2


def test_attention_backends() -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    q = randn(2, 8, 128, 64).half()
    model = compiled(lambda q: attend(q, q, q) * 2)
    with torch.no_grad():
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION) * 2:
            with sdpa_kernel(backend):
                for _ in range(4):
                    result = model(q)
                assert_same(result, _uncaptured(model, q))


def test_switches_that_are_back_need_no_new_graph() -> None:
    model = compiled(lambda x, w: torch.nn.functional.conv2d(x, w))
    x, w = randn(2, 64, 16, 16), randn(64, 64, 3, 3)
    with torch.no_grad():
        for _ in range(10):
            for enabled in (True, False):
                with _set(_cudnn, "deterministic", enabled):
                    model(x, w)
    assert len(captured()) == 2
    assert sum(row.replays for row in captured()) >= 14


def test_random_numbers_of_two_generators_where_fresh_memory_is_filled() -> None:
    """Deterministic algorithms fill what torch.empty gives, also where a recording needs a tensor."""
    generator = torch.Generator("cuda")

    def function(args: list[Any]) -> tuple[torch.Tensor]:
        x, own = args
        args.clear()
        return (torch.dropout(x, 0.5, True) + torch.rand(8, device="cuda", generator=own),)

    nothing = frozenset[int]()
    info = PartitionInfo("test", "inference", 0, 2, True, nothing, nothing, (), nothing)
    partition = Partition(function, info, Options(select="always"))
    x = randn(8)

    def run(call: Callable[[list[Any]], Sequence[Any]]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        generator.manual_seed(2)
        return [call([x, generator])[0].clone() for _ in range(5)]

    with _deterministic():
        assert_same(run(partition.callable), run(function))
    assert sum(row.replays for row in captured()) >= 3, pygraph.stats()
