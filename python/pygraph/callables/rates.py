"""Learning rates that may move between the calls of a step (docs/explanation/whole-steps.md).

A tensor takes the float's place while the step is recorded, and becomes one more input of the graph;
the program and its schedulers go on with floats. rate_probe.py tries which forms of optimizers take a
tensor, and with which of them the bits are the same. Others are followed only if the program has asked
for tensors (``pygraph.graph(step, adapt_optimizers=True)``): then uncaptured calls are given tensors,
too.

A capture of a fused optimizer also asks for ``capturable``, which fused kernels do not use: it is set
for recordings alone.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from pygraph.callables import rate_probe
from pygraph.callables.told_number import AbsentNumber
from pygraph.undoing import Undo, release, undoing

_Group = dict[str, Any]
_lock = threading.RLock()  # of the next; held by no call, because calls may wait for each other
_given: dict[int, _Given] = {}  # groups that have tensors in uncaptured calls, by identity


@dataclasses.dataclass(frozen=True)
class Rated:
    """A group of parameters whose learning rate a graph can follow.

    dtype: of the tensor. is_exact: whether the group's optimizer computes the same bits with a float.
    """

    group: _Group
    dtype: torch.dtype
    is_exact: bool

    @property
    def is_float(self) -> bool:
        return isinstance(self.group["lr"], float)

    def is_same(self, other: Rated) -> bool:
        return self.group is other.group and self.dtype == other.dtype

    def tensor(self, device: torch.device) -> torch.Tensor:
        return torch.full((), self.group["lr"], dtype=self.dtype, device=device)


def followed(optimizers: Iterable[torch.optim.Optimizer], adapted: bool) -> list[Rated]:
    """The groups whose rates graphs follow. adapted: also those that need tensors in all calls."""
    found = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if not isinstance(group["lr"], float):
                continue
            taken = rate_probe.taken_by(optimizer, group)
            if taken is not None and (taken.is_exact or adapted):
                found.append(Rated(group, taken.dtype, taken.is_exact))
    return found


def fused_groups(optimizers: Iterable[torch.optim.Optimizer]) -> list[_Group]:
    """Of PyTorch's fused optimizers that ask for ``capturable`` without need."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [group for group in groups if group.get("fused") is True and "capturable" in group]


def names_of_rates(
    optimizers: Iterable[torch.optim.Optimizer], groups: Iterable[Rated]
) -> tuple[str, ...]:
    """What the rates of these groups are called in reports: ``AdamW.param_groups[0]['lr']``."""
    wanted = {id(rated.group) for rated in groups}
    return tuple(
        f"{type(optimizer).__name__}.param_groups[{i}]['lr']"
        for optimizer in optimizers
        for i, group in enumerate(optimizer.param_groups)
        if id(group) in wanted
    )


@dataclasses.dataclass(frozen=True)
class Follows:
    """What of optimizers may move between the calls of a graph. rates: learning rates. numbers: those
    of fused optimizers, once one has moved (fused_numbers.py). What may not move is compared."""

    rates: bool = True
    numbers: bool = False


class Rates:
    """The learning rates that a graph follows, as tensors. Not thread-safe."""

    def __init__(self, groups: list[Rated], device: torch.device) -> None:
        self._groups = groups
        self._device = device
        self._values: list[float] = []
        self._tensors: list[torch.Tensor] = []
        self._set: list[tuple[_Group, Any]] = []  # those that the callable sets itself, and to what
        self.are_kept = False  # by its Python, in a recording, which a replay does not do

    def tensors(self) -> list[torch.Tensor]:
        """The rates as they are now. One that has moved gets new memory, because launches that are
        under way may still read the old one."""
        values = [rated.group["lr"] for rated in self._groups]
        if values != self._values:
            self._tensors = [rated.tensor(self._device) for rated in self._groups]
            self._values = values
        return list(self._tensors)

    def tensors_now(self) -> list[torch.Tensor] | None:
        """The same, for the engine. None while the stream captures: new ones would have their values
        only after the program's graph has run."""
        return None if torch.cuda.is_current_stream_capturing() else self.tensors()

    @property
    def are_set(self) -> bool:
        """Whether the callable sets some itself."""
        return bool(self._set)

    @property
    def groups(self) -> list[_Group]:
        return [rated.group for rated in self._groups]

    def note_set(self, given: Sequence[torch.Tensor]) -> None:
        """After the callable has run in a recording, with these rates: it may have set others."""
        # A group that two optimizers share is there twice, and was given the later one.
        own = {id(of.group): rate for of, rate in zip(self._groups, given, strict=True)}
        pairs = [(rated.group, rated.group.get("lr")) for rated in self._groups]
        self._set = [(group, rate) for group, rate in pairs if rate is not own[id(group)]]
        self.are_kept |= any(isinstance(rate, torch.Tensor) for _, rate in self._set)

    def can_be_followed(self) -> bool:
        """Whether the program has not put something else there; and whether those that the callable
        sets are so already, because a replay does not set them."""
        are_right = all(type(rate) is float and group["lr"] == rate for group, rate in self._set)
        return not self.are_kept and are_right and all(rated.is_float for rated in self._groups)


def begin_recording(
    fused: list[_Group], groups: Sequence[Rated], given: Sequence[torch.Tensor], undo: Undo
) -> None:
    """Makes fused groups capturable, and gives the others tensors as learning rates."""
    kept = [(group, "capturable", group["capturable"]) for group in fused]
    kept += [(rated.group, "lr", rated.group["lr"]) for rated in groups]
    undo.append(lambda: [group.update({key: value}) for group, key, value in kept])
    for group in fused:
        group["capturable"] = True
    for rated, rate in zip(groups, given, strict=True):
        rated.group["lr"] = rate


def without_rates(groups: Sequence[Rated], tell: Callable[[], None], undo: Undo) -> Callable[[], bool]:
    """For the recording of a backward, which is given no rates. tell: called when Python uses one.
    Returns what tells whether Python has put no others there."""
    kept = [(rated.group, rated.group["lr"]) for rated in groups]
    undo.append(lambda: [group.update({"lr": rate}) for group, rate in kept])
    absent = AbsentNumber(tell)
    for group, _ in kept:
        group["lr"] = absent
    return lambda: all(group.get("lr") is absent for group, _ in kept)


def with_tensors(groups: Sequence[Rated], device: torch.device | None, call: Callable[[], Any]) -> Any:
    """Makes an uncaptured call. Groups that need it have tensors meanwhile."""
    if device is None or not groups:
        return call()

    def body(undo: Undo) -> Any:
        mine: list[_Given] = []
        undo.append(functools.partial(_take_back, mine))
        undo.append(functools.partial(release, _lock))
        _lock.acquire()
        for rated in groups:
            given = _given.get(id(rated.group))
            if given is None or rated.group["lr"] is not given.tensor:
                if not rated.is_float:
                    continue
                given = _Given(rated.group, rated.group["lr"], rated.tensor(device))
            _given[id(rated.group)] = given
            mine.append(given)
            given.users.append(mine)
            rated.group["lr"] = given.tensor
        undo[-1]()
        undo.pop()
        return call()

    return undoing(body)


class _Given:
    """A tensor in the place of a group's rate. users: what the calls have that use it."""

    def __init__(self, group: _Group, value: float, tensor: torch.Tensor) -> None:
        self.group = group
        self.value = value
        self.tensor = tensor
        self.version = tensor._version
        self.users: list[Any] = []


def _take_back(mine: list[_Given]) -> None:
    """Of one call. The last one to end puts the number back. Made twice, it does no harm."""
    try:
        _lock.acquire()
        for given in mine:
            given.users[:] = [user for user in given.users if user is not mine]
            if given.users:
                continue
            if given.group["lr"] is given.tensor:  # a scheduler in the call has written to it, or not
                is_same = given.tensor._version == given.version
                given.group["lr"] = given.value if is_same else given.tensor.item()
            if _given.get(id(given.group)) is given:
                del _given[id(given.group)]
    finally:
        release(_lock)
