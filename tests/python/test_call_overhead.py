"""What Dynamo does before a call is made cheaper for PyGraph's programs only, with the same result."""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch._functorch.utils as functorch_utils
from torch._dynamo import decorators, eval_frame
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from pygraph import runtime
from pygraph.compile.wrapper_bypass import Route, Shortcut
from pygraph.torch_patches import call_overhead
from tests.python.compiled_programs import ReducingBackend

NUMBERS = (
    *(np.float64(2.5), np.float32(-2.5), np.float16(1.5), np.float64("nan"), np.float64("inf")),
    *(np.int64(-(2**63)), np.int32(3), np.int16(-3), np.int8(-3), np.uint8(255), np.bool_(True)),
    *(np.longlong(5), np.uint16(9), np.complex64(1j), np.array(3.0), np.array([1, 2])),
    *(2.5, -7, 2**62, True, float("-inf")),
)


def _code(function: Callable[..., Any], reduces: bool) -> types.CodeType:
    torch._dynamo.reset()
    assert torch.equal(
        torch.compile(function, backend=ReducingBackend(reduces))(torch.ones(2)), torch.ones(2) + 1
    )
    return _code_of(function)


def _code_of(function: Callable[..., Any]) -> types.CodeType:
    (entry,) = _debug_get_cache_entry_list(function.__code__)
    return entry.code


def _plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _ranges(calls: Callable[[], Any]) -> int:
    with torch.profiler.profile() as profile:
        calls()
    return sum(event.name == "Pregraph bytecode" for event in profile.events())


def test_the_range_is_there_where_somebody_profiles() -> None:
    for reduces in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(_plus_one, backend=ReducingBackend(reduces))
        compiled(torch.ones(2))
        assert _ranges(lambda call=compiled: [call(torch.ones(2)) for _ in range(3)]) == 3
    assert call_overhead._enter_range() is None
    call_overhead._exit_range(None)


def test_nothing_but_the_callable_of_the_backend_is_called_and_nothing_is_traced() -> None:
    """The functions that take the place of Dynamo's are not compiled themselves."""
    torch._dynamo.reset()
    backend = ReducingBackend(reduces=True)
    compiled = torch.compile(_plus_one, backend=backend)
    for _ in range(3):
        compiled(torch.ones(2))
    assert backend.graphs == 1
    for ours in (call_overhead._enter_range, call_overhead._exit_range):
        assert not _debug_get_cache_entry_list(ours.__code__)


def test_nothing_changes_outside_of_a_compilation() -> None:
    gm = torch.fx.symbolic_trace(_plus_one)
    before = dict(gm.__dict__)
    call_overhead.reduce(gm)
    assert gm.__dict__ == before


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: f"{type(n).__name__}:{n}")
def test_as_tensor_is_pytorchs(number: Any) -> None:
    ours, theirs = runtime.engine().as_tensor(number), torch._as_tensor_fullprec(number)
    assert (ours.dtype, ours.shape, ours.device) == (theirs.dtype, theirs.shape, theirs.device)
    assert torch._C._dispatch_keys(ours) == torch._C._dispatch_keys(theirs)
    assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))
    with torch.inference_mode():
        assert runtime.engine().as_tensor(number).is_inference()


@pytest.mark.parametrize("wrong", ["a string", 2**70, None, object()])
def test_what_is_no_number_raises_as_in_pytorch(wrong: Any) -> None:
    with pytest.raises(Exception) as theirs:
        torch._as_tensor_fullprec(wrong)
    with pytest.raises(theirs.type, match=re.escape(str(theirs.value))):
        runtime.engine().as_tensor(wrong)


def test_arrays_share_their_memory() -> None:
    array = np.zeros(())
    runtime.engine().as_tensor(array).fill_(3)
    assert array == 3


def test_a_default_device_is_that_of_numpys_numbers() -> None:
    with torch.device("meta"):
        assert runtime.engine().as_tensor(np.float64(1)).device.type == "meta"
        assert runtime.engine().as_tensor(1.0).device.type == "cpu"  # as _as_tensor_fullprec


class Scaled(torch.nn.Module):
    def __init__(self, temperature: Any) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / self.temperature


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64, np.array])
def test_numbers_of_a_model_may_change(kind: Callable[[Any], Any]) -> None:
    torch._dynamo.reset()
    model, backend = Scaled(kind(4)), ReducingBackend(reduces=True)
    compiled = torch.compile(model, backend=backend)
    x = torch.ones(3)
    for value in (4, 8, 16):
        model.temperature = kind(value)
        assert torch.equal(compiled(x), x / value)
    assert backend.graphs == 1
    (entry,) = _debug_get_cache_entry_list(Scaled.forward.__code__)
    assert "__import_pygraph_dot__engine" in entry.code.co_names
    model.temperature = np.complex64(2)  # another dtype, another program
    assert torch.equal(compiled(x), x / 2)
    model.temperature = kind(2)
    assert torch.equal(compiled(x), x / 2)
    assert backend.graphs == 2


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: f"{type(n).__name__}:{n}")
@pytest.mark.parametrize("device", [None, "cpu", "meta"])
def test_numbers_in_guards_are_dynamos(number: Any, device: str | None) -> None:
    with torch.device(device) if device else contextlib.nullcontext():
        ours, theirs = call_overhead._from_numpy(number), call_overhead._dynamos_from_numpy(number)
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape, ours.device) == (theirs.dtype, theirs.shape, theirs.device)
        assert ours.is_meta or torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))
    else:
        assert ours is theirs


def test_numbers_of_other_backends_are_loaded_as_always() -> None:
    for reduces in (True, False):
        torch._dynamo.reset()
        torch.compile(Scaled(np.float64(4)), backend=ReducingBackend(reduces))(torch.ones(3))
        (entry,) = _debug_get_cache_entry_list(Scaled.forward.__code__)
        assert ("__import_pygraph_dot__engine" in entry.code.co_names) == reduces


def test_numbers_of_python_that_vary() -> None:
    torch._dynamo.reset()
    backend = ReducingBackend(reduces=True)
    compiled = torch.compile(lambda x, scale: x * scale, backend=backend, dynamic=True)
    x = torch.ones(3)
    for scale in (0.5, 1 / 3, 2.0, float("inf")):
        assert torch.equal(compiled(x, scale), x * scale)
    assert backend.graphs <= 3


def test_the_flag_of_compiled_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_frame, "_set_in_optimized_module", eval_frame._set_in_optimized_module)
    call_overhead.reduce_for_process()
    assert eval_frame._set_in_optimized_module is call_overhead._InOptimizedModule
    call_overhead.reduce_for_process()  # once more changes nothing
    seen: list[bool] = []

    class Nested(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(eval_frame._is_in_optimized_module())
            if len(seen) < 3:
                return torch.compile(self, backend="eager")(x)
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"), torch.compiler.set_stance("force_eager"):
        torch.compile(Nested(), backend="eager")(torch.ones(2))
    assert seen == [True] * 3
    assert not eval_frame._is_in_optimized_module()


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: int) -> torch.Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


def test_what_a_transform_left_is_unwrapped_as_always(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = call_overhead._pytorchs_unwrap
    monkeypatch.setattr(functorch_utils, "unwrap_dead_wrappers", theirs)
    call_overhead.reduce_for_process()
    ours = functorch_utils.unwrap_dead_wrappers
    assert ours is not theirs
    seen: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        assert ours((1, x))[1] is x  # alive: not to be unwrapped
        return x.sum()

    torch.func.grad(function)(torch.arange(3.0))
    args = (torch.ones(2), 2, None, seen[0])
    for a, b in zip(ours(args), theirs(args), strict=True):
        assert type(a) is type(b)
        assert a is b or torch.equal(a, b)
    plain = args[:3]
    assert ours(plain) is plain
    assert torch.equal(_Twice.apply(seen[0], 2), 2 * torch.arange(3.0))
    x = torch.ones(2, requires_grad=True)
    _Twice.apply(x, 2).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))


def test_autograd_functions_are_traced_as_always(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = call_overhead._pytorchs_unwrap
    monkeypatch.setattr(functorch_utils, "unwrap_dead_wrappers", theirs)
    call_overhead.reduce_for_process()
    torch._dynamo.reset()
    x = torch.ones(2, requires_grad=True)
    compiled = torch.compile(lambda x: _Twice.apply(x, 3), backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 3.0))


class _WholeGraph(ReducingBackend):
    """Returns what PyGraph's backend returns for a graph that is one partition."""

    def __init__(self) -> None:
        super().__init__(reduces=True)
        self.calls = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        run = super().__call__(gm, inputs)
        partition = runtime.engine().graphed_callable(list, list, 0)

        def uncaptured(*args: torch.Tensor) -> Any:  # would be traced, and its own calls compiled
            self.calls += 1
            assert torch._C._dynamo.eval_frame.get_eval_frame_callback() is None
            return run(*args)

        route = Route(list(range(len(inputs))), [(True, 0, None)])
        return Shortcut(partition, len(inputs), route).around(uncaptured)


def test_a_whole_graph_is_called_without_python_in_between() -> None:
    torch._dynamo.reset()
    before = decorators.DisableContext
    backend = _WholeGraph()
    compiled = torch.compile(_plus_one, backend=backend)
    with runtime.uncaptured():  # which can be looked at without a GPU
        for _ in range(3):
            assert torch.equal(compiled(torch.ones(2)), torch.ones(2) + 1)
    assert (backend.graphs, backend.calls) == (1, 3)
    (name,) = (n for n in _code_of(_plus_one).co_names if n.startswith("__compiled_fn"))
    assert type(_plus_one.__globals__[name]) is runtime.engine().WholeGraphCallable
    assert decorators.DisableContext is before


def test_other_functions_are_not_traced_either() -> None:
    function = _plus_one
    _code(function, reduces=True)
    (name,) = (n for n in _code_of(function).co_names if n.startswith("__compiled_fn"))
    assert function.__globals__[name]._torchdynamo_disable


def test_an_unknown_flag_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def other() -> None:
        raise NotImplementedError

    monkeypatch.setattr(eval_frame, "_set_in_optimized_module", other)
    call_overhead.reduce_for_process()
    assert eval_frame._set_in_optimized_module is other
