"""Callables by ``pygraph.graph`` inside of differentiated programs, against the same ones called
directly: results, gradients and buffers have the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pygraph


@pytest.fixture(autouse=True)
def use_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_UNTESTED_GRAPH", "1")


def replays(name: str) -> tuple[int, int]:
    """Of forwards and backwards of a callable."""
    rows = pygraph.stats()
    forward = sum(row.replays for row in rows if row.name == name)
    return forward, sum(row.replays for row in rows if row.name == f"{name} backward")


def reasons() -> set[str]:
    return {row.reason for row in pygraph.stats()} - {""}


class Pair:
    """A module with a graph, and a copy of it without."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.plain, self.graphed = module.cuda(), copy.deepcopy(module).cuda()
        self.run = pygraph.graph(self.graphed, select="always")
        self.optimizers = [
            torch.optim.SGD(of.parameters(), lr=0.05) for of in (self.plain, self.graphed)
        ]

    def step(self, x: torch.Tensor, loss: Callable[[Any], torch.Tensor], seed: int = 0) -> None:
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        results = []
        for run, leaf in zip((self.plain, self.run), leaves, strict=True):
            torch.manual_seed(0)
            torch.cuda.manual_seed(seed)
            results.append(run(leaf * 1))
            loss(results[-1]).backward()
        compare(results[0], results[1])
        compare(leaves[0].grad, leaves[1].grad)
        for p, q in zip(self.plain.parameters(), self.graphed.parameters(), strict=True):
            compare(p.grad, q.grad)
        for a, b in zip(self.plain.buffers(), self.graphed.buffers(), strict=True):
            compare(a, b)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def steps(self, count: int, *shape: int, loss: Any = lambda y: y.float().sin().sum()) -> None:
        for _ in range(count):
            self.step(torch.randn(*shape, device="cuda"), loss, seed=0)

    def assert_served(self, least: int = 5) -> None:
        found = replays(type(self.graphed).__name__)
        assert min(found) >= least, (found, reasons())


def compare(a: Any, b: Any) -> None:
    assert (a is None) == (b is None)
    assert a is None or (torch.equal(a, b) and a.requires_grad == b.requires_grad)


class Mlp(torch.nn.Sequential):
    def __init__(self, *more: torch.nn.Module) -> None:
        super().__init__(torch.nn.Linear(64, 128), torch.nn.GELU(), *more, torch.nn.Linear(128, 32))


class Convolutions(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            torch.nn.Conv2d(3, 16, 3, padding=1),
            torch.nn.BatchNorm2d(16),
            torch.nn.ReLU(inplace=True),
            torch.nn.MaxPool2d(2),
        )


class Encoder(torch.nn.TransformerEncoderLayer):
    def __init__(self, dropout: float) -> None:
        super().__init__(64, 4, 128, dropout=dropout, batch_first=True)


MODULES: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "mlp": (Mlp, (32, 64)),
    "convolutions": (Convolutions, (8, 3, 16, 16)),
    "attention": (lambda: Encoder(0.0), (4, 16, 64)),
    "layer norm": (lambda: torch.nn.LayerNorm(64), (32, 64)),
}


@pytest.fixture
def deterministic() -> Any:
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_many_kinds(name: str, deterministic: None) -> None:
    make, shape = MODULES[name]
    pair = Pair(make())
    pair.steps(16, *shape)
    pair.assert_served()


def test_dropout_draws_the_same_numbers() -> None:
    pair = Pair(Mlp(torch.nn.Dropout(0.3)))
    pair.steps(16, 32, 64)
    pair.assert_served()


def test_attention_with_dropout() -> None:
    pair = Pair(Encoder(0.1))
    pair.steps(16, 4, 16, 64)
    found = replays("Encoder")
    assert min(found) >= 5 or reasons()


def test_autocast_around_the_call() -> None:
    pair = Pair(Mlp())
    for _ in range(16):
        with torch.autocast("cuda", torch.bfloat16):
            pair.steps(1, 32, 64)
    pair.assert_served()


def test_a_retained_graph_and_two_forwards() -> None:
    module = Mlp().cuda()
    run = pygraph.graph(module, select="always")
    for _ in range(16):
        x, y = (torch.randn(32, 64, device="cuda") for _ in range(2))
        found = []
        for of in (module, run):
            loss = (of(x) * of(y)).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            found.append([p.grad for p in module.parameters()])
            module.zero_grad()
        for a, b in zip(*found, strict=True):
            compare(a, b)
    assert min(replays("Mlp")) >= 5, reasons()


def test_a_loss_is_kept_between_calls() -> None:
    """It keeps the nodes that accumulate gradients, which are the default stream's."""
    pair = Pair(Mlp())
    losses = []
    for _ in range(16):
        x = torch.randn(32, 64, device="cuda")
        for of in (pair.plain, pair.run):
            loss = of(x).sum()
            loss.backward()
            losses.append(loss)
        for p, q in zip(pair.plain.parameters(), pair.graphed.parameters(), strict=True):
            compare(p.grad, q.grad)
    pair.assert_served()


def test_a_stream_of_the_programs() -> None:
    pair = Pair(Mlp())
    pair.steps(8, 32, 64)
    with torch.cuda.stream(torch.cuda.Stream()):
        pair.steps(8, 32, 64)
        torch.cuda.current_stream().synchronize()
    pair.steps(4, 32, 64)
    pair.assert_served(4)


def test_gradients_stay_what_they_are() -> None:
    """Those of earlier calls are not overwritten by later ones."""
    module = Mlp().cuda()
    run = pygraph.graph(module, select="always")
    kept = []
    for _ in range(12):
        x = torch.randn(32, 64, device="cuda", requires_grad=True)
        y = run(x)
        gradients = torch.autograd.grad(y.sum(), [x, *module.parameters()])
        kept.append((y, y.clone(), gradients, [g.clone() for g in gradients]))
    for y, value, gradients, values in kept:
        compare(y.detach(), value.detach())
        for a, b in zip(gradients, values, strict=True):
            compare(a, b)
    assert min(replays("Mlp")) >= 5, reasons()


def test_a_scaler_outside() -> None:
    pair = Pair(Mlp())
    scaler = torch.amp.GradScaler("cuda")
    pair.steps(16, 32, 64, loss=lambda y: scaler.scale(F.softplus(y).mean()))
    pair.assert_served()


def test_memory_does_not_grow() -> None:
    pair = Pair(Mlp())
    pair.steps(30, 256, 64)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    pair.steps(30, 256, 64)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
