"""Classes and slots of tensors, and the type of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pygraph

from .attacked import Plain, X, assert_replays_follow, replays

_SETTINGS = Plain(scale=2.0)


class _Scaled(nn.Parameter):
    scale = 2.0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * _SETTINGS.scale

    @property
    def factor(self) -> float:
        return float(_SETTINGS.scale)


class _Slotted(nn.Parameter):
    __slots__ = ("scale",)


def test_attribute_of_the_class(partitions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    p: Any = _Scaled(torch.ones(4))
    change = lambda: monkeypatch.setattr(_Scaled, "scale", 3.0)  # noqa: E731
    assert_replays_follow(partitions, lambda x: x * p.scale, change)


@pytest.mark.parametrize("call", [lambda p, x: p.scaled(x), lambda p, x: x * p.factor])
def test_what_a_method_reads(partitions: Any, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    p = _Scaled(torch.ones(4))
    change = lambda: monkeypatch.setattr(_SETTINGS, "scale", 3.0)  # noqa: E731
    assert_replays_follow(partitions, lambda x: call(p, x), change)


def test_slot(partitions: Any) -> None:
    p: Any = _Slotted(torch.ones(4))
    p.scale = 2.0
    assert_replays_follow(partitions, lambda x: x * p.scale, lambda: setattr(p, "scale", 3.0))


def test_method_of_every_parameter(partitions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Plain(scale=2.0)
    scaled = lambda self, x: x * settings.scale  # noqa: E731
    monkeypatch.setattr(nn.Parameter, "scaled", scaled, raising=False)
    p: Any = nn.Parameter(torch.ones(4))
    assert_replays_follow(partitions, lambda x: p.scaled(x), lambda: setattr(settings, "scale", 3.0))


def test_whether_a_gradient_is_retained(partitions: Any) -> None:
    t = torch.ones(4, requires_grad=True) * 2
    call = lambda x: x * (2.0 if t.retains_grad else 3.0)  # noqa: E731
    assert_replays_follow(partitions, call, t.retain_grad)


class _Product(torch.autograd.Function):
    """Its gradient has the type of the result, not of the parameter."""

    @staticmethod
    def forward(ctx: Any, p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return p.float() * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"), [(torch.float32, torch.float64), (torch.bfloat16, None)]
)
def test_type_of_a_gradient(partitions: Any, dtype: torch.dtype, grad_dtype: Any) -> None:
    product: Any = _Product.apply if grad_dtype is None else torch.mul

    def make() -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
        p: Any = nn.Parameter(torch.ones(4, dtype=dtype))

        def step(x: torch.Tensor) -> torch.Tensor:
            product(p, x).sum().backward()
            return x * 2

        return p, step

    (p, step), (other, its_step) = make(), make()
    graphed = pygraph.graph(step)
    for i in range(16):
        p.grad = other.grad = None
        if i == 12:
            assert replays(partitions)
            p.grad_dtype = other.grad_dtype = grad_dtype
        its_step(X)
        graphed(X)
        assert p.grad.dtype == other.grad.dtype, i


def test_a_release_that_tells_of_leaves_only(partitions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch up to 2.14."""
    told: Any = vars(torch._C.TensorBase)["grad_dtype"]

    def grad_dtype(tensor: torch.Tensor) -> Any:
        if not tensor.is_leaf:
            raise RuntimeError("grad_dtype can only be accessed on leaf tensors.")
        return told.__get__(tensor)

    monkeypatch.setattr(torch.Tensor, "grad_dtype", property(grad_dtype), raising=False)
    held = Plain(last=nn.Parameter(torch.ones(4)) * 2)
    graphed = pygraph.graph(lambda x: x * 2 if held.last is not None else x)
    for _ in range(12):
        graphed(X)
    assert replays(partitions)
