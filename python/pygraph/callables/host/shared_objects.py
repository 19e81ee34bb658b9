"""Objects that threads or processes share, and loggers: what programs ask them for. The rest of what
they have is Python's own."""

from __future__ import annotations

import concurrent.futures
import dis
import functools
import logging
import sys
import threading
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from pygraph.callables.host.kinds import is_of
from pygraph.callables.host.probes import LARGEST_ARRAY, key, probe_of, state_of_thread
from pygraph.callables.host.user_code import attributes_of


def flag_of(value: Any) -> Callable[[], Any] | None:
    """A function that tells it; None for other objects."""
    if hasattr(type(value), "is_set"):  # an event of threads or processes
        return lambda: value.is_set()
    if is_of(value, threading.Semaphore):
        return lambda: value._value
    if is_of(value, concurrent.futures.Future):
        return lambda: (value._state, key(value._result))
    if is_of(value, threading.Barrier):
        return lambda: value.broken
    if is_of(value, concurrent.futures.Executor):
        return lambda: getattr(value, "_max_workers", None)
    if is_of(value, threading.Thread):
        return functools.partial(state_of_thread, value)
    if is_of(value, logging.Logger):
        return functools.partial(_state_of_logger, value)
    if is_of(value, logging.Handler):
        return lambda: value.level
    return _flag_of_processes(value, type(value).__module__)


def _state_of_logger(logger: Any) -> Any:
    own = (logger.level, logger.propagate, logger.disabled, len(logger.handlers), len(logger.filters))
    return own, logger.getEffectiveLevel(), logger.hasHandlers(), logger.manager.disable


def _flag_of_processes(value: Any, module: str) -> Callable[[], Any] | None:
    """Of objects that processes share."""
    if module == "multiprocessing.sharedctypes" and hasattr(value, "get_obj"):
        return probe_of(value.get_obj())
    if module == "multiprocessing.shared_memory":
        memory = getattr(value, "shm", value)  # of a list
        return lambda: bytes(memory.buf) if memory.size <= LARGEST_ARRAY else None
    if module == "multiprocessing.queues" and hasattr(value, "_sem"):  # what is put, and what is taken
        return lambda: value._sem.get_value()
    if module == "multiprocessing.synchronize" and hasattr(value, "get_value"):
        return lambda: value.get_value()
    return None


@functools.cache
def names_set_by(class_: type) -> tuple[str, ...]:
    """Attributes that the code of the module of a library's class sets, and of those of its bases."""
    found: set[str] = set()
    for module in {sys.modules.get(of.__module__) for of in class_.__mro__ if of is not object}:
        values = list(attributes_of(module).values()) if isinstance(module, ModuleType) else []
        for value in values:
            parts = list(vars(value).values()) if isinstance(value, type) else [value]
            codes = [of.__code__ for of in parts if isinstance(of, FunctionType)]
            instructions = (i for code in codes for i in dis.get_instructions(code))
            found.update(str(i.argval) for i in instructions if i.opname == "STORE_ATTR")
    return tuple(sorted(found))
