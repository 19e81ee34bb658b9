"""What keeps a callable in a differentiated program from a graph, and what must not go wrong then."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import pygraph

from .gradient_programs import Pair, assert_alike, inputs, reasons, replays
from .test_graphed_gradient_calls import Module, both, two


class Scaled(torch.autograd.Function):
    """Saves as autograd asks for. Its backward reads a number of the program's."""

    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * Scaled.factor


class Keeps(torch.autograd.Function):
    """Keeps a tensor where autograd does not know of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, makes: bool) -> torch.Tensor:
        ctx.kept = x * 1 if makes else x
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.kept.cos(), None


CALLS: list[int] = []


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        CALLS.append(1)
        return gradient * 2


def hooked(self: Module, x: torch.Tensor) -> torch.Tensor:
    y = x @ self.w
    if y.requires_grad:
        y.register_hook(lambda g: g * 3)
    return y.sin()


def held(self: Module, x: torch.Tensor) -> torch.Tensor:
    y = x @ self.w
    return y.exp_().mul(self.b).relu_()


REFUSED: dict[str, tuple[Any, str]] = {
    "keeps an argument": (lambda self, x: Keeps.apply(x, False) * self.b, "keeps a tensor"),
    "keeps what it makes": (lambda self, x: Keeps.apply(x, True) * self.b, "keeps memory"),
    "a hook": (hooked, "a hook waits for a gradient"),
    "a view of an argument": (lambda self, x: x[:, :2], "lies in what it is given"),
    "an argument": (lambda self, x: x, "no function of anything that does"),
    "a view of a parameter": (lambda self, x: (self.w[0], x * 2), "lies in what it is given"),
    "one result from another": (lambda self, x: (lambda y: (y, y * 2))(x @ self.w), "computed from"),
    "the last result from another": (
        lambda self, x: (lambda y, z: (y, z, z * 2))(x @ self.w, x * self.b),
        "computed from",
    ),
    "views of each other": (lambda self, x: (lambda y: (y, y[0]))(x @ self.w), "computed from"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_have_a_graph(gradients: Any, name: str) -> None:
    forward, reason = REFUSED[name]
    pair = Pair(Module(forward))
    pair.steps(12, 3, 4)
    assert replays(gradients, "backward") == replays(gradients, "forward") == 0
    assert reason in reasons(gradients)


def test_an_argument_with_a_gradient_that_is_written_to(gradients: Any) -> None:
    pair = Pair(
        Module(lambda self, x: x.add_(1) @ self.w),
        call=lambda run, x: run(x * 2 if x.grad_fn else x + 0),
    )
    pair.steps(12, 3, 4)
    assert "writes to an argument that requires a gradient" in reasons(gradients)


def test_a_tensor_with_a_history_of_its_own(gradients: Any) -> None:
    module = Module(lambda self, x: x @ self.inner)
    outer = torch.ones(4, 4, requires_grad=True)
    module.inner = outer * 2
    run = pygraph.graph(module)
    for x in inputs(12, 3, 4):
        run(x).sum().backward(retain_graph=True)
    assert outer.grad is not None and "history of its own" in reasons(gradients)


def test_custom_functions(gradients: Any) -> None:
    pair = Pair(Module(lambda self, x: Scaled.apply(x @ self.w)))
    pair.steps(14, 3, 4)
    assert both(gradients)
    try:
        Scaled.factor = 3.0
        pair.steps(14, 3, 4)
        before = replays(gradients, "forward")
        runs = [run(torch.ones(3, 4, requires_grad=True)).sum() for run in (pair.plain, pair.run)]
        assert replays(gradients, "forward") == before + 1
        Scaled.factor = 5.0  # between forward and backward
        for loss in runs:
            loss.backward()
        pair.compare()
    finally:
        Scaled.factor = 2.0


def test_a_custom_function_that_counts_is_named(gradients: Any) -> None:
    module = Module(lambda self, x: Counts.apply(x * self.b))
    run = pygraph.graph(module)
    for x in inputs(14, 3, 4):
        CALLS.clear()
        run(x).sum().backward()
        assert CALLS == [1]
    assert "its backward changes" in reasons(gradients) and "CALLS" in reasons(gradients)


@pytest.mark.parametrize("is_backward", [False, True])
def test_hooks_on_modules(gradients: Any, is_backward: bool) -> None:
    pair = Pair(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
    for module in (pair.plain, pair.graphed):
        if is_backward:
            module[1].register_full_backward_hook(lambda m, i, o: (i[0] * 2,))
        else:
            module[0].register_forward_hook(lambda m, i, o: o * 2)
    pair.steps(12, 3, 4)
    if is_backward:
        assert "a hook waits" in reasons(gradients) and not replays(gradients, "forward")
    else:
        assert both(gradients)


def test_random_numbers(gradients: Any) -> None:
    pair = Pair(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)))
    pair.steps(12, 3, 4)  # on the CPU they come from the host
    assert "random numbers on the CPU" in reasons(gradients)


@pytest.mark.parametrize("is_first", [True, False])
def test_checkpointing_inside(gradients: Any, is_first: bool) -> None:
    def forward(self: Module, x: torch.Tensor) -> torch.Tensor:
        y = x if is_first else x * self.b
        return checkpoint(lambda y: (y @ self.w).sin() * self.number, y, use_reentrant=False)

    pair = Pair(Module(forward))
    for module in (pair.plain, pair.graphed):
        module.number = 2.0
    pair.steps(14, 3, 4)
    before = replays(gradients, "forward")
    runs = [run(torch.ones(3, 4, requires_grad=True)).sum() for run in (pair.plain, pair.run)]
    assert replays(gradients, "forward") == before + 1
    for module, loss in zip((pair.plain, pair.graphed), runs, strict=True):
        module.number = 3.0  # between the forward and the backward, which reads it again
        loss.backward()
    pair.compare()
    assert both(gradients)


def test_checkpointing_around_it(gradients: Any) -> None:
    pair = Pair(
        Module(lambda self, x: (x @ self.w).sin()),
        call=lambda run, x: checkpoint(run, x, use_reentrant=False) if x.sum() > 0 else run(x),
    )
    pair.steps(24, 3, 4)
    assert both(gradients, 1)


def test_saved_tensors_elsewhere(gradients: Any) -> None:
    def call(run: Any, x: torch.Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return run(x)

    Pair(Module(two), call=call).steps(12, 3, 4)
    assert replays(gradients, "forward") == 0


def test_memory_is_freed(gradients: Any) -> None:
    module = Module(two)
    run = pygraph.graph(module)
    alive = []
    for x in inputs(14, 3, 4):
        argument = x.requires_grad_() * 2
        result = run(argument)[1]
        alive += [weakref.ref(argument), weakref.ref(result)]
        result.sum().backward()
    del argument, result, x
    gc.collect()
    assert both(gradients) and [reference() for reference in alive] == [None] * len(alive)


def test_parameters_that_get_other_memory(gradients: Any) -> None:
    pair = Pair(Module(two))
    for turn in range(3):
        pair.steps(10, 3, 4)
        before = replays(gradients, "forward")
        runs = [run(torch.ones(3, 4, requires_grad=True))[1].sum() for run in (pair.plain, pair.run)]
        assert replays(gradients, "forward") == before + 1
        values = torch.full((4, 4), 0.1 * turn)
        for module, loss in zip((pair.plain, pair.graphed), runs, strict=True):
            module.w.data = values.clone()  # between forward and backward
            loss.backward()
        pair.compare()
        pair.plain.zero_grad(), pair.graphed.zero_grad()
    assert both(gradients, 6)


def test_the_backward_runs_in_another_thread(gradients: Any) -> None:
    pair = Pair(Module(two))
    pair.steps(5, 3, 4)
    for x in inputs(10, 3, 4):
        losses = [run(x)[1].sum() for run in (pair.plain, pair.run)]
        for loss in losses:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        pair.compare()
        pair.plain.zero_grad(), pair.graphed.zero_grad()
    assert both(gradients)


def test_a_reset_midway(gradients: Any) -> None:
    pair = Pair(Module(two))
    for _ in range(3):
        pair.steps(9, 3, 4)
        losses = [run(torch.ones(3, 4, requires_grad=True))[1].sum() for run in (pair.plain, pair.run)]
        pair.run.reset()
        for loss in losses:
            loss.backward()
        pair.compare()
        pair.plain.zero_grad(), pair.graphed.zero_grad()
    assert both(gradients, 6)


def test_a_callable_without_a_module(gradients: Any) -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    function = pygraph.graph(lambda x: (x @ weight).tanh())
    for x in inputs(12, 3, 4):
        ours, theirs = (
            torch.autograd.grad(f(x).sum(), weight) for f in (function, function.__wrapped__)
        )
        assert_alike(ours, theirs)
    assert both(gradients)


def test_a_whole_step_with_a_graphed_model_in_it(gradients: Any, partitions: Any) -> None:
    model = torch.nn.Linear(4, 2)
    inner, optimizer = pygraph.graph(model), torch.optim.SGD(model.parameters(), lr=0.1)

    @pygraph.graph
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = inner(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for x in inputs(9, 3, 4):
        step(x)
    assert sum(p.replays for p in partitions.all) >= 3


def test_statistics_between_forward_and_backward(gradients: Any) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    pair = Pair(module, call=lambda run, x: run(run(x)))
    pair.steps(14, 5, 4)
    assert both(gradients)


def test_forward_mode(gradients: Any) -> None:
    weight = torch.randn(4, 4)
    run = pygraph.graph(lambda x: (x @ weight).sin())
    for x in inputs(9, 3, 4):
        run(x.requires_grad_()).sum().backward()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        ours, theirs = (torch.autograd.forward_ad.unpack_dual(f(dual)) for f in (run, run.__wrapped__))
    assert ours.tangent is not None and torch.equal(ours.tangent, theirs.tangent)
