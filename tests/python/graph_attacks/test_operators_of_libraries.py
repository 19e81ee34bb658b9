"""Overloads of operators, which PyTorch makes when it is asked for them, keeps for good in
``torch.ops``, and refers to from C++ without holding them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pygraph

from .attacked import X

_LIBRARY = torch.library.Library("kept_overloads", "DEF")
_LIBRARY.define("twice(Tensor x) -> Tensor")
_LIBRARY.impl("twice", lambda x: 2 * x, "CPU")


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(func)
        return func(*args, **(kwargs or {}))


def test_an_overload_that_a_rehearsal_has_made_stays(partitions: Any) -> None:
    """Otherwise what PyTorch refers to is freed, and a later operator under a mode crashes."""
    packet = torch.ops.kept_overloads.twice

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.kept_overloads.twice(x)

    graphed = pygraph.graph(call)
    for _ in range(6):  # a rehearsal is made under a mode
        graphed(X)
    assert "default" in vars(packet)
    with _Seen() as seen:
        packet(X)
    assert seen.found[0] is packet.default


def test_an_operator_that_a_rehearsal_has_made_stays(partitions: Any) -> None:
    """The program names it, and its calls do not come to that line."""
    _LIBRARY.define("thrice(Tensor x) -> Tensor")
    _LIBRARY.impl("thrice", lambda x: 3 * x, "CPU")
    operator = torch._C._jit_get_operation("kept_overloads::thrice")[0]

    def call(x: torch.Tensor) -> torch.Tensor:
        if x.numel() > 4:
            return torch.ops.kept_overloads.thrice(x)
        return operator(x)  # type: ignore[no-any-return]

    graphed = pygraph.graph(call)
    for _ in range(6):
        graphed(X)
    assert "thrice" in vars(torch.ops.kept_overloads)
    with _Seen() as seen:
        operator(X)
    assert seen.found[0] is torch.ops.kept_overloads.thrice.default
