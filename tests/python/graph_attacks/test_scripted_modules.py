"""Modules of TorchScript, which keep their tensors in C++."""

from __future__ import annotations

from typing import Any, Optional

import pytest
import torch
from torch import nn

import pygraph

from .attacked import X, assert_replays_follow, replays


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.register_buffer("b", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(x) * self.b


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m = self.mask
        if m is not None:
            return x * m
        return x * 2


# TorchScript does not read annotations that are text, as all of this file are.
_Masked.__annotations__ = {"mask": Optional[torch.Tensor]}  # noqa: UP045


def _assign(module: Any) -> None:
    state = {name: torch.full_like(of, 0.5) for name, of in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def _replace_parameter(module: Any) -> None:
    module.l.weight = nn.Parameter(torch.zeros(4, 4))


def _replace_buffer(module: Any) -> None:
    module.b = torch.zeros(4)


@pytest.mark.parametrize("change", [_assign, _replace_parameter, _replace_buffer])
@pytest.mark.parametrize("is_traced", [False, True])
def test_replaced_tensors(partitions: Any, change: Any, is_traced: bool) -> None:
    net = _Net().requires_grad_(False)
    module: Any = torch.jit.trace(net, X) if is_traced else torch.jit.script(net)
    assert_replays_follow(partitions, lambda x: module(x).detach(), lambda: change(module))


def test_an_optional_tensor(partitions: Any) -> None:
    module: Any = torch.jit.script(_Masked())
    assert_replays_follow(
        partitions, lambda x: module(x), lambda: setattr(module, "mask", torch.zeros(4))
    )


def test_a_step(partitions: Any) -> None:
    def make() -> tuple[Any, Any]:
        torch.manual_seed(0)
        module: Any = torch.jit.script(_Net())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, fused=True)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = module(x).pow(2).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return module, step

    (module, step), (other, its_step) = make(), make()
    graphed = pygraph.graph(step)
    for i in range(14):
        if i == 12:
            assert replays(partitions)
            _assign(module)
            _assign(other)
        a, b = graphed(X), its_step(X)
        assert torch.equal(a, b), (i, a, b)


class _Scaled(nn.Module):
    """Its number is made anew each time that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = (torch.ones(4), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.parts[0] * self.parts[1]


class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = {"a": torch.ones(4), "b": torch.ones(4)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "b" in self.parts:
            return x * 2
        return x * 3


_Scaled.__annotations__ = {"parts": tuple[torch.Tensor, float]}
_Named.__annotations__ = {"parts": dict[str, torch.Tensor]}


def test_a_number_beside_a_tensor(partitions: Any) -> None:
    module: Any = torch.jit.script(_Scaled())
    change = lambda: setattr(module, "parts", (torch.ones(4), 0.25))  # noqa: E731
    assert_replays_follow(partitions, lambda x: module(x), change)


def test_keys_of_tensors(partitions: Any) -> None:
    module: Any = torch.jit.script(_Named())

    def change() -> None:
        parts = module.parts
        module.parts = {"a": parts["a"], "z": parts["b"]}

    assert_replays_follow(partitions, lambda x: module(x), change)
