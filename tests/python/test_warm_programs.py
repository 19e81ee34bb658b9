"""Programs whose keys in AOTAutograd's cache lack something are not loaded, or their keys are
extended."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from pygraph.compile import warm_programs

from .graphs_on_the_cpu import CpuGraphs

_OPTIONS = {"pygraph.patches": "warm_start", "pygraph.warm_start": True}


def _start(
    function: Callable[..., Any],
    make: Callable[[], list[torch.Tensor]],
    options: dict[str, Any] = _OPTIONS,
    **how: Any,
) -> tuple[int, int]:
    """Runs a program as after a start of the process, and compares it with the uncompiled one. Returns
    the misses and hits in AOTAutograd's cache."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, backend="pygraph", options=options, **how)
    assert _run(compiled, make()) == _run(function, make())
    found = counters["aot_autograd"]
    return found["autograd_cache_miss"] + found["autograd_cache_bypass"], found["autograd_cache_hit"]


def _run(function: Callable[..., Any], args: list[torch.Tensor]) -> list[Any]:
    """The result, the arguments and their gradients afterwards."""
    result = function(*args)
    if result.requires_grad:
        result.sum().backward()
    gradients = [x.grad.tolist() if x.grad is not None else None for x in args]
    return [result.tolist(), [x.tolist() for x in args], gradients]


def _multiply_written(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return a * b


def _apart() -> list[torch.Tensor]:
    return [torch.arange(4.0), torch.arange(4.0)]


def _together() -> list[torch.Tensor]:
    memory = torch.arange(4.0)
    return [memory, memory.view(-1)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_inputs_that_share_memory_are_another_program(graphs: CpuGraphs, dynamic: bool) -> None:
    assert _start(_multiply_written, _apart, dynamic=dynamic) == (1, 0)
    assert _start(_multiply_written, _together, dynamic=dynamic) == (0, 0)
    assert _start(_multiply_written, _apart, dynamic=dynamic) == (0, 1)


def test_a_leaf_that_is_written_is_another_program(graphs: CpuGraphs) -> None:
    """AOTAutograd writes to a leaf without autograd; what is loaded must not write it otherwise."""

    def double(x: torch.Tensor) -> torch.Tensor:
        x.detach().mul_(2)
        return x * 3

    leaf = lambda: [torch.ones(4, requires_grad=True)]  # noqa: E731
    computed = lambda: [torch.ones(4, requires_grad=True).clone()]  # noqa: E731
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        assert _start(double, computed) == (1, 0)
        assert _start(double, leaf) == (1, 0)
        assert _start(double, computed) == (0, 1)
        assert _start(double, leaf) == (0, 1)


@pytest.mark.skipif(
    importlib.util.find_spec("torch._inductor.stream_utils") is None,
    reason="Inductor generates no code for streams",
)
def test_code_for_streams_is_kept_apart(graphs: CpuGraphs) -> None:
    """Where operators run is noted beside the program, and not in the keys of PyTorch's caches."""

    def on_a_stream(x: torch.Tensor) -> torch.Tensor:
        with torch.fx.traceback.annotate({"stream": None}):
            return x.sin() * 3

    make = lambda: [torch.arange(4.0)]  # noqa: E731
    for _ in range(2):
        assert _start(on_a_stream, make) == (0, 0)
        assert graphs.infos == []
    counters.clear()
    assert _start(lambda x: x.sin() * 3, make) == (1, 0)
    assert counters["inductor"]["fxgraph_cache_hit"] == 0
    assert len(graphs.infos) == 1
    assert _start(lambda x: x.sin() * 3, make, options={}) == (0, 0)
    assert counters["inductor"]["fxgraph_cache_hit"] == 0


@contextlib.contextmanager
def _operator(factor: float, key: str) -> Iterator[None]:
    """An operator of the program's; what it computes, or its gradient, changes with the factor."""
    with torch.library._scoped_library("pygraph_test", "DEF") as library:
        library.define("scaled(Tensor x) -> Tensor")
        library.impl("scaled", lambda x: x * factor, key)
        yield


def test_a_changed_operator_of_the_programs_is_found(graphs: CpuGraphs) -> None:
    for factor in (2.0, 3.0):
        with _operator(factor, "CompositeImplicitAutograd"):
            make = lambda: [torch.arange(4.0).requires_grad_()]  # noqa: E731
            assert _start(lambda x: torch.ops.pygraph_test.scaled(x).sin(), make) == (0, 0)


def test_changed_switches_are_another_program(
    graphs: CpuGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(q: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q).round()

    def start() -> tuple[int, int]:
        torch._dynamo.reset()
        counters.clear()
        torch.compile(attention, backend="pygraph", options=_OPTIONS)(torch.ones(1, 2, 8, 4))
        found = counters["aot_autograd"]
        return found["autograd_cache_miss"], found["autograd_cache_hit"]

    is_enabled = torch.backends.cuda.flash_sdp_enabled()
    assert start() == (1, 0)
    try:
        torch.backends.cuda.enable_flash_sdp(not is_enabled)
        assert start() == (1, 0)
    finally:
        torch.backends.cuda.enable_flash_sdp(is_enabled)
    assert start() == (0, 1)


class Doubling(torch.Tensor):
    """A subclass whose code decides what operators compute."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls: type[Doubling], inner: torch.Tensor) -> Doubling:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Doubling:
        return Doubling(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        return function(*(x.inner if isinstance(x, Doubling) else x for x in args)) * 2


def _graph(*operators: Any) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for operator in operators:
        x = graph.call_function(operator, (x,))
    graph.output(x)
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def test_reasons() -> None:
    x = torch.ones(4)
    plain = _graph(torch.sin, torch.ops.aten.sin.default, torch.ops.aten.cos)
    assert warm_programs.why_not(plain, [x, x, 3, torch.ones(4)]) == ""
    assert warm_programs.why_not(plain, [x, x[1:]]) == "inputs share memory"
    assert warm_programs.why_not(plain, [x.to_sparse()]) == "a tensor is not strided"
    assert warm_programs.why_not(plain, [Doubling(x)]) == "the code of a tensor's class may change"
    plain.weight = torch.nn.Parameter(x)
    assert warm_programs.why_not(plain, [x]) == "inputs share memory"
    assert warm_programs.why_not(plain, [plain.weight]) == ""
    with _operator(1.0, "CompositeExplicitAutograd"):
        for operator in (torch.ops.pygraph_test.scaled, torch.ops.pygraph_test.scaled.default):
            outer = _graph(torch.sin)
            outer.inner = _graph(operator)
            reason = "pygraph_test::scaled is not PyTorch's, and its code may change"
            assert warm_programs.why_not(outer, [x]) == reason


def test_a_question_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(x: object) -> bool:
        raise RuntimeError("a test")

    monkeypatch.setattr(warm_programs, "is_traceable_wrapper_subclass", fail)
    assert warm_programs.why_not(_graph(torch.sin), [torch.ones(4)]) == "RuntimeError: a test"


def test_the_types_of_autocast_are_in_the_key() -> None:
    found = {warm_programs.missing_key([])}
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            found.add(warm_programs.missing_key([]))
    assert len(found) == 3


def test_the_default_type_is_in_the_key() -> None:
    found = {warm_programs.missing_key([])}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found.add(warm_programs.missing_key([]))
    finally:
        torch.set_default_dtype(default)
    assert len(found) == 2


def test_the_current_device_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with inputs on the CPU means it by "cuda"."""
    found = {warm_programs.missing_key([])}  # before CUDA is initialized, the device 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for index in range(3):
        monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
        found.add(warm_programs.missing_key([]))
    assert len(found) == 3
