"""Results that functions keep in caches of `functools`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import pygraph

from .attacked import Plain, X, assert_replays_follow, replays

_CACHES = [functools.cache, functools.lru_cache(maxsize=1), functools.lru_cache(maxsize=None)]


@pytest.mark.parametrize("cached", _CACHES)
def test_settings(partitions: Any, cached: Any) -> None:
    settings = cached(lambda: Plain(scale=2.0))
    change = lambda: setattr(settings(), "scale", 3.0)  # noqa: E731
    assert_replays_follow(partitions, lambda x: x * settings().scale, change)


@pytest.mark.parametrize("cached", _CACHES)
def test_by_argument(partitions: Any, cached: Any) -> None:
    settings = cached(lambda name, kind: {"scale": 2.0})
    change = lambda: settings("a", kind="b").update(scale=3.0)  # noqa: E731
    assert_replays_follow(partitions, lambda x: x * settings("a", kind="b")["scale"], change)


def test_mode_of_a_module(partitions: Any) -> None:
    @functools.lru_cache(maxsize=1)
    def model() -> nn.Module:
        return nn.Dropout(0.5).eval()

    call = lambda x: x * (2.0 if model().training else 3.0)  # noqa: E731
    assert_replays_follow(partitions, call, lambda: model().train())


def test_hook_of_a_module(partitions: Any) -> None:
    @functools.lru_cache(maxsize=1)
    def model() -> nn.Module:
        return nn.Linear(4, 4).requires_grad_(False)

    change = lambda: model().register_forward_hook(lambda m, i, o: o * 2)  # noqa: E731
    assert_replays_follow(partitions, lambda x: model()(x), change)


@pytest.mark.parametrize("cached", _CACHES)
def test_filled_again(partitions: Any, cached: Any) -> None:
    """The counters are what they were."""
    held = Plain(n=2.0)
    scale = cached(lambda: held.n)
    scale()

    def change() -> None:
        held.n = 3.0
        scale.cache_clear()
        scale()
        held.n = 2.0

    assert_replays_follow(partitions, lambda x: x * scale(), change)


class _Trainer:
    def __init__(self) -> None:
        self.settings = Plain(scale=2.0)

    @functools.lru_cache  # noqa: B019
    def options(self) -> Any:
        return self.settings

    def call(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.options().scale


def test_method(partitions: Any) -> None:
    trainer = _Trainer()
    kept = trainer.options()
    trainer.settings = Plain(scale=5.0)
    assert_replays_follow(partitions, trainer.call, lambda: setattr(kept, "scale", 3.0))


_QUEUE: list[Any] = []


def _from_the_queue(_: int) -> Any:
    """Reads what the walk does not see, so that the cache alone tells."""
    return __import__("sys").modules[__name__].__dict__["_QUEUE"].pop(0)


@pytest.mark.parametrize("limit", [None, 8])
def test_exchanged_results(partitions: Any, limit: int | None) -> None:
    a, b = object(), object()
    function = functools.lru_cache(maxsize=limit)(_from_the_queue)
    _QUEUE[:] = [a, b, b, a]
    function(1), function(2)

    def change() -> None:
        function.cache_clear()
        function(1), function(2)

    assert_replays_follow(partitions, lambda x: x * (2 if function(1) is a else 3), change)


@pytest.mark.parametrize("limit", [None, 8])
def test_a_cache_that_is_filled_in_each_call(partitions: Any, limit: int | None) -> None:
    @functools.lru_cache(maxsize=limit)
    def scale(n: int, m: int) -> float:
        return n * 2.0

    def call(x: torch.Tensor) -> torch.Tensor:
        scale.cache_clear()
        return x * scale(1, m=1)

    graphed = pygraph.graph(call)
    for _ in range(12):
        assert torch.equal(graphed(X), X * 2)
    assert replays(partitions)
