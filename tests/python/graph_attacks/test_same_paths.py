"""Tensors that a program would reach by the same path: elements of a set, slots of the same name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph

from .attacked import X, assert_follows, replays


class _Base:
    __slots__ = ("held",)


class _Derived(_Base):
    __slots__ = ("held",)


def _by_dimensions(x: torch.Tensor, tensors: Any) -> torch.Tensor:
    for tensor in tensors:
        x = x + tensor.dim()
    return x


@pytest.mark.parametrize("changed", [0, 1])
@pytest.mark.parametrize("kind", [set, frozenset])
def test_layout_of_an_element(partitions: Any, kind: Any, changed: int) -> None:
    tensors = [torch.ones(1), torch.ones(1)]
    held = kind(tensors)
    assert_follows(
        partitions, lambda x: _by_dimensions(x, held), lambda: tensors[changed].unsqueeze_(0)
    )


@pytest.mark.parametrize("changed", [0, 1])
def test_layout_of_a_key(partitions: Any, changed: int) -> None:
    tensors = [torch.ones(1), torch.ones(1)]
    held = {tensor: None for tensor in tensors}
    assert_follows(
        partitions, lambda x: _by_dimensions(x, held), lambda: tensors[changed].unsqueeze_(0)
    )


@pytest.mark.parametrize("of", [_Base, _Derived])
def test_layout_in_slots_of_the_same_name(partitions: Any, of: Any) -> None:
    value = _Derived()
    members = [vars(class_)["held"] for class_ in (_Base, _Derived)]
    tensors = {class_: torch.ones(1) for class_ in (_Base, _Derived)}
    for class_, tensor in tensors.items():
        vars(class_)["held"].__set__(value, tensor)
    call = lambda x: _by_dimensions(x, [member.__get__(value) for member in members])  # noqa: E731
    assert_follows(partitions, call, lambda: tensors[of].unsqueeze_(0))


@pytest.mark.parametrize("changed", [0, 1])
def test_an_attribute_of_an_element(partitions: Any, changed: int) -> None:
    tensors = [torch.ones(1), torch.ones(1)]
    for tensor in tensors:
        tensor.scale = 2.0  # type: ignore[attr-defined]
    held = set(tensors)
    call = lambda x: x + sum(tensor.scale for tensor in held)  # noqa: E731
    assert_follows(partitions, call, lambda: setattr(tensors[changed], "__dict__", {"scale": 3.0}))


def _detached(of: list[torch.nn.Parameter]) -> None:
    of[0].grad = None


def _hooked(of: list[torch.nn.Parameter]) -> None:
    of[0].register_hook(lambda gradient: gradient * 2)


def _frozen(of: list[torch.nn.Parameter]) -> None:
    of[0].requires_grad_(False)


@pytest.mark.parametrize("change", [_detached, _hooked, _frozen])
@pytest.mark.parametrize("order", [1, -1])
def test_parameters_in_a_set(
    partitions: Any, change: Callable[[list[torch.nn.Parameter]], None], order: int
) -> None:
    programs = [[torch.nn.Parameter(torch.ones(4)) for _ in range(2)] for _ in range(2)]

    def step_of(parameters: list[torch.nn.Parameter]) -> Callable[[torch.Tensor], torch.Tensor]:
        held = set(parameters)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = torch.stack([(parameter * x).sum() for parameter in held]).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        return step

    ours, theirs = pygraph.graph(step_of(programs[0])), step_of(programs[1])
    for i in range(14):
        if i == 10:
            for parameters in programs:
                change(parameters[::order])
        ours(X + i)
        theirs(X + i)
        for a, b in zip(*programs, strict=True):
            same = (a.grad is None) == (b.grad is None) and (
                a.grad is None or torch.equal(a.grad, b.grad)
            )
            assert same, f"call {i}: {a.grad} for {b.grad}, {replays(partitions)} replays"


@pytest.mark.parametrize("changed", [0, 1])
def test_optimizers_in_a_set(partitions: Any, changed: int) -> None:
    def program() -> tuple[list[torch.nn.Parameter], list[torch.optim.Optimizer], Any]:
        parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
        optimizers = [torch.optim.AdamW([p], lr=0.1, fused=True) for p in parameters]
        held = set(optimizers)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = torch.stack([(p * x).sum() for p in parameters]).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            for optimizer in held:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        return parameters, optimizers, step

    ours, theirs = program(), program()
    graphed = pygraph.graph(ours[2])
    for i in range(20):
        for _, optimizers, _ in (ours, theirs):
            optimizers[changed].param_groups[0]["lr"] = 0.1 + 0.01 * max(0, i - 10)
        graphed(X + i)
        theirs[2](X + i)
        for a, b in zip(ours[0], theirs[0], strict=True):
            assert torch.equal(a, b), f"call {i}: {a} for {b}, {replays(partitions)} replays"
