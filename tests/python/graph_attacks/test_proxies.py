"""Objects that claim to be tensors."""

from __future__ import annotations

import unittest.mock
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import pygraph

from .attacked import Plain, X, assert_replays_follow, replays


class _Claims:
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return torch.Tensor


@pytest.mark.parametrize(
    "make",
    [weakref.proxy, lambda of: unittest.mock.Mock(spec=torch.Tensor), lambda of: _Claims()],
    ids=["proxy", "mock", "claims"],
)
def test_reached(partitions: Any, make: Any) -> None:
    t = nn.Parameter(torch.ones(4))
    held = Plain(p=make(t))
    graphed = pygraph.graph(lambda x: x * 2 if held.p is not None else x)
    for _ in range(12):
        assert torch.equal(graphed(X), X * 2)


def test_as_results(partitions: Any) -> None:
    t = torch.ones(4)
    graphed = pygraph.graph(lambda x: (x * 2, weakref.proxy(t)))
    for _ in range(12):
        result, proxy = graphed(X)
        assert torch.equal(result, X * 2) and proxy.shape == t.shape


def test_what_a_proxy_stands_for(partitions: Any) -> None:
    owner: Any = Plain()
    owner.settings = Plain(scale=2.0)
    held = Plain(of=weakref.proxy(owner.settings))
    change = lambda: setattr(owner.settings, "scale", 3.0)  # noqa: E731
    assert_replays_follow(partitions, lambda x: x * held.of.scale, change)


class _Other:
    def go(self, *args: Any) -> None:
        pass


class _OwnInit:
    __init__: Any = _Other().go
    scale = 2.0


class _StaticInit:
    scale = 2.0

    @staticmethod
    def __init__(*args: Any) -> None:
        pass


class _Class:
    scale = 2.0


@pytest.mark.parametrize(
    "make", [lambda: _Class, _OwnInit, _StaticInit], ids=["class", "own", "static"]
)
def test_what_an_unusual_proxy_stands_for(
    partitions: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = make()
    held = Plain(of=weakref.proxy(owner))
    change = lambda: monkeypatch.setattr(owner, "scale", 3.0)  # noqa: E731
    assert_replays_follow(partitions, lambda x: x * held.of.scale, change)


def test_layout_of_a_tensor_behind_a_proxy(partitions: Any) -> None:
    t = torch.ones(1)
    held = Plain(of=weakref.proxy(t))
    assert_replays_follow(partitions, lambda x: x + held.of.dim(), lambda: t.unsqueeze_(0))
    assert replays(partitions)
