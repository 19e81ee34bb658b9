"""Learning-rate schedulers that a callable can reach, and whether a call uses one.

A trainer often keeps its scheduler beside its model: in an attribute of the object whose method is the
training step. The loop steps the scheduler between calls, so its numbers are others in each call. If
they were watched like other numbers, such a step could have no graph. They are not watched. Instead,
observed calls show whether the callable reads or writes an attribute of a scheduler. One that does gets
no graph. One that does not will not do so either in a later call that finds everything else as it was.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from pygraph.undoing import Undo, release

_lock = threading.RLock()
_watches: list[SchedulerUse] = []
_HOOKS = ("__getattribute__", "__setattr__")
_own = {name: vars(LRScheduler)[name] for name in _HOOKS if name in vars(LRScheduler)}


@dataclasses.dataclass(eq=False)
class SchedulerUse:
    """paths: of schedulers, by identity. thread: the one whose use counts. read: paths of schedulers.
    written: paths of their attributes."""

    paths: dict[int, str]
    thread: int
    read: set[str] = dataclasses.field(default_factory=set)
    written: set[str] = dataclasses.field(default_factory=set)

    def note_read(self, scheduler: LRScheduler) -> None:
        path = self.paths.get(id(scheduler))
        if path is not None and self.thread == threading.get_ident():
            self.read.add(path)

    def note_write(self, scheduler: LRScheduler, name: str) -> None:
        path = self.paths.get(id(scheduler))
        if path is not None and self.thread == threading.get_ident():
            self.written.add(f"{path}.{name}")


def is_told(type_: type) -> bool:
    """Whether the use of such schedulers is seen: no class before PyTorch's has hooks of its own."""
    return issubclass(type_, LRScheduler) and all(
        getattr(type_, name) is getattr(LRScheduler, name) for name in _HOOKS
    )


def watch_schedulers(undo: Undo, schedulers: Mapping[str, LRScheduler]) -> SchedulerUse:
    """What this thread does with schedulers, given by path, until ``undo`` is made."""
    use = SchedulerUse(
        {id(scheduler): path for path, scheduler in schedulers.items()}, threading.get_ident()
    )
    if not schedulers:
        return use
    undo.append(functools.partial(_end, use))
    undo.append(functools.partial(release, _lock))
    _lock.acquire()
    _watches.append(use)
    for name, hook in zip(_HOOKS, (_read, _write), strict=True):
        setattr(LRScheduler, name, hook)
    undo.pop()()
    return use


def _end(use: SchedulerUse) -> None:
    """Made twice, it does no harm (undoing.py)."""
    try:
        _lock.acquire()
        if use in _watches:
            _watches.remove(use)
        if not _watches:
            for name, hook in zip(_HOOKS, (_read, _write), strict=True):
                if vars(LRScheduler).get(name) is not hook:
                    continue  # undone before, or replaced by the program
                if name in _own:
                    setattr(LRScheduler, name, _own[name])
                else:
                    delattr(LRScheduler, name)
    finally:
        release(_lock)


def _read(scheduler: LRScheduler, name: str) -> Any:
    for use in _watches.copy():
        use.note_read(scheduler)
    return _own.get("__getattribute__", object.__getattribute__)(scheduler, name)


def _write(scheduler: LRScheduler, name: str, value: Any) -> None:
    for use in _watches.copy():
        use.note_write(scheduler, name)
    _own.get("__setattr__", object.__setattr__)(scheduler, name, value)
