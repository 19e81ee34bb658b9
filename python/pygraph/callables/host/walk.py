"""The state of a walk (reachable.py): what is still to be visited, what was met, what was found."""

from __future__ import annotations

import collections
import dataclasses
import logging
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

_IMMUTABLE = 1 << 8  # a flag of classes: Py_TPFLAGS_IMMUTABLETYPE
_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE, which all classes have that Python code defines


class Unseen(RuntimeError):
    """What a callable reaches cannot be looked at: it is too much, or does not tell."""


@dataclasses.dataclass(frozen=True)
class Object:
    """What is at a place and cannot be compared by value."""

    type: type
    id: int


class Reachable:
    """What a walk has found (reachable.py)."""

    def __init__(self) -> None:
        # By path: what is there, and functions that tell what is there.
        self.slots: list[tuple[str, Any]] = []
        self.probes: list[tuple[str, Callable[[], Any]]] = []
        # Each with the keys that are watched, or None for all; and with keys that are left out of all.
        self.dicts: list[tuple[dict[Any, Any], tuple[Any, ...] | None, tuple[Any, ...]]] = []
        self.lists: list[list[Any]] = []
        self.sets: list[set[Any]] = []
        self.deques: list[collections.deque[Any]] = []
        self.cells: list[Any] = []  # of closures
        self.members: list[tuple[Any, types.MemberDescriptorType]] = []  # of objects
        self.functions: list[types.FunctionType] = []
        self.running: list[types.FunctionType] = []  # those of them that a call may run
        self.builtins: set[str] = set()  # names of functions written in C
        self.instances: list[Any] = []
        self.classes: list[type] = []
        self.tensors: dict[str, torch.Tensor] = {}  # by path
        self.optimizers: dict[str, torch.optim.Optimizer] = {}  # by path
        self.schedulers: dict[str, torch.optim.lr_scheduler.LRScheduler] = {}  # by path
        self.events: list[str] = []  # of the GPU, by path
        self.free_dicts: set[int] = set()  # by identity: reached by a path without `param_groups`
        self.held: list[Any] = []  # what probes compare by identity: no other object may get its id


def may_change_its_class(value: Any) -> bool:
    """Whether an assignment to ``__class__`` may give an object another one."""
    return not type(value).__flags__ & _IMMUTABLE


def may_have_slots(class_: type) -> bool:
    """Whether it may have been defined with ``__slots__``, whose name can be deleted afterwards."""
    return bool(class_.__flags__ & _HEAP)


def content_of_member(value: Any, member: types.MemberDescriptorType) -> tuple[Any, ...]:
    """Empty if nothing is in it."""
    try:
        return (member.__get__(value),)
    except AttributeError:
        return ()


def free_path(path: str, taken: Mapping[str, Any]) -> str:
    """The path, or, if something else has it, such as another element of a set, a similar one."""
    while path in taken:
        path = f"{path}#{len(taken)}"
    return path


class Walk:
    """Breadth first, so that paths are short. unwatched: see ``reachable_from``."""

    def __init__(self, unwatched: frozenset[tuple[int, str]]) -> None:
        self.found = Reachable()
        self.unwatched = unwatched
        self.pending: collections.deque[tuple[Any, str]] = collections.deque()
        # Locks with their paths; whether the program's code asks if one is taken, or for annotations.
        self.locks: list[tuple[str, Any]] = []
        self.asks_locks = self.asks_annotations = self.asks_loggers = False
        self.loggers: list[logging.Logger] = []
        self._numbers: dict[int, int] = {}  # of objects, in the order in which they are met
        self._met: list[Any] = []  # holds them, so that identities stay theirs
        self._modules: dict[int, types.ModuleType] = {}  # by identity
        self.may_run = True  # whether a call may run what is visited now
        self._named: set[str] = set()  # what the code that a call may run names
        self._names_all = False  # it may compute names
        self._methods: dict[str, list[tuple[Any, str]]] = {}  # that it does not name, by name

    def visit_later(self, value: Any, path: str) -> None:
        self.pending.append((value, path))

    def visit_if_named(self, name: str, method: Any, path: str) -> None:
        """A method of one of the program's classes: once code that a call may run names it, or else at
        the end (``visit_unnamed``)."""
        if not self.may_run or self._names_all or name in self._named:
            self.visit_later(method, path)
        else:
            self._methods.setdefault(name, []).append((method, path))

    def note_names(self, names: frozenset[str]) -> None:
        """What code names that a call may run."""
        if not self.may_run:
            return
        for name in names - self._named if self._methods else ():
            self.pending.extend(self._methods.pop(name, ()))
        self._named |= names

    def note_all_names(self) -> None:
        """Such code may compute names."""
        self._names_all = True
        self._visit_methods()

    def visit_unnamed(self) -> None:
        """From here on, all that is visited is what no call runs."""
        self.may_run = False
        self._visit_methods()

    def _visit_methods(self) -> None:
        for methods in self._methods.values():
            self.pending.extend(methods)
        self._methods.clear()

    def is_new(self, value: Any) -> bool:
        """Whether it is met for the first time."""
        if id(value) in self._numbers:
            return False
        self._numbers[id(value)] = len(self._met)
        self._met.append(value)
        return True

    def is_new_at(self, value: Any, path: str) -> bool:
        """As ``is_new``. If it was met before, adds a slot that says where."""
        if type(value) is dict and ".param_groups" not in path:
            self.found.free_dicts.add(id(value))
        if self.is_new(value):
            return True
        self.add_slot(path, ("met", self._numbers[id(value)]))
        return False

    def add_slot(self, path: str, what: Any) -> None:
        self.found.slots.append((path, what))

    def is_new_module(self, module: types.ModuleType) -> bool:
        """As ``is_new``, for a module whose attributes are not looked at yet."""
        is_new = id(module) not in self._modules
        self._modules[id(module)] = module
        return is_new

    def add_member(self, value: Any, member: types.MemberDescriptorType, path: str) -> None:
        """What an object has in a place of its class, such as one of ``__slots__``."""
        content = content_of_member(value, member)
        self.found.members.append((value, member))
        for item in content:
            self.visit_later(item, path)
        if not content:
            self.add_slot(path, Object(types.MemberDescriptorType, id(member)))  # nothing is in it

    def add_probe(self, path: str, probe: Callable[[], Any]) -> None:
        self.found.probes.append((path, probe))
