"""The walk through what a callable can reach: what is still to be visited, and what was found.

What is visited how: visit_containers.py, visit_code.py, visit_objects.py.
"""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import torch


class Unseen(RuntimeError):
    """What a callable reaches cannot be looked at: it is too much, or does not tell."""


@dataclasses.dataclass(frozen=True)
class Object:
    """What is at a place and cannot be compared by value."""

    type: type
    id: int


@dataclasses.dataclass
class Reachable:
    """See reachable.py. dicts: each with the keys that are watched, or None for all, and with keys that
    are left out of all. held: what probes know by its identity, which must stay its own."""

    slots: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    probes: list[tuple[str, Callable[[], Any]]] = dataclasses.field(default_factory=list)
    dicts: list[tuple[dict[Any, Any], tuple[Any, ...] | None, tuple[Any, ...]]] = dataclasses.field(
        default_factory=list
    )
    lists: list[list[Any]] = dataclasses.field(default_factory=list)
    cells: list[Any] = dataclasses.field(default_factory=list)
    functions: list[types.FunctionType] = dataclasses.field(default_factory=list)
    instances: list[Any] = dataclasses.field(default_factory=list)
    classes: list[type] = dataclasses.field(default_factory=list)
    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = dataclasses.field(default_factory=dict)
    held: list[Any] = dataclasses.field(default_factory=list)


class Walk:
    """Breadth first, so that paths are short."""

    def __init__(self, unwatched: frozenset[tuple[int, str]]) -> None:
        self.found = Reachable()
        self.unwatched = unwatched
        self.pending: collections.deque[tuple[Any, str]] = collections.deque()
        self._numbers: dict[int, int] = {}  # of objects, in the order in which they are met
        self._met: list[Any] = []  # holds them, so that identities stay theirs

    def later(self, value: Any, path: str) -> None:
        """It is visited after all that was met before."""
        self.pending.append((value, path))

    def is_new(self, value: Any) -> bool:
        if id(value) in self._numbers:
            return False
        self._numbers[id(value)] = len(self._met)
        self._met.append(value)
        return True

    def is_new_at(self, value: Any, path: str) -> bool:
        """Notes where it was met, if it is not."""
        if self.is_new(value):
            return True
        self.note(path, ("met", self._numbers[id(value)]))
        return False

    def note(self, path: str, what: Any) -> None:
        self.found.slots.append((path, what))

    def probe(self, path: str, probe: Callable[[], Any]) -> None:
        self.found.probes.append((path, probe))
