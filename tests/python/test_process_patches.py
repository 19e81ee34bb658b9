"""Functions that are replaced for all programs of the process do as PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.utils as functorch_utils
from torch._dynamo import eval_frame, guards
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from pygraph import torch_patches
from pygraph.torch_patches import dead_wrappers, module_flag, numbers, pregraph_range
from tests.python.compiled_programs import ReducingBackend
from tests.python.patched_programs import FITTING, needs

pytestmark = pytest.mark.usefixtures("patched")


def _plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_they_are_replaced_once() -> None:
    for _ in range(2):
        assert eval_frame._set_in_optimized_module is module_flag.InOptimizedModule
        is_ours = functorch_utils.unwrap_dead_wrappers is dead_wrappers.unwrap_dead_wrappers
        assert is_ours is ("dead_wrappers" in FITTING)
        assert guards.from_numpy is numbers.from_numpy
        enter, leave = pregraph_range.enter_range, pregraph_range.exit_range
        is_ours = torch._dynamo.utils.record_pregraph_bytecode_enter is enter
        assert is_ours is ("pregraph_range" in FITTING)
        assert is_ours is (torch._dynamo.utils.record_pregraph_bytecode_exit is leave)
        torch_patches.install()


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
    assert pregraph_range.enter_range() is None
    pregraph_range.exit_range(None)


def test_nothing_but_the_callable_of_the_backend_is_called_and_nothing_is_traced() -> None:
    """The functions that take the place of Dynamo's are not compiled themselves."""
    torch._dynamo.reset()
    backend = ReducingBackend(reduces=True)
    compiled = torch.compile(_plus_one, backend=backend)
    for _ in range(3):
        compiled(torch.ones(2))
    assert backend.graphs == 1
    for ours in (pregraph_range.enter_range, pregraph_range.exit_range):
        assert not _debug_get_cache_entry_list(ours.__code__)


def test_the_flag_of_compiled_modules() -> None:
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


@needs("dead_wrappers")
def test_what_a_transform_left_is_unwrapped_as_always() -> None:
    ours, theirs = functorch_utils.unwrap_dead_wrappers, dead_wrappers.pytorchs_unwrap
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


def test_autograd_functions_are_traced_as_always() -> None:
    torch._dynamo.reset()
    x = torch.ones(2, requires_grad=True)
    compiled = torch.compile(lambda x: _Twice.apply(x, 3), backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 3.0))
