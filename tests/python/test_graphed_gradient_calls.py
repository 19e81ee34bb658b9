"""Ways to call and to differentiate a graphed callable: results, arguments, backwards of all kinds."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import pygraph

from . import gradient_world
from .gradient_programs import Pair, assert_alike, inputs, reasons, replays


class Module(torch.nn.Module):
    """A forward of the test's, on a weight and a bias."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = torch.nn.Parameter(torch.randn(4, 4) / 4)
        self.b = torch.nn.Parameter(torch.randn(4) / 4)
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)


def both(partitions: Any, least: int = 3) -> bool:
    """Whether forwards and backwards were replayed."""
    found = replays(partitions, "forward"), replays(partitions, "backward")
    return min(found) >= least


def two(self: Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = (x @ self.w).tanh()
    return h.sin(), h * self.b


def branches(self: Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x @ self.w, (x * self.b).exp()


FORWARDS: dict[str, Any] = {
    "saved result": lambda self, x: (x @ self.w).exp(),
    "two results": two,
    "nested": lambda self, x: {"a": [x * self.b, 3, None], "b": ((x @ self.w).relu(), "text")},
    "index": lambda self, x: ((x @ self.w).max(-1).values, (x * self.b).argmax(-1)),
    "the same twice": lambda self, x: (lambda y: (y, y))(x @ self.w),
    "detached as well": lambda self, x: (lambda y: (y, y.detach()))((x @ self.w).sigmoid()),
    "chunks": lambda self, x: (x @ self.w).sigmoid().chunk(2, dim=-1),
    "unused parameter": lambda self, x: x @ self.w,
    "no gradient to x": lambda self, x: x.detach() @ self.w,
    "expanded": lambda self, x: x.sum() * self.b,
    "views of a parameter": lambda self, x: x @ self.w.t()[:, :2] + self.w[0, :2],
    "complex": lambda self, x: torch.fft.rfft(x * self.b).abs(),
    "in place inside": lambda self, x: (x @ self.w).add_(1).mul_(2).relu_(),
    "slices written": lambda self, x: torch.zeros(3, 4).index_copy(0, torch.arange(3), x * self.b),
    "gradient inside": lambda self, x: (
        torch.autograd.grad((x.detach() @ self.w).sin().sum(), self.w, create_graph=True)[0] * x.sum()
    ),
    "no_grad inside": lambda self, x: x * self.b + torch.no_grad()(lambda: x @ self.w)(),
    "argument passed on": lambda self, x: (x * self.b, x.detach()),
    "scatter": lambda self, x: x.gather(-1, (x * self.b).argsort(-1)) * self.b,
}


@pytest.mark.parametrize("name", FORWARDS)
def test_forwards_of_many_kinds(gradients: Any, name: str) -> None:
    pair = Pair(Module(FORWARDS[name]))
    pair.steps(12, 3, 4)
    assert both(gradients), reasons(gradients)


def test_hooks_of_nodes_that_accumulate(gradients: Any) -> None:
    """They run in the program's own backward."""
    pair = Pair(Module(lambda self, x: x @ self.w))
    scale = [1.0]
    nodes = [
        torch.autograd.graph.get_gradient_edge(of.w).node
        for of in (pair.plain, pair.graphed)
        if isinstance(of.w, torch.Tensor)
    ]
    for node in nodes:
        node.register_prehook(lambda gradients: (scale[0] * gradients[0],))
    for i, x in enumerate(inputs(12, 3, 4)):
        scale[0] = float(i)
        pair.step(x)
    assert both(gradients), reasons(gradients)


def test_kwargs_values_and_trees(gradients: Any) -> None:
    def forward(self: Module, batch: dict[str, Any], *, scale: float) -> torch.Tensor:
        return (batch["x"] @ self.w + batch["more"][0]) * scale

    pair = Pair(Module(forward), call=lambda run, x, y: run({"x": x, "more": [y]}, scale=float(len(x))))
    for x, y in zip(inputs(12, 3, 4), inputs(12, 4, seed=1), strict=True):
        pair.step(x, y, needs=(1,))
    assert both(gradients)


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
def test_some_results_have_gradients(gradients: Any, which: tuple[int, ...]) -> None:
    pair = Pair(Module(branches), loss=lambda results: sum(results[i].sum() for i in which))
    pair.steps(12, 3, 4)
    assert both(gradients)


def test_patterns_of_gradients_in_turn(gradients: Any) -> None:
    turn = [0]

    def loss(results: Any) -> torch.Tensor:
        ways = (results[0].sum(), results[1].sin().sum(), (results[0] * results[1]).sum())
        return ways[turn[0] % 3]

    pair = Pair(Module(branches), loss=loss)
    for x in inputs(36, 3, 4):
        pair.step(x)
        turn[0] += 1
    assert both(gradients) and len([p for p in gradients.all if p.info.kind == "backward"]) == 3


def test_two_forwards_before_a_backward(gradients: Any) -> None:
    pair = Pair(
        Module(lambda self, x: (x @ self.w).exp() * self.b),
        loss=lambda r: (r[0] * r[1]).sum(),
        call=lambda run, x: (run(x), run(x * 2)),
    )
    pair.steps(12, 3, 4)
    assert both(gradients)


def test_forwards_inside_of_each_other(gradients: Any) -> None:
    pair = Pair(Module(lambda self, x: (x @ self.w).tanh() + x), call=lambda run, x: run(run(run(x))))
    pair.steps(12, 3, 4)
    assert both(gradients)


def test_a_graph_is_retained(gradients: Any) -> None:
    module = Module(lambda self, x: (x @ self.w).sigmoid())
    run = pygraph.graph(module)
    for x in inputs(14, 3, 4):
        found = []
        for of in (module, run):
            loss = of(x).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            found.append(module.w.grad)
            module.w.grad = None
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()
        assert torch.equal(*found)
    assert both(gradients)


def test_what_kernels_may_write_is_not_written(gradients: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording counts all that unknown kernels are given; autograd counts what operators write."""
    monkeypatch.setattr(
        gradient_world.Partition,
        "written",
        property(
            lambda self: frozenset(range(100)) if self.info.kind == "forward" else frozenset(),
            lambda self, positions: None,
        ),
        raising=False,
    )
    module = Module(lambda self, x: (x @ self.w).sigmoid() @ self.w)
    run = pygraph.graph(module)
    version = module.w._version
    for x, y in zip(inputs(14, 3, 4), inputs(14, 3, 4), strict=True):
        (run(x) * run(y)).sum().backward()
        module.w.grad = None
        assert module.w._version == version
    assert both(gradients)
    loss = run(x).sum()
    with torch.no_grad():
        module.w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_forward_without_backward_holds_nothing(gradients: Any) -> None:
    pair = Pair(Module(two), loss=lambda results: torch.zeros(()))
    pair.steps(12, 3, 4)
    assert replays(gradients, "forward") >= 5 and replays(gradients, "backward") == 0


def test_part_of_the_gradients_is_asked_for(gradients: Any) -> None:
    module = Module(two)
    run = pygraph.graph(module)
    for x in inputs(14, 3, 4):
        x.requires_grad_()
        for wanted in ([module.w], [x], [x, module.b]):
            ours, theirs = (
                torch.autograd.grad(of(x)[1].sum(), wanted, allow_unused=True) for of in (module, run)
            )
            assert_alike(ours, theirs)
    assert both(gradients)


@pytest.mark.parametrize("is_frozen", [(True, False), (False, True), (True, True)])
def test_parameters_that_are_frozen_midway(gradients: Any, is_frozen: tuple[bool, bool]) -> None:
    pair = Pair(Module(lambda self, x: (x @ self.w).tanh() * self.b))
    for phase in (False, True, False):
        for module in (pair.plain, pair.graphed):
            for parameter, freezes in zip((module.w, module.b), is_frozen, strict=True):
                parameter.requires_grad_(not (phase and freezes))
        pair.steps(10, 3, 4)
    assert both(gradients, 10)


def test_modes_and_no_grad_have_graphs_of_their_own(gradients: Any) -> None:
    pair = Pair(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)))
    for mode in (True, False, True):
        pair.plain.train(mode), pair.graphed.train(mode)
        for grad in (True, False):
            with contextlib.nullcontext() if grad else torch.no_grad():
                pair.steps(10, 5, 4, needs=(0,) if grad else ())
    assert both(gradients, 10) and replays(gradients, "inference") >= 8


def test_autocast_around_the_call(gradients: Any) -> None:
    def call(run: Any, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return run(x)

    pair = Pair(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)), call=call)
    pair.steps(12, 5, 4)
    assert both(gradients)


def test_shapes_have_graphs_of_their_own(gradients: Any) -> None:
    pair = Pair(Module(lambda self, x: (x @ self.w).softmax(-1)))
    for _ in range(10):
        pair.steps(1, 3, 4)
        pair.steps(1, 7, 4)
    assert both(gradients, 8)


def test_strided_and_expanded_gradients(gradients: Any) -> None:
    turn = [0]

    def loss(result: torch.Tensor) -> torch.Tensor:
        turn[0] += 1
        return result.sum() if (turn[0] - 1) // 2 % 2 else (result.t() * torch.arange(3.0)).sum()

    pair = Pair(Module(lambda self, x: (x @ self.w) * self.b), loss=loss)
    pair.steps(24, 3, 4)
    assert both(gradients, 6)


def test_hooks_on_parameters_and_arguments_run_once_each(gradients: Any) -> None:
    module = Module(two)
    run = pygraph.graph(module)
    seen: list[str] = []
    module.w.register_hook(lambda g: seen.append("w"))
    module.b.register_post_accumulate_grad_hook(lambda p: seen.append("b"))
    for x in inputs(12, 3, 4):
        x.requires_grad_().register_hook(lambda g: seen.append("x"))
        run(x)[1].sum().backward()
        assert sorted(seen) == ["b", "w", "x"]
        seen.clear()
    assert both(gradients)


def test_differentiating_twice_raises(gradients: Any) -> None:
    module = Module(lambda self, x: (x @ self.w).sin())
    run = pygraph.graph(module)
    for x in inputs(12, 3, 4):
        x.requires_grad_()
        run(x).sum().backward()
    first = torch.autograd.grad(run(x).sum(), x, create_graph=True)[0]
    expected = torch.autograd.grad(module(x).sum(), x, create_graph=True)[0]
    assert torch.equal(first, expected)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice.*pygraph\.uncaptured"):
        first.sum().backward()
    with pygraph.uncaptured():
        torch.autograd.grad(run(x).sum(), x, create_graph=True)[0].sum().backward()
    assert both(gradients)


def test_writing_to_what_the_backward_needs_raises(gradients: Any) -> None:
    module = Module(lambda self, x: (x @ self.w).exp())
    run = pygraph.graph(module)
    for x in inputs(12, 3, 4):
        run(x).sum().backward()
    writes: list[Any] = [
        lambda y: y.detach().add_(1),
        lambda y: x.add_(1),
        lambda y: torch.no_grad()(module.w.add_)(1),
    ]
    for write in writes:
        for of in (module, run):
            x.requires_grad_(write is writes[2])
            y = of(x)
            write(y)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
    assert both(gradients)


def test_a_result_may_be_written_to(gradients: Any) -> None:
    pair = Pair(Module(lambda self, x: x @ self.w), loss=lambda y: y.add_(1).relu_().sum())
    pair.steps(12, 3, 4)
    assert both(gradients)


def test_only_results_whose_backward_was_run_are_detached(gradients: Any) -> None:
    first, second = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

    @pygraph.graph
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = first(x).sum()
        loss.backward()
        first.zero_grad()
        return loss, second(x).sum()

    for x in inputs(12, 3, 4):
        loss, other = function(x)
        assert not loss.requires_grad
        other.backward()
    assert second.weight.grad is not None and both(gradients)
