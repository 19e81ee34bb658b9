"""What a program does to its model, its optimizer and PyTorch between the calls of a training step."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pygraph

from .attacked import replays


class Program:
    """graphed: whether the step is. The same seed gives the same program and the same actions."""

    def __init__(self, graphed: bool) -> None:
        torch.manual_seed(0)
        self.random = random.Random(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3)
        )
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.05, fused=True)
        self.context: Any = torch.enable_grad
        self.extra: list[Any] = []
        self.size = 6
        self.run = pygraph.graph(self.step) if graphed else self.step

    def step(self, x: torch.Tensor, y: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.model(x).float(), y)
        for tensor in more:
            loss = loss + (tensor * self.model[0].weight[0].float()).sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def call(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        kind = dict(generator=generator, dtype=self.model[0].weight.dtype)
        x = torch.randn(self.size, 4, **kind)
        y = torch.randint(0, 3, (self.size,), generator=generator)
        more = [x[0] for _ in self.extra]
        with self.context():
            result: torch.Tensor = self.run(x, y, *more)
        return result.detach().clone()

    def state(self) -> list[torch.Tensor]:
        of = [self.optimizer.state[p] for p in self.model.parameters() if p in self.optimizer.state]
        moments = [value for values in of for value in values.values()]
        return [t.detach().clone() for t in (*self.model.state_dict().values(), *moments)]


def _other_memory(p: Program) -> None:
    layer = p.random.choice([p.model[0], p.model[2]])
    layer.weight.data = layer.weight.data.clone() + 0.1


def _other_memory_by_set(p: Program) -> None:
    p.model[0].bias.data.set_(p.model[0].bias.data.clone())


def _replace_a_parameter(p: Program) -> None:
    p.model[2].weight = torch.nn.Parameter(p.model[2].weight.detach() + 0.1)


def _freeze(p: Program) -> None:
    p.model[0].requires_grad_(not p.model[0].weight.requires_grad)


def _mode(p: Program) -> None:
    p.model.train(not p.model.training)


def _mode_of_a_layer(p: Program) -> None:
    p.model[1].train(not p.model[1].training)


def _new_group(p: Program) -> None:
    if len(p.optimizer.param_groups) == 1:
        last = p.optimizer.param_groups[0]["params"].pop()
        p.optimizer.add_param_group({"params": [last], "lr": 0.01})
    else:
        p.optimizer.param_groups[0]["params"] += p.optimizer.param_groups.pop()["params"]


def _numbers_of_a_group(p: Program) -> None:
    group = p.optimizer.param_groups[0]
    name = p.random.choice(["lr", "weight_decay", "eps"])
    group[name] = p.random.choice([0.1, 0.01])
    group["betas"] = p.random.choice([(0.9, 0.99), (0.8, 0.9)])


def _load_the_optimizer(p: Program) -> None:
    p.optimizer.load_state_dict(copy.deepcopy(p.optimizer.state_dict()))


def _load_the_model(p: Program) -> None:
    state = {name: value + 0.1 for name, value in p.model.state_dict().items()}
    p.model.load_state_dict(state, assign=p.random.random() < 0.5)


def _another_optimizer(p: Program) -> None:
    p.optimizer = torch.optim.AdamW(p.model.parameters(), lr=0.05, fused=True)


def _copy_the_model(p: Program) -> None:
    p.model = copy.deepcopy(p.model)
    p.optimizer = torch.optim.AdamW(p.model.parameters(), lr=0.05, fused=True)


def _autocast(p: Program) -> None:
    contexts = [torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16)]
    p.context = p.random.choice(contexts)


def _gradients_from_before(p: Program) -> None:
    for parameter in p.model.parameters():
        if p.random.random() < 0.5:
            parameter.grad = torch.full_like(parameter, 0.5)


def _other_dtype(p: Program) -> None:
    p.model.to(p.random.choice([torch.float32, torch.float64]))
    p.optimizer = torch.optim.AdamW(p.model.parameters(), lr=0.05, fused=True)


def _sizes(p: Program) -> None:
    p.size = p.random.choice([6, 6, 2, 9])


def _views_of_another_argument(p: Program) -> None:
    p.extra = [None] * p.random.randrange(3)


def _hook(p: Program) -> None:
    if p.extra and not isinstance(p.extra[0], type(None)):
        p.extra.pop().remove()
    else:
        handle = p.model[0].weight.register_hook(lambda gradient: gradient * 2)
        p.extra, p.call = [handle], Program.call.__get__(_Without(p))  # type: ignore[method-assign]


class _Without:
    """The program without further arguments."""

    extra: tuple[Any, ...] = ()

    def __init__(self, program: Program) -> None:
        self._program = program

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


def _tied(p: Program) -> None:
    """One layer's bias is a part of another's."""
    if p.random.random() < 0.5:
        p.model[2].bias = torch.nn.Parameter(p.model[0].bias.data[:3])
    else:
        p.model[2].bias = torch.nn.Parameter(p.model[0].bias.data[:3].clone())


_ACTIONS = (
    _other_memory,
    _other_memory_by_set,
    _replace_a_parameter,
    _freeze,
    _mode,
    _mode_of_a_layer,
    _new_group,
    _numbers_of_a_group,
    _load_the_optimizer,
    _load_the_model,
    _another_optimizer,
    _copy_the_model,
    _autocast,
    _gradients_from_before,
    _other_dtype,
    _sizes,
    _views_of_another_argument,
    _hook,
    _tied,
)


@pytest.mark.parametrize("act", _ACTIONS, ids=lambda act: act.__name__[1:])
@pytest.mark.parametrize("every", [1, 9])
def test_what_happens_between_calls_is_followed(
    partitions: Any, act: Callable[[Program], None], every: int
) -> None:
    """every: how many calls are made between two of the actions."""
    plain, graphed = Program(False), Program(True)
    for i in range(12 if every == 1 else 40):
        if i >= 6 and i % every == 0:
            act(plain), act(graphed)
        a, b = plain.call(i), graphed.call(i)
        assert torch.equal(a, b), f"call {i}: {a} for {b}, after {replays(partitions)} replays"
        for x, y in zip(plain.state(), graphed.state(), strict=True):
            assert torch.equal(x, y), f"after call {i} and {replays(partitions)} replays"
    assert replays(partitions) > 0


def test_counts_of_accumulated_batches(partitions: Any) -> None:
    """A step of as many batches as are passed."""
    p = torch.nn.Parameter(torch.ones(4))

    def step(batches: list[torch.Tensor]) -> list[torch.Tensor]:
        p.grad = None
        for x in batches:
            (x * p).sin().sum().backward()
        return [p.grad * 1]

    run, choice = pygraph.graph(step), random.Random(0)
    for i in range(60):
        batches = [torch.full((4,), float(i + j)) for j in range(choice.choice([1, 2, 2, 3, 0]) or 2)]
        assert torch.equal(run(batches)[0], step(batches)[0]), i
    assert replays(partitions) > 0


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_nothing_in_a_batch(partitions: Any, shape: tuple[int, ...]) -> None:
    p = torch.nn.Parameter(torch.ones(shape[-1]))

    def step(x: torch.Tensor) -> torch.Tensor:
        p.grad = None
        (x * p).sum().backward()
        return x * 2

    run = pygraph.graph(step)
    for _ in range(8):
        assert torch.equal(run(torch.ones(shape)), torch.ones(shape) * 2)
        assert p.grad is not None and torch.equal(p.grad, torch.ones(shape).sum(0).expand_as(p))


def test_default_dtype_and_generators(partitions: Any) -> None:
    def draw(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return x + torch.rand(4, generator=generator) + torch.ones(4)

    run = pygraph.graph(draw)
    ours, theirs = (torch.Generator().manual_seed(1) for _ in range(2))
    for i in range(30):
        torch.set_default_dtype(torch.float64 if i % 7 == 6 else torch.float32)
        try:
            a, b = run(torch.arange(4.0), ours), draw(torch.arange(4.0), theirs)
        finally:
            torch.set_default_dtype(torch.float32)
        assert a.dtype == b.dtype and torch.equal(a, b), i


def test_a_graphed_callable_in_another_one(partitions: Any) -> None:
    scale = [2.0]
    inner = pygraph.graph(lambda x: x * scale[0])
    outer = pygraph.graph(lambda x: inner(x) + inner(x + 1))
    x = torch.arange(4.0)
    for i in range(40):
        scale[0] = 3.0 if i % 11 > 8 else 2.0
        assert torch.equal(outer(x), x * scale[0] + (x + 1) * scale[0]), i
        assert torch.equal(inner(x), x * scale[0]), i


def test_a_step_in_two_threads_by_turns(partitions: Any) -> None:
    """What one thread has recorded serves another one."""
    plain, graphed = Program(False), Program(True)
    results: list[torch.Tensor] = []
    for i in range(24):
        expected = plain.call(i)
        thread = threading.Thread(target=lambda i=i: results.append(graphed.call(i)))
        if i % 3 == 2:
            thread.start(), thread.join()
        else:
            results.append(graphed.call(i))
        assert torch.equal(results[-1], expected), i
    for x, y in zip(plain.state(), graphed.state(), strict=True):
        assert torch.equal(x, y)
    assert replays(partitions) > 0
