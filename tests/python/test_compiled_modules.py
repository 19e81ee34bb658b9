"""A compiled module behaves as PyTorch's, called by the engine or by PyTorch's wrappers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.python.compiled_programs import Backend, OurBackend, Scaled, X

pytestmark = pytest.mark.usefixtures("patched")


def _count_hooks(backend: Backend, register: Callable[..., Any], on_compiled: bool) -> int:
    torch._dynamo.reset()
    module = Scaled()
    compiled = torch.compile(module, backend=backend)
    compiled(X).sum().backward()
    seen: list[str] = []
    handle = register(compiled if on_compiled else module)(lambda *_: seen.append("hook"))
    try:
        for _ in range(2):
            compiled(X).sum().backward()
        count = len(seen)
    finally:
        handle.remove()
    compiled(X).sum().backward()
    assert len(seen) == count
    return count


@pytest.mark.parametrize(
    "register",
    [
        lambda module: module.register_forward_hook,
        lambda module: module.register_forward_pre_hook,
        lambda module: module.register_full_backward_hook,
        lambda module: module.register_full_backward_pre_hook,
        lambda _: torch.nn.modules.module.register_module_forward_hook,
        lambda _: torch.nn.modules.module.register_module_forward_pre_hook,
        lambda _: torch.nn.modules.module.register_module_full_backward_hook,
    ],
)
@pytest.mark.parametrize("on_compiled", [False, True])
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
def test_hooks_run(register: Callable[..., Any], on_compiled: bool) -> None:
    counts = [_count_hooks(kind(), register, on_compiled) for kind in (OurBackend, Backend)]
    assert counts[0] == counts[1]
    if not on_compiled:
        assert counts[0] >= 2


def test_what_the_user_replaces_is_called(backend: Backend) -> None:
    module = Scaled()
    compiled = torch.compile(module, backend=backend)
    compiled(X)
    module.forward = lambda x: x - 1  # type: ignore[method-assign]
    assert torch.equal(compiled(X), X - 1)
    compiled.forward = lambda x: x - 2
    assert torch.equal(compiled(X), X - 2)
    del module.forward

    class Other(Scaled):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) - 3

    other = torch.compile(Other(), backend=backend)
    for _ in range(2):
        assert torch.equal(other(X), X * 2 - 3)


def test_a_replaced_call_of_all_modules_is_called(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = torch.compile(Scaled(), backend=backend)
    compiled(X)
    original, seen = torch.nn.Module.__call__, []

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(type(self).__name__)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "__call__", call)
    assert torch.equal(torch.compile(Scaled(), backend=backend)(X), X * 2)
    assert seen == ["OptimizedModule", "Scaled"]


def test_modules_that_compile_themselves(backend: Backend) -> None:
    module = Scaled()
    module.compile(backend=backend)
    for _ in range(2):
        assert torch.equal(module(X, plus=1.0), X * 2 + 1)
    around = torch.compile(module, backend=backend)
    for _ in range(2):
        assert torch.equal(around(X, plus=1.0), X * 2 + 1)


def test_modules_of_pytorchs(backend: Backend) -> None:
    module = torch.nn.Linear(3, 2)
    compiled = torch.compile(module, backend=backend)
    for _ in range(2):
        assert torch.equal(compiled(X), module(X))
    assert backend.graphs == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(copied: Callable[[Any], Any]) -> None:
    compiled = torch.compile(Scaled(), backend="pygraph")
    twin = copied(compiled)
    assert hasattr(twin.forward, "_pygraph_compiled_call")
    twin._orig_mod.weight.data.fill_(7)
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(twin(X), X * 7)
        assert torch.equal(compiled(X), X * 2)
