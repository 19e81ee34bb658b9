"""What a program puts into classes of libraries, other than plain functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from .attacked import Plain, assert_replays_follow


@pytest.mark.parametrize("decorate", [torch.no_grad(), torch.compiler.disable])
def test_a_function_with_a_decorator_of_a_library(
    partitions: Any, decorate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, original = Plain(scale=2.0), nn.ReLU.forward
    patch = decorate(lambda self, x: original(self, x) * settings.scale)
    monkeypatch.setattr(nn.ReLU, "forward", patch)
    module = nn.ReLU()
    assert_replays_follow(partitions, lambda x: module(x), lambda: setattr(settings, "scale", 3.0))


class _Callable:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


_PATCHES: dict[str, Callable[[Any], Any]] = {
    "property": lambda of: property(lambda self: lambda x: x * of.scale),
    "staticmethod": lambda of: staticmethod(lambda x: x * of.scale),
    "classmethod": lambda of: classmethod(lambda cls, x: x * of.scale),
    "partialmethod": lambda of: functools.partialmethod(lambda self, k, x: x * k.scale, of),
    "partial": lambda of: functools.partial(lambda x: x * of.scale),
    "callable": lambda of: _Callable(lambda x: x * of.scale),
}


@pytest.mark.parametrize("kind", _PATCHES)
@pytest.mark.parametrize("of", [nn.ReLU, torch.Tensor])
def test_another_kind(partitions: Any, kind: str, of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Plain(scale=2.0)
    monkeypatch.setattr(of, "scaled", _PATCHES[kind](settings), raising=False)
    target: Any = nn.ReLU() if of is nn.ReLU else torch.ones(4)
    assert_replays_follow(
        partitions, lambda x: target.scaled(x), lambda: setattr(settings, "scale", 3.0)
    )


def test_a_number_in_the_memory_of_another(partitions: Any) -> None:
    nn.Dropout.scale = float("2.5")  # type: ignore[attr-defined]
    module: Any = nn.Dropout()

    def change() -> None:
        del nn.Dropout.scale  # type: ignore[attr-defined]
        nn.Dropout.scale = float("3.5")  # type: ignore[attr-defined]

    try:
        assert_replays_follow(partitions, lambda x: x * module.scale, change)
    finally:
        del nn.Dropout.scale  # type: ignore[attr-defined]


def test_contents_of_an_attribute(partitions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Dropout, "settings", {"scale": 2.0}, raising=False)
    module: Any = nn.Dropout()
    change = lambda: module.settings.update(scale=3.0)  # noqa: E731
    assert_replays_follow(partitions, lambda x: x * module.settings["scale"], change)
