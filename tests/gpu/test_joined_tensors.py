"""Saved tensors that are too small for a gradient lie side by side; gradients take their place."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pygraph import runtime
from pygraph.partition.signature import Entry

from .support import also_as_shipped, assert_same, calls, captured, compiled, randn, uncaptured

_WIDTH, _INNER, _TOKENS, _HEADS, _LAYERS = 768, 2048, 512, 12, 6
_SQUARE, _ROWS = 1280, 320


class Layer(nn.Module):
    """Saves tensors of 1.5 and 4 MiB; weights have 2.25 and 6. Four of 1.5 are as large as one of 6."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(_WIDTH) for _ in range(2))
        self.attention = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(4))
        self.gate = nn.Linear(_WIDTH, _INNER, bias=False)
        self.up = nn.Linear(_WIDTH, _INNER, bias=False)
        self.down = nn.Linear(_INNER, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        q, k, v = (f(h).view(4, -1, _HEADS, 64).transpose(1, 2) for f in self.attention[:3])
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention[3](h.transpose(1, 2).reshape(_TOKENS, _WIDTH))
        h = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer() for _ in range(_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _entries(is_backward: bool) -> list[Entry]:
    return [
        entry
        for partition in list(runtime.partitions)
        if partition.info.is_backward == is_backward
        for entry in partition.entries.values()
    ]


def _backward() -> Any:
    (entry,) = _entries(is_backward=True)
    return entry.graph


def _gradients(
    model: Callable[..., torch.Tensor], module: nn.Module, x: torch.Tensor
) -> list[torch.Tensor]:
    module.zero_grad()
    model(x).backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


class _Training:
    """A compiled model, and the gradients that it is to have."""

    def __init__(self, **options: Any) -> None:
        self.module = Model().cuda()
        self.model = compiled(self.module, **options)
        self.inputs = [randn(_TOKENS, _WIDTH) for _ in range(4)]
        with uncaptured():
            self.expected = [_gradients(self.model, self.module, x) for x in self.inputs]

    def steps(self, count: int) -> None:
        for i in range(count):
            x, expected = self.inputs[i % 4], self.expected[i % 4]
            assert_same(_gradients(self.model, self.module, x), expected)


def _taken() -> int:
    """How many of the gradients of 6 MiB lie in inputs."""
    lines = _backward().link_map().splitlines()
    return sum("takes the place of input" in line and str(6 << 20) in line for line in lines)


def _most_in_a_block(loss: torch.Tensor) -> int:
    """Of the saved tensors of 1.5 MiB."""
    assert loss.grad_fn is not None
    saved = [t for t in loss.grad_fn.saved_tensors if t.nbytes == 3 << 19]  # type: ignore[attr-defined]
    return max(collections.Counter(t.untyped_storage().data_ptr() for t in saved).values())


def _skip_if_random_state_is_on_the_host(training: _Training) -> None:
    """Attention in PyTorch 2.11 saves random state: on the CPU in uncaptured forwards, whose backwards
    run uncaptured."""
    with uncaptured():
        loss = training.model(training.inputs[0])
    assert loss.grad_fn is not None
    if any(not saved.is_cuda for saved in loss.grad_fn.saved_tensors):
        pytest.skip("an uncaptured forward saves random state on the CPU")


@also_as_shipped
def test_gradients_take_the_place_of_several_saved_tensors() -> None:
    training = _Training()
    training.steps(calls(8))
    if _backward() is None:  # as shipped, where a graph gains nothing
        return
    assert _taken() >= 2
    assert _backward().donated_replays >= 4
    assert [entry.donation.recordings for entry in _entries(is_backward=True)] == [0]
    assert _most_in_a_block(training.model(training.inputs[0])) == 4


def test_a_step_takes_less_memory() -> None:
    """About as much as an uncaptured one, which frees what was saved bit by bit."""
    training = _Training()

    def peak() -> int:
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            training.module.zero_grad()
            training.model(training.inputs[0]).backward()
        return torch.cuda.max_memory_allocated()

    with uncaptured():
        alone = peak()
    training.steps(8)
    assert _taken() >= 2
    assert peak() <= 1.15 * alone


def test_steps_whose_forward_is_audited_are_served_by_the_same_graph() -> None:
    """An audited forward returns what an uncaptured run has saved."""
    training = _Training(options={"pygraph.audit": 3})
    _skip_if_random_state_is_on_the_host(training)
    training.steps(60)
    (forward,), (backward,) = _entries(is_backward=False), _entries(is_backward=True)
    assert forward.audits.made >= 3
    assert backward.donation.recordings == 0
    assert backward.donation.misfit_score == 0
    assert _backward().donated_replays >= 30


def test_what_an_uncaptured_forward_saves_stays_right() -> None:
    """With views of one storage, and one that is a result."""
    weights = [randn(_SQUARE, _SQUARE, requires_grad=True) for _ in range(4)]

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = x
        for weight in weights:
            left, right = (x @ weight).tanh().chunk(2, dim=1)
            x = torch.cat([left * right, right.sin() + left], dim=1)
            kept = x
        return x.square().mean(), kept

    def gradients(model: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
        loss, kept = model(x)
        loss.backward()
        found = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None
        return [*found, kept]

    model = compiled(function, options={"pygraph.audit": 2})
    inputs = [randn(_ROWS, _SQUARE) * 0.02 for _ in range(3)]
    with uncaptured():
        expected = [gradients(model, x) for x in inputs]
    for i in range(24):
        assert_same(gradients(model, inputs[i % 3]), expected[i % 3])
    assert {row.name for row in captured()} >= {"forward", "backward"}


def test_a_forward_that_loses_its_graph_gets_its_backward_another() -> None:
    training = _Training()
    _skip_if_random_state_is_on_the_host(training)
    training.steps(8)
    before = _backward()
    assert _taken() >= 2
    for partition in list(runtime.partitions):
        for entry in partition.entries.values():
            if not partition.info.is_backward and entry.graph is not None:
                runtime.engine().remove_graph(partition.callable, entry.graph)
                entry.deselect("a test")
    training.steps(24)
    (entry,) = _entries(is_backward=True)
    assert entry.donation.recordings == 1
    assert entry.graph is not None
    assert entry.graph is not before
    assert entry.graph.replays >= 4


@pytest.mark.usefixtures("own_cache")
def test_calls_that_keep_what_was_saved_are_right() -> None:
    """Inductor's cache would return the code of another test, which overwrites what was saved: its key
    lacks ``donated_buffer`` (PyTorch 2.15)."""
    with torch._functorch.config.patch(donated_buffer=False):
        training = _Training()
        training.steps(6)
        for i in range(40):
            training.module.zero_grad()
            loss = training.model(training.inputs[i % 4])
            loss.backward(retain_graph=True)
            loss.backward()
            gradients = [p.grad / 2 for p in training.module.parameters() if p.grad is not None]
            assert_same(gradients, training.expected[i % 4])
        training.steps(8)


def test_two_steps_whose_backwards_come_in_another_order() -> None:
    training = _Training()
    training.steps(8)
    order = random.Random(1)
    for _ in range(10):
        losses = [(i, training.model(training.inputs[i])) for i in range(3)]
        order.shuffle(losses)
        while losses:
            i, loss = losses.pop()
            training.module.zero_grad()
            loss.backward()
            gradients = [p.grad for p in training.module.parameters() if p.grad is not None]
            assert_same(gradients, training.expected[i])


def test_steps_on_another_stream_and_saved_tensors_that_another_stream_reads() -> None:
    training = _Training()
    training.steps(8)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        training.steps(4)
    torch.cuda.current_stream().wait_stream(side)
    loss = training.model(training.inputs[0])
    saved = next(t for t in loss.grad_fn.saved_tensors if t.nbytes == 3 << 19)
    copy = saved.clone()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        read_late = saved.clone()
    saved.record_stream(side)
    del saved
    training.module.zero_grad()
    loss.backward()
    training.steps(4)
    torch.cuda.synchronize()
    assert_same(read_late, copy)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_whose_weights_have_no_gradients_joins_nothing(frozen: bool) -> None:
    module = Model().cuda()
    module.requires_grad_(not frozen)
    model = compiled(module)
    x = randn(_TOKENS, _WIDTH, requires_grad=True)
    for _ in range(6):
        x.grad = None
        model(x).backward()
    assert x.grad is not None
    with uncaptured():
        expected = torch.autograd.grad(model(x), x)
    assert_same(x.grad, expected[0])
    assert (_most_in_a_block(model(x)) == 1) == frozen
