"""Training: saved tensors, accumulation, random numbers, mixed precision, checkpointing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import pygraph
from pygraph.record.stream_capture import StreamCapture

from .support import (
    also_as_shipped,
    assert_same,
    assert_used,
    calls,
    captured,
    compiled,
    randn,
    refusals,
    uncaptured,
)


def _model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Dropout(dropout), nn.LayerNorm(64), nn.Linear(64, 64)
    ).cuda()


def _gradients(module: nn.Module) -> list[torch.Tensor]:
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return gradients


def _compare(module: nn.Module, step: Callable[[Callable[..., torch.Tensor], int], object]) -> None:
    """Runs steps uncaptured and captured from the same seeds; results and gradients must be equal."""
    model = compiled(module)

    def run() -> list[object]:
        results: list[object] = []
        for call in range(calls(6)):
            torch.manual_seed(call)
            results.append(step(model, call))
            results.append(_gradients(module))
        return results

    with uncaptured():
        expected = run()
    assert captured() == []
    assert_same(run(), expected)
    assert_used(graphs=2)


@also_as_shipped
def test_forward_and_backward() -> None:
    x = randn(16, 64)

    def step(model: Callable[..., torch.Tensor], call: int) -> float:
        loss = model(x + call).square().mean()
        loss.backward()
        return loss.item()

    _compare(_model(), step)


@also_as_shipped
def test_dropout_draws_the_uncaptured_numbers() -> None:
    x = randn(16, 64)

    def step(model: Callable[..., torch.Tensor], call: int) -> float:
        loss = model(x).square().mean()
        loss.backward()
        return loss.item() + torch.rand((), device="cuda").item()

    _compare(_model(dropout=0.5), step)


def test_two_replays_draw_different_numbers() -> None:
    model = compiled(lambda x: nn.functional.dropout(x, 0.5))
    x = torch.ones(1000, device="cuda")
    with torch.no_grad():
        masks = [model(x) for _ in range(6)]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    assert captured()[0].replays >= 4


@also_as_shipped
def test_two_forwards_before_two_backwards() -> None:
    x, y = randn(16, 64), randn(16, 64)

    def step(model: Callable[..., torch.Tensor], call: int) -> None:
        first, second = model(x), model(y)
        first.square().mean().backward()
        second.sum().backward()

    _compare(_model(), step)


@also_as_shipped
def test_gradient_accumulation() -> None:
    batches = [randn(16, 64) for _ in range(3)]

    def step(model: Callable[..., torch.Tensor], call: int) -> None:
        for batch in batches:
            model(batch).square().mean().backward()

    _compare(_model(), step)


@also_as_shipped
def test_retain_graph() -> None:
    x = randn(16, 64)
    module = _model()

    def run(model: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        for _ in range(calls(4)):
            loss = model(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        return _gradients(module)

    model = compiled(module)
    with torch._functorch.config.patch(donated_buffer=False):
        with uncaptured():
            expected = run(model)
        assert_same(run(model), expected)


@also_as_shipped
def test_activation_checkpointing_with_dropout() -> None:
    """Each program has generators of its own for what is computed again, from PyTorch 2.15 on. They are
    made in its first call, and torch.manual_seed does not reach them: so two programs are compared."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _model(dropout=0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    def run(backend: str) -> list[torch.Tensor]:
        torch._dynamo.reset()
        module = Checkpointed()
        model = torch.compile(module, backend=backend)
        torch.manual_seed(0)
        x = randn(16, 64, requires_grad=True)
        found = []
        for _ in range(calls(6)):
            loss = model(x).square().mean()
            loss.backward()
            found += [loss.detach(), *_gradients(module)]
        return found

    expected = run("inductor")
    for result, wanted in zip(run("pygraph"), expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-6)
    assert_used(graphs=2)


def test_activation_checkpointing_of_attention_that_saves_a_random_state() -> None:
    """On the GPU in a graph, on the CPU uncaptured: checkpointing compares both."""

    def attention(x: torch.Tensor) -> torch.Tensor:
        q = x.view(1, 2, 16, 16)
        return nn.functional.scaled_dot_product_attention(q, q * 2, q + 1, dropout_p=0.1).sum(-1)

    x = randn(512, requires_grad=True)
    model = compiled(attention)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        for call in range(6):
            torch.manual_seed(call)
            plain = attention(x).square().sum()
            (expected,) = torch.autograd.grad(plain, x)
            torch.manual_seed(call)
            loss = checkpoint(model, x, use_reentrant=False).square().sum()
            (grad,) = torch.autograd.grad(loss, x)
            torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-3)
        torch.manual_seed(0)
        for _ in range(4):
            model(x).sum().backward()  # without hooks there is a graph
    forwards = [row for row in pygraph.stats() if row.name == "forward"]
    assert {row.state for row in forwards} == {"refused", "captured"}, forwards


@also_as_shipped
def test_autocast_and_grad_scaler() -> None:
    module = _model()
    x = randn(16, 64)

    def run(model: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        start = [p.detach().clone() for p in module.parameters()]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(calls(6)):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        end = [p.detach().clone() for p in module.parameters()]
        with torch.no_grad():
            for p, value in zip(module.parameters(), start, strict=True):
                p.copy_(value)
        return end

    model = compiled(module)
    with uncaptured():
        expected = run(model)
    assert_same(run(model), expected)
    assert_used(graphs=2)


@also_as_shipped
def test_batch_norm_updates_its_running_statistics() -> None:
    module = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)).cuda()
    state = {k: v.clone() for k, v in module.state_dict().items()}
    inputs = [randn(16, 32) for _ in range(calls(6))]

    def run(model: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        module.load_state_dict(state)
        for x in inputs:
            model(x).square().mean().backward()
        return [v.clone() for v in module.state_dict().values()]

    model = compiled(module)
    with uncaptured():
        expected = run(model)
    assert_same(run(model), expected)


class Attention(nn.Module):
    """With dropout, whose random state is a CPU tensor uncaptured and a GPU tensor captured."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).view(2, 32, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3)


def _compare_attention() -> None:
    torch.manual_seed(1)
    x = randn(2, 32, 64)

    def step(model: Callable[..., torch.Tensor], call: int) -> float:
        loss = nn.functional.dropout(model(x), 0.1).square().mean()
        loss.backward()
        return loss.item()

    _compare(Attention().cuda(), step)


@also_as_shipped
def test_attention_with_dropout() -> None:
    _compare_attention()


def test_random_states_with_other_addresses_in_each_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since PyTorch 2.13 each capture allocates memory for them."""
    held: list[torch.Tensor] = []
    make = StreamCapture.make

    def make_elsewhere(self: StreamCapture) -> int:
        held.append(torch.empty(1, device="cuda"))  # where the states of the last one were
        return make(self)

    monkeypatch.setattr(StreamCapture, "make", make_elsewhere)
    _compare_attention()


@also_as_shipped
def test_attention_over_a_length_that_is_padded() -> None:
    """Its log-sum-exp has padding that no kernel writes."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(192, 576)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.project(x).view(4, 197, 3, 3, 64).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(q, k, v)

    torch.manual_seed(1)
    x = randn(4, 197, 192)

    def step(model: Callable[..., torch.Tensor], call: int) -> float:
        loss = model(x).square().mean()
        loss.backward()
        return loss.item()

    _compare(Attention().cuda(), step)


@also_as_shipped
def test_dynamic_shapes(as_shipped: bool) -> None:
    module = _model()
    batches = [randn(n, 64) for n in (5, 7, 9) * calls(4)]
    model = compiled(module, dynamic=True)

    def run() -> list[object]:
        results: list[object] = []
        for x in batches:
            loss = model(x).square().mean()
            loss.backward()
            results += [loss.detach(), _gradients(module)]
        return results

    with uncaptured():
        expected = run()
    assert_same(run(), expected)
    assert refusals() == []
    if not as_shipped:
        assert len(captured()) == 6


def test_compiled_autograd() -> None:
    module = _model()
    x = randn(16, 64)
    model = compiled(module)
    for _ in range(3):
        model(x).square().mean().backward()
    expected = _gradients(module)
    with torch._dynamo.compiled_autograd._enable(lambda gm: compiled(gm)):
        for _ in range(4):
            model(x).square().mean().backward()
            gradients = _gradients(module)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b / 3)


def test_complex_weights_in_the_frequency_domain() -> None:
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 9, dtype=torch.cfloat))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=16).relu()

    module = Filter().cuda()
    model = compiled(module)
    for _ in range(5):
        x = randn(3, 4, 16)
        gradients = []
        for run in (model, module):
            module.zero_grad()
            run(x).square().mean().backward()
            assert module.weight.grad is not None
            gradients.append(module.weight.grad.clone())
        torch.testing.assert_close(*gradients)
    assert refusals() == []
    assert len(captured()) == 2
