"""Models that reach tensors, numbers and methods in many ways give the same results with patches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from pygraph.torch_patches.selection import ALL, EXACT, NONE
from tests.python.compiled_programs import Backend, ReducingBackend, X
from tests.python.patched_programs import Model

_GAIN, _ONES, _ONES_OF_NUMPY = np.sqrt(0.5), torch.ones(3), np.ones(3)


class _TableInClass(nn.Module):
    table = torch.arange(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table


class _TablesInClass(nn.Module):
    tables: ClassVar[dict[str, Any]] = {
        "a": [torch.arange(3.0), np.ones(3)],
        "b": (np.float32(2.0), torch.tensor(4)),
    }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.tables["a"][0] + self.tables["a"][1]) * type(self).tables["b"][0]


class _Base(nn.Module):
    shift = torch.ones(3)
    scale = np.array([1.0, 2.0, 3.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().__getattribute__("shift")


class _Derived(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.from_numpy(super().scale)


class _Cached(nn.Module):
    cache: ClassVar[dict[int, torch.Tensor]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] not in _Cached.cache:
            _Cached.cache[x.shape[0]] = torch.ones(x.shape[0]).tril()
        return x * type(self).cache[x.shape[0]]


class _Default(nn.Module):
    def forward(self, x: torch.Tensor, gain: Any = _GAIN, bias: Any = _ONES) -> Any:
        return x * gain + bias


def _scaled(by: torch.Tensor) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def call(self: Any, x: torch.Tensor) -> Any:
            return function(self, x) * by

        return call

    return decorate


class _Decorated(nn.Module):
    @_scaled(torch.full((3,), 3.0))
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class _Partial(nn.Module):
    move = functools.partial(torch.add, torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.move(x)


class _Meta(type):
    shift = torch.ones(3)

    @property
    def scale(cls) -> Any:
        return np.float64(3.0)


class _OfMeta(nn.Module, metaclass=_Meta):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * type(self).scale + type(self).shift


class _Property(nn.Module):
    hidden = torch.full((3,), 7.0)

    @property
    def seen(self) -> torch.Tensor:
        return self.hidden * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.seen if hasattr(self, "seen") else x


def _wrapping() -> nn.Module:
    inner = Model()

    class Wrapper(nn.Module):
        held = (inner,)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return inner(x) + type(self).held[0](x)

    return Wrapper()


class _ClassMethods(nn.Module):
    weights = nn.ParameterList([nn.Parameter(torch.ones(3))])

    @classmethod
    def shifted(cls, x: torch.Tensor) -> torch.Tensor:
        return x + cls.weights[0]

    @staticmethod
    def scaled(x: torch.Tensor, by: Any = _ONES_OF_NUMPY) -> torch.Tensor:
        return x * by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.shifted(x))


MODELS = (
    *(_TableInClass, _TablesInClass, _Derived, _Cached, _Default, _Decorated, _Partial, _OfMeta),
    *(_Property, _wrapping, _ClassMethods),
)


def _outcomes(make: Callable[[], nn.Module], backend: Backend) -> list[Any]:
    """Of some calls; the kind of an error where Dynamo raises one."""
    torch._dynamo.reset()
    _Cached.cache.clear()
    model = nn.Sequential(make(), nn.Sequential(make()))
    compiled = torch.compile(model, backend=backend)
    found: list[Any] = []
    for x in (X, X, X + 1):
        try:
            found.append(compiled(x).tolist())
        except Exception as error:
            found.append(type(error))
    return [*found, backend.graphs]


@pytest.mark.parametrize("level", [NONE, EXACT, ALL])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_what_a_model_reaches_through_its_class(make: Callable[[], nn.Module], level: str) -> None:
    plain = _outcomes(make, Backend())
    assert _outcomes(make, ReducingBackend(True, level)) == plain
