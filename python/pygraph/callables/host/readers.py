"""Functions by which a callable reads what is in no attribute and no variable that a walk comes to.

Where a callable reaches one of them, what it reads is compared at each call; if that cannot be done,
the callable has no graph.
"""

from __future__ import annotations

import builtins
import decimal
import inspect
import logging
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

from pygraph.callables.host import probes
from pygraph.callables.host.kinds import is_of
from pygraph.callables.host.user_code import (
    attributes_of,
    is_class_of_program,
    is_function_of_program,
    mentions,
    texts_in,
)
from pygraph.callables.host.walk import Unseen, Walk

_OF_GLOBALS = (globals, eval, exec)  # by which code reads any global
_ANNOTATIONS = ("__annotations__", "__annotations_cache__")  # the latter from Python 3.14 on
_OF_FRAMES = (sys._getframe, sys._current_frames, inspect.currentframe, inspect.stack, inspect.trace)


def cannot_watch(path: str) -> str:
    reason = f"it may read variables through {path}, which cannot be watched; do that outside"
    return reason


def visit_reader(walk: Walk, function: Any, path: str) -> None:
    """A function or a class that the callable reaches."""
    visit = _READERS.get(id(function))
    if visit is not None:
        if walk.may_run or visit not in _PER_CALL:
            visit(walk)
    elif walk.may_run and any(function is of for of in _OF_FRAMES):
        raise Unseen(cannot_watch(path))
    elif is_of(function, types.FunctionType) and function.__globals__ is vars(logging):
        # Such as logging.info, logging.getLogger.
        walk.visit_later(logging.root, "logging.root")


def visit_names(walk: Walk, function: types.FunctionType) -> None:
    """One of the program's own functions."""
    code = function.__code__
    if walk.may_run and mentions(code, "__globals__"):
        raise Unseen(cannot_watch(f"__globals__ in {function.__qualname__}"))
    walk.asks_locks |= mentions(code, "locked")
    walk.asks_annotations |= mentions(code, "__annotations__") or mentions(code, "get_type_hints")
    walk.asks_loggers |= mentions(code, "getLogger") or mentions(code, "getChild")


def visit_asked(walk: Walk) -> None:
    """At the end of a walk: what is compared only if the program's code asks for it."""
    for path, lock in walk.locks if walk.asks_locks else ():
        walk.add_probe(f"{path}.locked()", lock.locked)
    for class_ in walk.found.classes if walk.asks_annotations else ():
        if is_class_of_program(class_):
            found = (vars(class_).get(name) for name in _ANNOTATIONS)
            walk.pending.extend((of, f"{class_.__name__}.__annotations__") for of in found)
    if walk.asks_loggers:
        _visit_loggers(walk)


def _visit_loggers(walk: Walk) -> None:
    """Those whose names are texts that the program has: of its functions, of their modules, or in its
    variables; and their children of such names."""
    loggers = logging.root.manager.loggerDict
    own = [f for f in walk.found.functions if is_function_of_program(f)]
    texts = {text for function in own for text in texts_in(function.__code__)}
    texts |= {str(function.__globals__.get("__name__")) for function in own}
    texts |= {what for _, what in walk.found.slots if type(what) is str}
    parents = [of for of in texts if of in loggers] + [logger.name for logger in walk.loggers]
    texts |= {f"{parent}.{text}" for parent in parents for text in texts}
    names = tuple(sorted(texts & loggers.keys()))
    walk.found.dicts.append((loggers, names, ()))
    for name in names:
        walk.visit_later(loggers.get(name), f"logging.getLogger({name!r})")


def reads_any_global(scope: dict[str, Any], chain: tuple[str, ...]) -> bool:
    """Whether a chain of names, the first one a global or one of Python's, ends at a function that
    reads any global."""
    name, *rest = chain
    value = scope.get(name, vars(builtins).get(name))
    for attribute in rest:
        if not isinstance(value, types.ModuleType):
            break
        value = attributes_of(value).get(attribute)
    return any(value is of for of in _OF_GLOBALS)


def _visit_thread(walk: Walk) -> None:
    walk.add_probe("threading.get_ident()", threading.get_ident)


def _visit_thread_object(walk: Walk) -> None:
    thread = threading.current_thread()
    walk.add_probe("threading.current_thread()", lambda: id(threading.current_thread()))
    walk.found.held.append(thread)
    walk.visit_later(thread, "threading.current_thread()")


def _visit_handled_exception(walk: Walk) -> None:
    # While one is handled, calls have no graph: it has its traceback, which has variables.
    walk.add_probe("sys.exc_info()", lambda: None if sys.exc_info()[1] is None else object())


def _visit_decimal_context(walk: Walk) -> None:
    walk.add_probe("decimal.getcontext()", probes.decimal_context)


def _visit_filters(walk: Walk) -> None:
    # By value: warnings.catch_warnings makes a new list of them, and puts the old one back.
    walk.add_probe("warnings.filters", lambda: tuple(warnings.filters))


# What is different in another thread, or where an exception is handled.
_PER_CALL = (_visit_thread, _visit_thread_object, _visit_handled_exception)
_READERS: dict[int, Callable[[Walk], None]] = {
    id(os.getenv): lambda walk: walk.visit_later(os.environ, "os.environ"),
    id(threading.get_ident): _visit_thread,
    id(threading.get_native_id): _visit_thread,
    id(threading.current_thread): _visit_thread_object,
    id(getattr(threading, "currentThread", threading.current_thread)): _visit_thread_object,
    id(sys.exc_info): _visit_handled_exception,
    id(decimal.Decimal): _visit_decimal_context,
    id(decimal.getcontext): _visit_decimal_context,
    id(warnings.warn): _visit_filters,
}
if sys.version_info >= (3, 11):
    _READERS[id(sys.exception)] = _visit_handled_exception
