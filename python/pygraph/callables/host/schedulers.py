"""Learning-rate schedulers that a callable can reach, and whether a call uses one.

The loop steps them between calls, so their attributes are not watched as others are. Instead, observed
calls show whether the callable reads or writes an attribute of one. One that does gets no graph
(docs/explanation/whole-steps.md).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import types
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from pygraph.undoing import Undo, release

_lock = threading.RLock()
_watches: list[SchedulerUse] = []
_read_by_compiled_code: dict[int, weakref.ref[LRScheduler]] = {}  # by identity
_HOOKS = ("__getattribute__", "__setattr__", "__delattr__")
_own = {name: vars(LRScheduler)[name] for name in _HOOKS if name in vars(LRScheduler)}


@dataclasses.dataclass(eq=False)
class SchedulerUse:
    """paths: of schedulers, by identity. others: threads whose use does not count, because they were
    there before the call. contents: attributes before it, by path. read: paths of schedulers. written:
    paths of their attributes."""

    paths: dict[int, str]
    others: frozenset[int]
    contents: list[tuple[str, LRScheduler, dict[str, Any]]]
    read: set[str] = dataclasses.field(default_factory=set)
    written: set[str] = dataclasses.field(default_factory=set)

    def note_read(self, scheduler: LRScheduler) -> None:
        path = self.paths.get(id(scheduler))
        if path is not None and threading.get_ident() not in self.others:
            self.read.add(path)

    def note_write(self, scheduler: LRScheduler, name: str) -> None:
        path = self.paths.get(id(scheduler))
        if path is not None and threading.get_ident() not in self.others:
            self.written.add(f"{path}.{name}")

    def note_contents(self) -> None:
        """Compiled code writes past the hooks. (It reads through them: its guards do.)"""
        for path, scheduler, before in self.contents:
            now = _attributes_of(scheduler)
            names = [name for name in before | now if before.get(name, self) is not now.get(name, self)]
            self.written.update(f"{path}.{name}" for name in names)


def is_told(type_: type) -> bool:
    """Whether the use of such schedulers is seen: neither the program's classes nor the program in
    PyTorch's have hooks of their own."""
    return issubclass(type_, LRScheduler) and all(
        getattr(type_, name) is getattr(LRScheduler, name)
        and vars(LRScheduler).get(name) in (_own.get(name), hook)
        for name, hook in zip(_HOOKS, _OURS, strict=True)
    )


def is_hook(value: Any) -> bool:
    """Whether it is in a class only while a call is observed."""
    return isinstance(value, types.FunctionType) and value in _OURS


def watch_schedulers(undo: Undo, schedulers: Mapping[str, LRScheduler]) -> SchedulerUse:
    """What this thread, and those that it starts, do with schedulers until ``undo`` is made.
    schedulers: by path."""
    others = frozenset(sys._current_frames()) - {threading.get_ident()}
    use = SchedulerUse(
        {id(scheduler): path for path, scheduler in schedulers.items()},
        others,
        [(path, scheduler, _attributes_of(scheduler)) for path, scheduler in schedulers.items()],
    )
    if not schedulers:
        return use
    undo.append(functools.partial(_end, use))
    undo.append(functools.partial(release, _lock))
    _lock.acquire()
    _watches.append(use)
    for path, scheduler in schedulers.items():
        compiled = _read_by_compiled_code.get(id(scheduler))
        if compiled is not None and compiled() is scheduler:
            use.read.add(path)
    for name, hook in zip(_HOOKS, _OURS, strict=True):
        setattr(LRScheduler, name, hook)
    undo[-1]()
    undo.pop()
    return use


def _end(use: SchedulerUse) -> None:
    """Made twice, it does no harm (undoing.py)."""
    use.note_contents()
    try:
        _lock.acquire()
        if use in _watches:
            _watches.remove(use)
        if not _watches:
            for name, hook in zip(_HOOKS, _OURS, strict=True):
                if vars(LRScheduler).get(name) is not hook:
                    continue  # undone before, or replaced by the program
                if name in _own:
                    setattr(LRScheduler, name, _own[name])
                else:
                    delattr(LRScheduler, name)
    finally:
        release(_lock)


def _attributes_of(scheduler: LRScheduler) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(scheduler, "__dict__")
    return found.copy()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note_compilation() -> None:
    """Dynamo calls it while it traces a hook. Guards of what it compiles may read past the hooks, so
    all schedulers that are watched now count as read from now on."""
    for use in _watches.copy():
        for path, scheduler, _ in use.contents:
            _read_by_compiled_code[id(scheduler)] = weakref.ref(scheduler)
            use.read.add(path)


# A compiler that traces a hook finds PyTorch's function, and is noted.
def _read(scheduler: LRScheduler, name: str) -> Any:
    if torch.compiler.is_dynamo_compiling():
        _note_compilation()
        return super(LRScheduler, scheduler).__getattribute__(name)
    for use in _watches.copy():
        use.note_read(scheduler)
    return _own.get("__getattribute__", object.__getattribute__)(scheduler, name)


def _write(scheduler: LRScheduler, name: str, value: Any) -> None:
    if torch.compiler.is_dynamo_compiling():
        _note_compilation()
        super(LRScheduler, scheduler).__setattr__(name, value)
        return
    for use in _watches.copy():
        use.note_write(scheduler, name)
    _own.get("__setattr__", object.__setattr__)(scheduler, name, value)


def _delete(scheduler: LRScheduler, name: str) -> None:
    for use in _watches.copy():
        use.note_write(scheduler, name)
    _own.get("__delattr__", object.__delattr__)(scheduler, name)


_OURS = (_read, _write, _delete)
