"""``pygraph.graph`` around programs that ask whether their stream captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.cuda import graphs, is_current_stream_capturing

import pygraph

from .graph_training import Training, adamw, assert_same_training, mlp
from .support import captured, randn, refusals


class _Scaled(torch.nn.Module):
    """Takes another way when it is captured, whose results are a bit larger."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y * 1.0001 if is_current_stream_capturing() else y


def test_a_step_that_asks_has_a_graph_of_its_uncaptured_way() -> None:
    before = vars(graphs)["_cuda_isCurrentStreamCapturing"]
    assert_same_training(lambda: Training(_Scaled, adamw))
    assert vars(graphs)["_cuda_isCurrentStreamCapturing"] is before


def test_a_forward_and_a_backward_that_ask_have_graphs_of_their_uncaptured_way() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * (3.0 if is_current_stream_capturing() else 2.0)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient * (5.0 if is_current_stream_capturing() else 4.0)

    weight = randn(8).requires_grad_()
    function = pygraph.graph(lambda x: Scale.apply(x * weight))
    for _ in range(20):
        x = randn(8)
        weight.grad = None
        y = function(x)
        y.sum().backward()
        assert torch.equal(y, (x * weight) * 2.0)
        assert weight.grad is not None and torch.equal(weight.grad, 4.0 * x)
    assert len(captured()) == 2, pygraph.stats()


def _assert_same_results(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Calls the graphed function, and the function, on the same inputs."""
    step = pygraph.graph(function)
    for _ in range(12):
        x = randn(16)
        assert torch.equal(step(x), function(x))


def test_compiled_code_that_asks_has_a_graph_of_its_uncaptured_way() -> None:
    """It asks where its graph breaks. Nothing may be compiled in a capture."""

    @torch.compile(backend="eager")
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y * 1.0001 if is_current_stream_capturing() else y

    _assert_same_results(function)
    assert len(captured()) == 1, pygraph.stats()


def test_a_program_that_waits_unless_it_is_captured_is_recorded_again() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if not is_current_stream_capturing():
            torch.cuda.synchronize()
        return y + 1

    _assert_same_results(function)
    assert len(captured()) == 1, pygraph.stats()


def test_a_program_that_waits_in_any_case_is_refused() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        is_current_stream_capturing()
        torch.cuda.synchronize()
        return y + 1

    _assert_same_results(function)
    assert not captured() and refusals(), pygraph.stats()


def test_a_program_that_differs_where_it_knows_of_the_capture_is_refused() -> None:
    """Its uncaptured way cannot be captured, and the other one has other results."""

    def function(x: torch.Tensor) -> torch.Tensor:
        if is_current_stream_capturing():
            return x * 2.0001
        torch.cuda.synchronize()
        return x * 2

    _assert_same_results(function)
    assert not captured() and refusals(), pygraph.stats()


def test_a_program_that_reads_on_the_host_unless_it_is_captured_is_refused() -> None:
    """What it reads may choose the way of a later call."""

    def function(x: torch.Tensor) -> torch.Tensor:
        if not is_current_stream_capturing() and x.abs().sum().item() < 0:
            return x
        return x + 1

    _assert_same_results(function)
    assert not captured(), pygraph.stats()
    assert any("_local_scalar_dense" in row.reason for row in pygraph.stats()), pygraph.stats()


def test_an_eager_bert_of_transformers_has_a_graph() -> None:
    """Transformers 5.0 and 5.10 make a mask for attention where they know of the capture; 5.24 does
    not ask here."""
    transformers = pytest.importorskip("transformers")

    def bert() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=100,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="sdpa",
        )
        model = transformers.BertModel(config, add_pooling_layer=False).cuda().train()
        return model, adamw(model.parameters())

    def step_of(model: Any, optimizer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def step(tokens: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(input_ids=tokens).last_hidden_state.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    (ours, our_optimizer), (theirs, their_optimizer) = bert(), bert()
    graphed, uncaptured = pygraph.graph(step_of(ours, our_optimizer)), step_of(theirs, their_optimizer)
    for i in range(16):
        # Few tokens: PyTorch's attention adds no parts in an order of its own in its backward.
        tokens = torch.randint(0, 100, (4, 32), device="cuda")
        assert torch.equal(graphed(tokens), uncaptured(tokens)), (i, pygraph.stats())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), pygraph.stats()
    assert captured() and captured()[0].replays >= 8, pygraph.stats()
