"""Numbers of fused optimizers that may move between the calls of a step: momentum, betas, weight decay,
and rates that rates.py does not follow (docs/explanation/whole-steps.md).

Fused kernels take them by value, as doubles, and PyTorch's Python passes them on as they are. So each
becomes an input of the graph, whose address is its bits (bindings/tensors/followed_number.h): a replay
gives the kernels the number of its call, as an uncaptured call does.

Numbers are followed once one has been seen to move. Those that are zero are not, because PyTorch
chooses kernels by that; nor are any if code other than PyTorch's mentions the groups, because it may
compute with the numbers of a recording. Code that reads them otherwise shows in a recording, whose
numbers tell (told_number.py); numbers are not followed any more then.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch

from pygraph import runtime
from pygraph.callables.host.user_code import mentions
from pygraph.callables.optimizer_forms import is_of_pytorch, place_of
from pygraph.callables.told_number import AbsentNumber, told
from pygraph.undoing import Undo

_Group = dict[str, Any]
_NUMBERS: dict[type, tuple[str, ...]] = {
    torch.optim.SGD: ("lr", "momentum", "dampening", "weight_decay"),
    torch.optim.Adam: ("betas", "weight_decay"),
    torch.optim.AdamW: ("betas", "weight_decay"),
    torch.optim.Adagrad: ("lr", "lr_decay", "weight_decay"),
}
_MAY_BE_ZERO = "lr"
_PYTORCH = os.path.dirname(torch.__file__) + os.sep


@dataclasses.dataclass(frozen=True)
class FusedNumber:
    """What a group has under a key: a number, or a tuple of numbers (betas). parts: how many."""

    group: _Group
    key: str
    parts: int

    def is_same(self, other: FusedNumber) -> bool:
        return self.group is other.group and self.key == other.key and self.parts == other.parts

    def values(self) -> list[Any]:
        value = self.group.get(self.key)
        return list(value) if self.parts > 1 and type(value) is tuple else [value]

    def can_be_followed(self) -> bool:
        """Whether what is there now leads to the same kernels."""
        values = self.values()
        return len(values) == self.parts and all(_can_be(self.key, value) for value in values)

    def give(self, numbers: Sequence[float], tell: Callable[[], None], may_be_used: bool) -> None:
        """tell: called when Python computes with one of them."""
        given: tuple[Any, ...] = tuple(
            told(number, tell, self.key == _MAY_BE_ZERO) if may_be_used else AbsentNumber(tell)
            for number in numbers
        )
        self.group[self.key] = given if self.key == "betas" else given[0]


def _can_be(key: str, value: Any) -> bool:
    return type(value) is float and math.isfinite(value) and (value != 0 or key == _MAY_BE_ZERO)


def followed(
    optimizers: Iterable[torch.optim.Optimizer], rated: Iterable[int] = ()
) -> list[FusedNumber]:
    """The numbers of these optimizers that graphs can follow. rated: groups, by identity, whose rates
    are followed as tensors."""
    others = set(rated)
    found = []
    for optimizer in optimizers:
        keys = _NUMBERS.get(type(optimizer), ()) if is_of_pytorch(optimizer) else ()
        for group in optimizer.param_groups:
            if group.get("fused") is not True or group.get("differentiable"):
                continue
            for key in keys:
                if key == "lr" and id(group) in others:
                    continue
                number = FusedNumber(group, key, 2 if key == "betas" else 1)
                if number.can_be_followed():
                    found.append(number)
    return found


def explain(
    changed: Iterable[str],
    optimizers: Mapping[str, torch.optim.Optimizer],
    functions: Iterable[FunctionType],
) -> bool:
    """Whether all changes of the host's state, by path, are numbers that graphs can follow. functions:
    all that the callable reaches."""
    for path in changed:
        place = place_of(path, optimizers)
        if place is None:
            return False
        optimizer, group, key = place
        if not any(number.group is group and number.key == key for number in followed([optimizer])):
            return False
    return not are_named(functions)


def are_named(functions: Iterable[FunctionType]) -> bool:
    """Whether one of these functions that is not PyTorch's mentions the groups."""
    codes = (function.__code__ for function in functions)
    others = (code for code in codes if not code.co_filename.startswith(_PYTORCH))
    return any(mentions(code, "param_groups") for code in others)


def names_of(
    optimizers: Iterable[torch.optim.Optimizer], numbers: Iterable[FusedNumber]
) -> tuple[str, ...]:
    """What they are called in reports: ``SGD.param_groups[0]['momentum']``."""
    wanted = [(number.group, number.key) for number in numbers]
    return tuple(
        f"{type(optimizer).__name__}.param_groups[{i}]['{key}']"
        for optimizer in optimizers
        for i, group in enumerate(optimizer.param_groups)
        for of, key in wanted
        if of is group
    )


class FusedNumbers:
    """The numbers that a graph follows. Thread-safe.

    are_read: whether Python has computed with those of a recording, so that a graph would not be right.
    """

    def __init__(self, numbers: list[FusedNumber], may_be_used: bool) -> None:
        """may_be_used: whether the callable may use them at all (told_number.py)."""
        self._numbers = numbers
        self._may_be_used = may_be_used
        self.are_read = False
        self.count = sum(number.parts for number in numbers)

    def can_be_followed(self) -> bool:
        return all(number.can_be_followed() for number in self._numbers)

    def inputs(self) -> list[float]:
        """As they are now."""
        make = runtime.engine().FollowedNumber
        return [make(value) for number in self._numbers for value in number.values()]

    def are_same(self, others: Sequence[FusedNumber]) -> bool:
        """Whether they are of the same groups as others."""
        pairs = zip(self._numbers, others, strict=False)
        return len(self._numbers) == len(others) and all(a.is_same(b) for a, b in pairs)

    def begin_recording(self, given: Sequence[float], undo: Undo) -> Callable[[], bool]:
        """Puts other numbers in their places. Returns what tells whether a graph would be right, after
        the callable has run: Python has neither computed with them nor put others there."""
        kept = [(number.group, number.key, number.group[number.key]) for number in self._numbers]
        undo.append(lambda: [group.update({key: value}) for group, key, value in kept])
        start = 0
        for number in self._numbers:
            number.give(given[start : start + number.parts], self.note_read, self._may_be_used)
            start += number.parts
        put = [number.group[number.key] for number in self._numbers]

        def are_left_alone() -> bool:
            now = [number.group.get(number.key) for number in self._numbers]
            self.are_read |= any(a is not b for a, b in zip(put, now, strict=True))
            return not self.are_read

        return are_left_alone

    def note_read(self) -> None:
        self.are_read = True

    def note_failure(self) -> None:
        """Of a recording: perhaps because numbers that may not be used are none."""
        self.are_read |= bool(self._numbers) and not self._may_be_used

    def note_python_in_backward(self) -> None:
        """It may have kept a number, or read one."""
        self.are_read |= bool(self._numbers)
