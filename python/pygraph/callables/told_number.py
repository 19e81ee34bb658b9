"""Numbers of a recording that tell if Python computes with them, or chooses by them.

PyTorch's fused steps only compare numbers with zero, and pass them to kernels, which take their value
as that of any float. What else Python does with one holds for the recording alone.

The graph that autograd makes may keep a number for the backward, which would be the recording's. So the
recording of a callable that gradients flow through is given no numbers, but what cannot be used as one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_COMPARISONS = ("__eq__", "__ne__", "__bool__")
_OTHERS = (
    *("__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__float__", "__int__", "__trunc__"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"),
    *("__rtruediv__", "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__divmod__"),
    *("__rdivmod__", "__pow__", "__rpow__", "__neg__", "__pos__", "__abs__", "__round__"),
    *("__floor__", "__ceil__", "__repr__", "__str__", "__format__", "__reduce_ex__"),
    *("is_integer", "as_integer_ratio", "hex", "conjugate"),
)


class ToldNumber(float):
    """tell: called when the number is read. may_be_zero: whether a comparison with zero is a choice."""

    tell: Callable[[], None]
    may_be_zero: bool

    @property
    def real(self) -> float:
        self.tell()
        return super().real


def told(value: float, tell: Callable[[], None], may_be_zero: bool) -> ToldNumber:
    number = ToldNumber(value)
    number.tell, number.may_be_zero = tell, may_be_zero
    return number


def _telling(name: str) -> Callable[..., Any]:
    own: Any = getattr(float, name)

    def method(self: ToldNumber, *others: Any) -> Any:
        is_zero = all(type(other) in (int, float) and other == 0 for other in others)
        if name not in _COMPARISONS or self.may_be_zero or not is_zero:
            self.tell()
        return own(self, *others)

    return method


class AbsentNumber:
    """In place of a number that is not to be used."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    @property
    def __class__(self) -> type:
        """Also what ``isinstance`` asks for."""
        self._tell()
        return float

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("the class of a number is fixed")

    def __getattr__(self, name: str) -> Any:
        self._tell()
        raise AttributeError(name)


def _refusing(name: str) -> Callable[..., Any]:
    def method(self: AbsentNumber, *others: Any) -> Any:
        self._tell()
        raise TypeError("this number of an optimizer may not be used here")

    return method


for _name in (*_COMPARISONS, *_OTHERS):
    setattr(ToldNumber, _name, _telling(_name))
    if _name[:2] == "__":
        setattr(AbsentNumber, _name, _refusing(_name))
