"""Kernels of one graph beside each other: only where they may be, and with the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pygraph import runtime
from pygraph.verify import branches
from tests.gpu.support import captured, compiled, randn


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches are used wherever results are the same, faster or not."""
    monkeypatch.setattr(branches, "is_faster", lambda chain, branched: True)
    monkeypatch.setattr(branches, "is_worth_its_memory", lambda chain, branched: True)


def _graphs() -> list[Any]:
    entries = [e for p in runtime.partitions for e in p.entries.values()]
    return [entry.graph for entry in entries if entry.graph is not None]


def _check(function: Any, *inputs: Any, calls: int = 20) -> None:
    """Replays have the bits of the same code's uncaptured run, for other inputs at each call. (Another
    compilation may tune its kernels in another way.)"""
    model = compiled(function, options={"pygraph.select": "always"})
    with torch.no_grad():
        for _ in range(calls):
            args = [torch.randn_like(x) for x in inputs]
            with runtime.uncaptured():
                expected = model(*[x.clone() for x in args])
            result = model(*args)
            torch.testing.assert_close(result, expected, rtol=0, atol=0)


class Attention(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).flatten(2)) + x


def test_projections_run_beside_each_other(always: None) -> None:
    _check(Attention().cuda(), randn(2, 128, 256))
    (row,) = captured()
    assert row.lanes >= 3


def test_everything_is_known_of_kernels_of_the_compiler_and_of_matrix_products(always: None) -> None:
    _check(lambda x: (torch.softmax(x @ x, -1) @ x).sum(0).tanh(), randn(256, 256))
    (graph,) = _graphs()
    assert graph.nodes_with_known_accesses == graph.nodes


def test_convolutions_run_beside_each_other(always: None) -> None:
    branch = nn.ModuleList(nn.Sequential(nn.Conv2d(16, 16, 3), nn.Tanh()) for _ in range(4)).cuda()
    _check(lambda x: sum(f(x).mean() for f in branch), randn(2, 16, 32, 32))
    (graph,) = _graphs()
    assert graph.lanes >= 3 and graph.nodes_with_known_accesses == graph.nodes


def test_what_libraries_get_later_is_no_scratch_memory_before(always: None) -> None:
    """cuBLAS's workspace takes the place of a convolution's input that is not needed any more."""
    left, right = (nn.Conv2d(channels, 16, 3, stride=4).cuda() for channels in (6, 5))
    weight = randn(16, 16)

    def function(x: torch.Tensor) -> torch.Tensor:
        means = [f(y).mean((2, 3)) for f, y in ((left, x.cos()), (right, x[:, :5].sin()))]
        return (means[0] @ weight) * (means[1] @ weight)

    _check(function, randn(64, 6, 192, 192))
    (row,) = captured()
    assert row.lanes > 1


def test_two_towers_share_no_memory_while_they_run(always: None) -> None:
    # Of two widths: the compiler lets operators write into what is no longer needed, if it has the
    # right size, and towers would take turns in it.
    left, right = (nn.Sequential(*(nn.Linear(n, n) for _ in range(12))).cuda() for n in (512, 384))
    _check(lambda x, y: left(x).sum(-1) + right(y).sum(-1), randn(512, 512), randn(512, 384), calls=200)
    (row,) = captured()
    assert row.lanes > 1


def test_a_buffer_is_written_after_everybody_has_read_it(always: None) -> None:
    weights = [randn(256, 256) for _ in range(4)]

    def step(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        products = [state @ w for w in weights]
        state.mul_(0.5).add_(x)
        return torch.stack([p @ state for p in products]).sum(0)

    expected_step = torch.compile(step)
    model = compiled(step, options={"pygraph.select": "always"})
    state = randn(256, 256)
    expected_state = state.clone()
    with torch.no_grad():
        for _ in range(50):
            x = randn(256, 256)
            result = model(state, x)
            torch.testing.assert_close(result, expected_step(expected_state, x), rtol=0, atol=0)
            torch.testing.assert_close(state, expected_state, rtol=0, atol=0)
    assert len(captured()) == 1


def test_an_operator_that_nothing_is_known_of_keeps_its_place(always: None) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        a, b = x @ x, x.T @ x
        c = torch.cumsum(torch.sort(a + b, dim=-1).values, -1)
        return (c @ x) + (c @ x.T)

    _check(function, randn(128, 128))
    assert len(captured()) == 1


def test_a_training_step_has_the_same_gradients(always: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention() for _ in range(3))).cuda()
    plain = torch.compile(lambda x: model(x).square().mean())
    ours = compiled(lambda x: model(x).square().mean(), options={"pygraph.select": "always"})
    for _ in range(10):
        x = randn(2, 128, 256)
        model.zero_grad()
        plain(x).backward()
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        ours(x).backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)
    assert all(row.lanes > 1 for row in captured())


def test_one_lane_keeps_the_order_of_the_program() -> None:
    model = compiled(Attention().cuda(), options={"pygraph.select": "always", "pygraph.lanes": 1})
    with torch.no_grad():
        for _ in range(3):
            model(randn(2, 128, 256))
    (row,) = captured()
    assert row.lanes == 1
