"""Callables by ``pygraph.graph`` inside of differentiated programs, against the same ones called
directly: results, gradients and buffers have the same bits."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pygraph
from pygraph import runtime


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

    def steps(self, count: int, *shape: int, loss: Any = lambda y: y.float().sin().mean()) -> None:
        for number in range(count):
            self.step(torch.randn(*shape, device="cuda"), loss, seed=number)

    def replays(self) -> tuple[int, int]:
        return replays(type(self.graphed).__name__)

    def assert_served(self, least: int = 5) -> None:
        assert min(self.replays()) >= least, (self.replays(), reasons())


def compare(a: Any, b: Any) -> None:
    assert (a is None) == (b is None)
    if a is not None:
        assert torch.isfinite(a).all(), "a test whose numbers say nothing"
        assert torch.equal(a, b) and a.requires_grad == b.requires_grad


class Mlp(torch.nn.Sequential):
    def __init__(self, *more: torch.nn.Module) -> None:
        super().__init__(torch.nn.Linear(64, 128), torch.nn.GELU(), *more, torch.nn.Linear(128, 32))


class Convolutions(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            torch.nn.Conv2d(3, 16, 3, padding=1),
            torch.nn.GroupNorm(4, 16),
            torch.nn.ReLU(inplace=True),
            torch.nn.MaxPool2d(2),
        )


class Encoder(torch.nn.TransformerEncoderLayer):
    def __init__(self, dropout: float) -> None:
        super().__init__(64, 4, 128, dropout=dropout, batch_first=True)


class Gated(torch.nn.Linear):
    """Its argument is saved as it is, and as a view."""

    def __init__(self) -> None:
        super().__init__(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x


MODULES: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "mlp": (Mlp, (32, 64)),
    "convolutions": (Convolutions, (8, 3, 16, 16)),
    "attention": (lambda: Encoder(0.0), (4, 16, 64)),
    "gated": (Gated, (4, 16, 64)),
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


def test_batch_norm_of_cudnn_has_a_reason(deterministic: None) -> None:
    """Its backward may write to what its forward has saved."""
    pair = Pair(torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16)))
    pair.steps(16, 8, 3, 16, 16)
    assert reasons() == {"its backward writes to a tensor that it is given"}


def test_dropout_draws_the_same_numbers() -> None:
    pair = Pair(Mlp(torch.nn.Dropout(0.3)))
    pair.steps(16, 32, 64)
    pair.assert_served()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention(dropout: float, dtype: torch.dtype, deterministic: None) -> None:
    """Its random state is on the GPU in a graph, and on the host otherwise: memory-efficient attention
    (of floats) and flash attention."""
    pair = Pair(Encoder(dropout).to(dtype))
    for number in range(20):
        x = torch.randn(4, 16, 64, device="cuda", dtype=dtype)
        pair.step(x, lambda y: y.float().sin().mean(), seed=number)
    pair.assert_served()
    rows = [row for row in pygraph.stats() if row.replays > 0]
    assert len(rows) == 2 and all(row.audits > 0 == row.audits_skipped for row in rows), rows


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_whose_backward_has_no_graph(dropout: float, deterministic: None) -> None:
    """The random state of a replay is on the GPU, and autograd reads it on the host."""
    pair = Pair(Encoder(dropout))
    pair.steps(20, 4, 16, 64)
    before = pair.replays()
    leaves = [torch.ones(4, 16, 64, device="cuda", requires_grad=True) for _ in range(2)]
    losses = []
    for run, leaf in zip((pair.plain, pair.run), leaves, strict=True):
        torch.cuda.manual_seed(7)
        losses.append(run(leaf * 1).sin().mean())
    for module, loss in zip((pair.plain, pair.graphed), losses, strict=True):
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
        loss.backward()
    compare(leaves[0].grad, leaves[1].grad)
    for p, q in zip(pair.plain.parameters(), pair.graphed.parameters(), strict=True):
        compare(p.grad, q.grad)
    assert pair.replays()[0] == before[0] + 1, reasons()


def test_memory_that_is_exchanged_before_the_backward() -> None:
    """Views that autograd has saved keep the memory from before."""
    pair = Pair(Mlp())
    pair.steps(16, 32, 64)
    x = torch.randn(32, 64, device="cuda")
    before = pair.replays()
    losses = [run(x.clone().requires_grad_() * 1).sin().mean() for run in (pair.plain, pair.run)]
    assert pair.replays()[0] == before[0] + 1, reasons()
    for module, loss in zip((pair.plain, pair.graphed), losses, strict=True):
        for parameter in module.parameters():
            parameter.data = parameter.data * 3
        loss.backward()
    for p, q in zip(pair.plain.parameters(), pair.graphed.parameters(), strict=True):
        compare(p.grad, q.grad)


def test_operators_that_save_tensors_write_to_nothing() -> None:
    """Hooks for saved tensors run in them, and must not make them look like somebody else's."""
    module = Mlp().cuda()
    run = pygraph.graph(module, select="always")
    for _ in range(12):
        run(torch.randn(32, 64, device="cuda", requires_grad=True)).sin().mean().backward()
        module.zero_grad()
    assert min(replays("Mlp")) >= 3, reasons()
    forwards = [p for p in runtime.partitions if p.info.name == "Mlp" and p.info.kind == "forward"]
    assert forwards and not any(p.written for p in forwards)


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
    pair.steps(10, 32, 64)
    stream = torch.cuda.Stream()
    found = [pair.replays()]
    for _ in range(2):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            pair.steps(8, 32, 64)
        torch.cuda.current_stream().wait_stream(stream)
        found.append(pair.replays())
        pair.steps(4, 32, 64)
        found.append(pair.replays())
    for before, after in itertools.pairwise(found):
        assert all(b > a for a, b in zip(before, after, strict=True)), (found, reasons())
    # A backward on a stream without a kept graph leaves no workspace on the stream of recordings, which
    # would be what products of later backwards use.
    before = pair.replays()
    Pair(Mlp()).steps(16, 32, 64)
    assert all(b >= a + 5 for a, b in zip(before, pair.replays(), strict=True)), reasons()


def test_a_forward_on_another_stream_than_the_loss() -> None:
    """The backward of a forward runs on the forward's stream."""
    pair = Pair(Mlp())
    stream = torch.cuda.Stream()
    for _ in range(20):
        x = torch.randn(32, 64, device="cuda")
        for of in (pair.plain, pair.run):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                y = of(x)
            torch.cuda.current_stream().wait_stream(stream)
            y.record_stream(torch.cuda.current_stream())
            y.sin().mean().backward()
        for p, q in zip(pair.plain.parameters(), pair.graphed.parameters(), strict=True):
            compare(p.grad, q.grad)
        for optimizer in pair.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pair.assert_served()


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
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)  # which no step takes away again
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
