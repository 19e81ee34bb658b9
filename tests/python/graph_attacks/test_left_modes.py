"""Steps that leave PyTorch's modes other than they have found them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pygraph

from .attacked import X


def _set_benchmark(value: bool) -> None:
    torch.backends.cudnn.benchmark = value


_Mode = tuple[Callable[[], Any], Callable[[Any], Any], Any, Any]
_MODES: dict[str, _Mode] = {
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled, True, False),
    "dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float32, torch.float64),
    "autocast": (
        *(lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
        *(False, True),
    ),
    "determinism": (
        *(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        *(False, True),
    ),
    "precision": (
        *(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        *("highest", "high"),
    ),
    "benchmark": (lambda: torch.backends.cudnn.benchmark, _set_benchmark, False, True),
    "anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, False, True),
}


@pytest.fixture(params=_MODES)
def mode(request: pytest.FixtureRequest) -> Iterator[_Mode]:
    get, put, first, other = _MODES[request.param]
    before = get()
    yield get, put, first, other
    put(before)


def _setting(put: Callable[[Any], Any], value: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A graphed callable that ends by setting a mode."""

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        put(value)
        return y

    return pygraph.graph(step)


def test_a_mode_that_a_step_sets_is_set(partitions: Any, mode: _Mode) -> None:
    get, put, first, other = mode
    graphed = _setting(put, other)
    for _ in range(12):
        put(first)
        graphed(X + 1)
        assert get() == other


def test_a_mode_is_set_only_where_it_is_another_one(partitions: Any, mode: _Mode) -> None:
    get, put, first, other = mode
    graphed = _setting(put, other)
    put(other)
    for _ in range(8):
        graphed(X + 1)
    for _ in range(8):
        put(first)
        graphed(X + 1)
        assert get() == other


def test_gradients_that_a_training_step_turns_on(partitions: Any) -> None:
    p, aside = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = torch.optim.AdamW([p], lr=0.1, fused=True)

    @pygraph.graph
    def step(x: torch.Tensor) -> None:
        torch.set_grad_enabled(True)
        (x * p).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        for _ in range(12):
            torch.set_grad_enabled(False)  # as an evaluation has left it
            step(X + 1)
            (aside * 2).sum().backward()
    finally:
        torch.set_grad_enabled(True)
