"""What the tests of watched state on the host share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import pygraph

WARM = 24  # calls after which a small callable is replayed


def graphed(function: Callable[..., Any]) -> Callable[..., Any]:
    found: Callable[..., Any] = pygraph.graph(function, select="always")
    return found


def replays() -> int:
    return sum(row.replays for row in pygraph.stats())


def given() -> torch.Tensor:
    return torch.arange(1.0, 5.0, device="cuda")


def assert_follows(
    function: Callable[..., torch.Tensor], change: Callable[[], Any], is_replayed: bool | None = True
) -> None:
    """After a change between calls, the graphed callable gives what the function gives.

    is_replayed: whether it has a graph before the change; None if it may have one.
    """
    x, call = given(), graphed(function)
    for _ in range(WARM):
        call(x)
    made = replays()
    assert is_replayed in (None, made > 0), [row.reason for row in pygraph.stats()]
    change()
    for i in range(3):
        got, expected = call(x), function(x)
        assert torch.equal(got, expected), f"call {i} after the change, {made} replays before it"
