"""A compiled function behaves as PyTorch's, called by the engine or by PyTorch's wrappers."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo import eval_frame
from torch._dynamo.mutation_guard import GenerationTracker

from tests.python.compiled_programs import Backend, OurBackend, Scaled, X

pytestmark = pytest.mark.usefixtures("patched")


class Failing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 3:
            raise KeyError("three")
        return x + 1


def test_modules_are_called_by_the_engine() -> None:
    assert type(eval_frame.OptimizedModule.__dict__["__call__"]).__name__ == "method_descriptor"


def test_only_programs_of_ours_are_called_by_the_engine() -> None:
    for backend, is_ours in ((OurBackend(), True), (Backend(), False), ("eager", False)):
        module = torch.compile(Scaled(), backend=backend)
        function = torch.compile(lambda x: x + 1, backend=backend)
        for call in (module.forward, function):
            assert hasattr(call, "_pygraph_compiled_call") == is_ours
    with_settings = torch.compile(Scaled(), backend=OurBackend(), dynamic=True)  # at each call
    assert not hasattr(with_settings.forward, "_pygraph_compiled_call")


def test_modules_and_functions(backend: Backend) -> None:
    module = Scaled()
    compiled = torch.compile(module, backend=backend)
    for plus in (1.0, 1.0):
        assert torch.equal(compiled(X, plus=plus), X * 2 + plus)
    assert (backend.graphs, module.calls) == (1, 0)
    function = torch.compile(lambda x, y=1.0: x + y, backend=backend)
    for _ in range(3):
        assert torch.equal(function(X), X + 1)
        assert torch.equal(function(X, y=1.0), X + 1)
    assert backend.graphs == 2
    with pytest.raises(TypeError, match="positional"):
        compiled(X, X)
    assert torch.equal(compiled.forward(X, plus=1.0), X * 2 + 1)


def test_a_changed_parameter_and_shape(backend: Backend) -> None:
    module = Scaled()
    compiled = torch.compile(module, backend=backend)
    compiled(X)
    module.weight = torch.nn.Parameter(torch.full((3,), 5.0))
    assert torch.equal(compiled(X), X * 5)
    assert torch.equal(compiled(X[None]), (X * 5)[None])


def test_a_method_is_bound(backend: Backend) -> None:
    class Model:
        scale = 3.0

        @torch.compile(backend=backend)
        def run(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    assert torch.equal(Model().run(X), X * 3)
    assert list(inspect.signature(Model.run).parameters) == ["self", "x"]


def test_what_can_be_seen_of_it(backend: Backend) -> None:
    module = Scaled()
    compiled = torch.compile(module, backend=backend)
    assert type(compiled) is eval_frame.OptimizedModule
    assert repr(compiled) == "OptimizedModule(\n  (_orig_mod): Scaled()\n)"
    assert list(compiled.state_dict()) == ["_orig_mod.weight"]
    assert "args" in inspect.signature(compiled).parameters
    assert "x" in inspect.signature(Scaled.forward).parameters

    def named(x: torch.Tensor) -> torch.Tensor:
        """Documented."""
        return x + 1

    function = torch.compile(named, backend=backend)
    assert (function.__name__, function.__doc__) == ("named", "Documented.")
    assert inspect.unwrap(function) is named
    assert eval_frame.innermost_fn(function) is named
    again = torch.compile(function, backend=backend)
    assert eval_frame.innermost_fn(again) is named
    assert torch.equal(again(X), X + 1)
    assert torch.equal(torch.compiler.disable(function)(X), X + 1)


def test_exceptions_are_the_programs(backend: Backend) -> None:
    compiled = torch.compile(Failing(), backend=backend)
    for _ in range(2):
        with pytest.raises(KeyError, match="three"):
            compiled(X)
        assert not eval_frame._is_in_optimized_module()
        assert torch.equal(compiled(X[:2]), X[:2] + 1)


@pytest.mark.parametrize("verbose", [False, True])
def test_exceptions_of_dynamo(backend: Backend, verbose: bool) -> None:
    @torch.compile(backend=backend, fullgraph=True)
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    @torch.compile(backend=backend, fullgraph=True)
    def recompiles(x: torch.Tensor, n: int) -> torch.Tensor:
        return x + n if n < 2 else (torch._dynamo.graph_break(), x)[1]

    with torch._dynamo.config.patch(verbose=verbose):
        for _ in range(2):
            with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
                breaks(X)
        assert torch.equal(recompiles(X, 1), X + 1)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
            recompiles(X, 2)
        assert torch.equal(recompiles(X, 1), X + 1)


def test_a_backend_that_fails(backend: Backend) -> None:
    class Broken(type(backend)):  # type: ignore[misc]
        def __call__(self, *_: Any) -> Callable[..., Any]:
            raise ValueError("not compiled")

    compiled = torch.compile(lambda x: x + 1, backend=Broken())
    torch.compile(lambda x: x, backend=backend)(X)
    for _ in range(2):
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="not compiled") as error:
            compiled(X)
        names = [entry.name for entry in error.traceback]
        assert "_compile" not in names


def test_stances(backend: Backend) -> None:
    module = Scaled()
    compiled = torch.compile(module, backend=backend)
    with torch.compiler.set_stance("force_eager"):
        compiled(X)
        assert (backend.graphs, module.calls) == (0, 1)
    compiled(X)
    assert (backend.graphs, module.calls) == (1, 1)
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(X)
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            compiled(X[None])
    with torch.compiler.set_stance("default", force_backend="eager"):
        compiled(X[None])
    assert backend.graphs == 1
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        compiled(X)
    compiled(X)
    assert (backend.graphs, module.calls) == (1, 1)


def test_within_other_tracers(backend: Backend) -> None:
    module = Scaled()
    compiled = torch.compile(module, backend=backend)
    compiled(X)
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace"):
        torch.jit.trace(compiled.forward, (X,))

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = compiled

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + 1

    graphs = backend.graphs
    inlined = Backend()
    assert torch.equal(torch.compile(Outer(), backend=inlined, fullgraph=True)(X), X * 2 + 1)
    assert (inlined.graphs, backend.graphs) == (1, graphs)
    exported = torch.export.export(Outer(), (X,))
    assert torch.equal(exported.module()(X), X * 2 + 1)
    assert backend.graphs == graphs


def test_a_compiled_function_within_another(backend: Backend) -> None:
    inner = torch.compile(lambda x: x * 3, backend=backend)
    inner(X)
    outer_backend = Backend()

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return inner(x) + 1

    traced = torch.compile(function, backend=outer_backend)
    for _ in range(2):
        assert torch.equal(traced(X), (X + 1) * 3 + 1)
    untraced = torch.compile(
        lambda x: torch.compiler.disable(lambda y: inner(y), recursive=False)(x + 1),
        backend=outer_backend,
    )
    for _ in range(2):
        assert torch.equal(untraced(X), (X + 1) * 3)


def test_function_transforms(backend: Backend) -> None:
    compiled = torch.compile(Scaled(), backend=backend)
    compiled(X)
    assert torch.equal(torch.func.vmap(compiled)(X.expand(2, 3)), (X * 2).expand(2, 3))
    assert torch.equal(torch.func.grad(lambda x: compiled(x).sum())(X), torch.full((3,), 2.0))

    @torch.compile(backend=backend)
    def fails_inside(x: torch.Tensor, n: int) -> torch.Tensor:
        def one(x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            if n == 1:
                raise ValueError("one")
            return x + n

        return torch.func.vmap(one)(x)

    assert torch.equal(fails_inside(X, 2), X + 2)
    with pytest.raises(ValueError, match="one"):
        fails_inside(X, 1)
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0


def test_generations_are_counted(backend: Backend) -> None:
    module = torch.compile(Scaled(), backend=backend)
    function = torch.compile(lambda x: x + 1, backend=backend)
    module(X)
    for call in (module, module.forward, function):
        before = GenerationTracker.generation
        call(X)
        assert GenerationTracker.generation == before + 1


def test_gradients_and_modes(backend: Backend) -> None:
    module = Scaled()
    compiled = torch.compile(module, backend=backend)
    compiled(X).sum().backward()
    assert torch.equal(module.weight.grad, X)
    with torch.no_grad():
        assert not compiled(X).requires_grad
    with torch.inference_mode():
        assert compiled(X).is_inference()
    assert compiled(X).requires_grad


def test_threads(backend: Backend) -> None:
    compiled = torch.compile(Scaled(), backend=backend)
    compiled(X)
    wrong: list[int] = []

    def work() -> None:
        for i in range(300):
            if not torch.equal(compiled(X + i), (X + i) * 2):
                wrong.append(i)
            if eval_frame.set_eval_frame(None) is not None:
                wrong.append(-i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert backend.graphs == 1


def test_nothing_is_kept(backend: Backend) -> None:
    module = Scaled()
    compiled = torch.compile(module, backend=backend)
    module.__dict__["itself"] = compiled  # a cycle through the engine's function
    compiled(X)
    references = [weakref.ref(module), weakref.ref(compiled)]
    del module, compiled
    torch._dynamo.reset()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_the_reference_counts_of_a_call_balance() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Scaled(), backend=OurBackend())
    compiled(X)
    call = compiled.forward._pygraph_compiled_call
    assert call.__name__ == "compiled_call"
    watched = [*call.__self__, compiled, compiled.__dict__, True, False, X]
    before = [sys.getrefcount(thing) for thing in watched]
    for _ in range(1000):
        compiled(X)
    after = [sys.getrefcount(thing) for thing in watched]
    assert all(abs(a - b) < 100 for a, b in zip(after, before, strict=True))
