"""Patches of one compilation are not seen by another: around it, within it, or in another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch._dynamo import config, decorators, eval_frame
from torch._guards import Guard

from pygraph import torch_patches
from pygraph.torch_patches import selection
from pygraph.torch_patches.selection import ALL, EXACT, NONE
from tests.python.compiled_programs import Backend, ReducingBackend, X
from tests.python.patched_programs import Layer, Model, described, loads_parameters_at_once

ALL_NAMES = selection.parse("patches", ALL)

pytestmark = pytest.mark.usefixtures("patched")


class Other(Model):
    """Another backend's."""

    table = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.table * self.factor


def _compile_other() -> str:
    model = Other()
    torch.testing.assert_close(torch.compile(model, backend=Backend())(X), model(X))
    return described(Other.forward)


@pytest.fixture
def plain() -> str:
    torch._dynamo.reset()
    return _compile_other()


@pytest.fixture(autouse=True)
def dynamo_is_as_before() -> Iterator[None]:
    before = Guard.create, decorators.DisableContext, config.record_runtime_overhead
    yield
    assert before == (Guard.create, decorators.DisableContext, config.record_runtime_overhead)


class _Around(ReducingBackend):
    """Does something else while a program of ours is being compiled, after what it is changed by."""

    def __init__(self, between: Callable[[], Any]) -> None:
        super().__init__(True, ALL)
        self.between = between
        self.found: Any = None

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        run = super().__call__(gm, inputs)
        self.found = self.between()
        return run


def _check_ours() -> None:
    assert loads_parameters_at_once(Model.forward)


def test_another_backends_program_within_ours_is_as_always(plain: str) -> None:
    torch._dynamo.reset()
    backend = _Around(_compile_other)
    model = Model()
    torch.testing.assert_close(torch.compile(model, backend=backend)(X), model(X))
    assert backend.found == plain
    _check_ours()


def test_ours_within_another_backends(plain: str) -> None:
    class Outer(Backend):
        def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            run = super().__call__(gm, inputs)
            model = Model()
            compiled = torch.compile(model, backend=ReducingBackend(True, ALL))
            torch.testing.assert_close(compiled(X), model(X))
            return run

    torch._dynamo.reset()
    model = Other()
    torch.testing.assert_close(torch.compile(model, backend=Outer())(X), model(X))
    assert described(Other.forward) == plain
    _check_ours()


def test_another_backends_program_in_another_thread_after_ours(plain: str) -> None:
    """Something of ours stays pending, as a lazy backward in another thread."""
    torch._dynamo.reset()
    found: list[str] = []
    handler = torch._dynamo.callback.callback_handler
    trigger = torch._dynamo.callback.CallbackTrigger.LAZY_BACKWARD
    with handler.install_callbacks(trigger, "0/0"):
        model = Model()
        torch.testing.assert_close(
            torch.compile(model, backend=ReducingBackend(True, ALL))(X), model(X)
        )
        thread = threading.Thread(target=lambda: found.append(_compile_other()))
        thread.start()
        thread.join()
    assert found == [plain]
    _check_ours()


def _fails() -> Any:
    raise KeyError("injected")


def test_another_backends_program_after_ours_has_failed(plain: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match="injected"):
        torch.compile(Model(), backend=_Around(_fails))(X)
    assert _compile_other() == plain


def test_after_a_graph_break_each_graph_is_changed() -> None:
    class Broken(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            torch._dynamo.graph_break()
            return super().forward(x)

    torch._dynamo.reset()
    model, backend = Broken(), ReducingBackend(True, ALL)
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        torch.testing.assert_close(compiled(X), model(X))
    assert backend.graphs == 2
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(X), model(X))


def test_graphs_that_the_backend_makes_itself_change_nothing(plain: str) -> None:
    """A part of a program, as DistributedDataParallel's, or a program of its own."""

    class Splits(Backend):
        def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            torch_patches.apply(torch.fx.symbolic_trace(lambda x: x + 1), ALL_NAMES)
            return super().__call__(gm, inputs)

    torch._dynamo.reset()
    model = Other()
    torch.testing.assert_close(torch.compile(model, backend=Splits())(X), model(X))
    assert described(Other.forward) == plain


def test_without_patches_a_program_is_dynamos(plain: str) -> None:
    torch._dynamo.reset()
    model = Other()
    torch.compile(model, backend=ReducingBackend(True, NONE))(X)
    assert described(Other.forward) == plain


def test_threads_compile_and_call_at_once() -> None:
    torch._dynamo.reset()
    errors: list[BaseException] = []
    gate = threading.Barrier(4)

    def work(number: int) -> None:
        try:
            gate.wait()
            for turn in range(3):
                model = (Model, Other)[(number + turn) % 2]()
                backend = ReducingBackend(number % 2 == 0, (EXACT, ALL)[turn % 2])
                compiled = torch.compile(model, backend=backend)
                for value in (1.0, 2.0):
                    torch.testing.assert_close(compiled(X), model(X))
                    model.layers[turn] = Layer(value)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    eval_frame._in_optimized_module = False  # threads may leave another value; PyTorch's too
