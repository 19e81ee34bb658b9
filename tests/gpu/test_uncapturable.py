"""A program with an operator that cannot be captured is recompiled, with a cut there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.library import custom_op

import pygraph
from pygraph import uncapturable

from .support import captured, compiled, randn, refusals


@custom_op("pygraph_test::synchronize", mutates_args=())
def synchronize(x: torch.Tensor) -> torch.Tensor:
    torch.cuda.synchronize()
    return x + 1


@custom_op("pygraph_test::scale_groups", mutates_args=())
def scale_groups(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows of group i, which ends before ends[i], times i + 1. Asks the GPU where the groups end."""
    out, start = torch.empty_like(x), 0
    for i, end in enumerate(ends.tolist()):
        torch.mul(x[start:end], i + 1, out=out[start:end])
        start = end
    return out


@custom_op("pygraph_test::scale_groups_backward", mutates_args=())
def scale_groups_backward(grad: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return scale_groups._init_fn(grad, ends)  # type: ignore[no-any-return]


synchronize.register_fake(lambda x: torch.empty_like(x))
for _op in (scale_groups, scale_groups_backward):
    _op.register_fake(lambda x, ends: torch.empty_like(x))
scale_groups.register_autograd(
    lambda ctx, grad: (scale_groups_backward(grad, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


def _names() -> list[str]:
    return sorted(row.name for row in captured())


@pytest.mark.parametrize("options", [{}, {"fullgraph": True}])
@torch.no_grad()
def test_what_is_around_the_operator_is_in_graphs(options: dict[str, Any]) -> None:
    model = compiled(lambda x: torch.relu(synchronize(x * 2)) + 1, **options)
    for _ in range(7):
        x = randn(256)
        torch.testing.assert_close(model(x), torch.relu(x * 2 + 1) + 1)
    assert _names() == ["inference part 0", "inference part 1"]
    assert refusals() == []
    assert uncapturable.names() == ["pygraph_test::synchronize"]


@torch.no_grad()
def test_programs_that_are_compiled_later_have_the_cut_from_the_start() -> None:
    first = compiled(lambda x: synchronize(x * 2) + 1)
    for _ in range(2):
        first(randn(64))
    (reason,) = refusals()
    assert reason.endswith("; recompiled, without pygraph_test::synchronize in graphs")
    second = compiled(lambda x: synchronize(x * 3) * 2)
    for _ in range(3):
        x = randn(64)
        torch.testing.assert_close(second(x), (x * 3 + 1) * 2)
    assert len(captured()) == 2


def test_operators_of_both_directions_are_found_in_training() -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(2)).cuda()
    reference = copy.deepcopy(layers)
    ends = torch.tensor([3, 9, 16], device="cuda")

    def loss(layers: Any, x: torch.Tensor) -> torch.Tensor:
        return layers[1](torch.relu(scale_groups(layers[0](x), ends))).square().mean()  # type: ignore[no-any-return]

    model = compiled(loss)
    for step in range(10):
        x = randn(16, 32)
        for each, function in ((layers, model), (reference, loss)):
            each.zero_grad()
            function(each, x).backward()
        for ours, theirs in zip(layers.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=f"step {step}")
    assert {name.split()[0] for name in _names()} == {"forward", "backward"}
    assert len(_names()) == 4, pygraph.stats()
    assert refusals() == []


@torch.no_grad()
def test_a_factorization_that_asks_the_gpu_whether_it_worked() -> None:
    """Whether cuSOLVER found the matrix to be positive definite is asked by the host."""
    model = compiled(lambda x: torch.linalg.cholesky(x @ x.T + 8 * torch.eye(8, device="cuda")) * 2)
    for _ in range(7):
        x = randn(8, 8)
        expected = torch.linalg.cholesky(x @ x.T + 8 * torch.eye(8, device="cuda")) * 2
        torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3)
    assert captured() and refusals() == [], pygraph.stats()


@torch.no_grad()
def test_explain_lists_the_cut() -> None:
    report = pygraph.explain(lambda x: synchronize(x * 2) + 1, randn(64))
    (cut,) = [cut for cut in report.cuts if "synchronize" in cut.reason]
    assert cut.kind == "cut" and "cannot be captured" in cut.reason
    assert [row.state for row in report.graphs] == ["captured"] * 2
