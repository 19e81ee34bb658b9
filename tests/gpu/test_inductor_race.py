"""Kernels of Inductor's that read what they overwrite, with tiles of fewer elements than threads.

Without barriers their results can be wrong, captured or not (docs/explanation/inductor-race.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._inductor.runtime import triton_heuristics
from torch._inductor.utils import fresh_cache

from tests.gpu.support import captured, compiled, randn, uncaptured

_BATCH, _WIDTH, _CALLS = 1024, 64 * 132, 25


@pytest.fixture(params=[(64, 2, 8), (64, 4, 8), (2, 16, 2)], ids=lambda tile: "x".join(map(str, tile)))
def overwriting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Looped reductions have that tile and number of warps. Names of those that overwrite a buffer."""
    x, r, warps = request.param
    names: list[str] = []

    def configs(*, inductor_meta: dict[str, Any], **kwargs: Any) -> list[Any]:
        if inductor_meta["mutated_arg_names"]:
            names.append(inductor_meta["kernel_name"])
        blocks = {"XBLOCK": x, "R0_BLOCK": r}
        return [
            triton_heuristics.InductorConfig(
                blocks, num_warps=warps, num_stages=1, dynamic_scale_rblock=False
            )
        ]

    monkeypatch.setattr(triton_heuristics, "_reduction_configs", configs)
    in_this_process = inductor_config.patch(
        compile_threads=1, split_reductions=False, force_disable_caches=True
    )
    with fresh_cache(), in_this_process:
        yield names


def _same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


def _check_gradients(net: nn.Module, model: Callable[..., Any]) -> None:
    for _ in range(_CALLS):
        x, gradient = randn(_BATCH, 16).double(), randn(_BATCH, 32).double()
        expected = torch.autograd.grad(net(x), list(net.parameters()), gradient)
        actual = torch.autograd.grad(model(x), list(net.parameters()), gradient)
        for a, e in zip(actual, expected, strict=True):
            _same(a, e)


def test_gradients_of_biases(overwriting: list[str]) -> None:
    net = nn.Sequential(nn.Linear(16, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 32)).cuda().double()
    model = compiled(net)
    with uncaptured():
        _check_gradients(net, model)
    assert overwriting, "no kernel overwrites what it reduces"
    _check_gradients(net, model)
    assert {row.name for row in captured()} == {"forward", "backward"}


def test_an_input_that_a_reduction_overwrites(overwriting: list[str]) -> None:
    def normalize(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return (x - x.mean(0)) * x.var(0)

    model = compiled(normalize)
    for _ in range(_CALLS):
        x, y = randn(_BATCH, _WIDTH).double(), randn(_BATCH, _WIDTH).double()
        expected_x = x.clone()
        expected = normalize(expected_x, y)
        _same(model(x, y), expected)
        _same(x, expected_x)
    assert overwriting, "no kernel overwrites its input"


def test_a_result_that_a_second_loop_reads(overwriting: list[str]) -> None:
    def normalize(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = x + y
        return z, (z - z.mean(0)).abs().sum(0)

    model = compiled(normalize)
    for _ in range(_CALLS):
        x, y = randn(_BATCH, _WIDTH).double(), randn(_BATCH, _WIDTH).double()
        for a, e in zip(model(x, y), normalize(x, y), strict=True):
            _same(a, e)
