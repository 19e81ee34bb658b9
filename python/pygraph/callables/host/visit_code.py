"""Code that a callable can reach: functions, methods, classes, and what they read."""

from __future__ import annotations

import abc
import collections
import functools
import itertools
import types
from typing import Any

from pygraph import runtime
from pygraph.callables.host import probes
from pygraph.callables.host.generators import code_of, frame_of, iterators_of
from pygraph.callables.host.imports import imports_in
from pygraph.callables.host.kinds import is_of
from pygraph.callables.host.names import computes_names, names_in, names_of_class
from pygraph.callables.host.readers import cannot_watch, reads_any_global, visit_names, visit_reader
from pygraph.callables.host.schedulers import is_hook
from pygraph.callables.host.user_code import (
    closures_used_by,
    globals_used_by,
    is_class_of_program,
    is_function_of_program,
    is_library_file,
    is_of_compiler,
)
from pygraph.callables.host.visit_containers import visit_dict, visit_held
from pygraph.callables.host.visit_modules import (
    visit_chain,
    visit_global,
    visit_import,
    visit_scope,
)
from pygraph.callables.host.walk import Object, Unseen, Walk, may_change_its_class

_DEEPEST_WRAPPER = 4
_CONTAINERS = (dict, list, set, collections.deque)
_METHODS = (types.FunctionType, staticmethod, classmethod, property)
# Of classes: what Python itself puts there, in part when it is asked for.
OF_PYTHON = frozenset(
    (
        *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__abstractmethods__"),
        *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
        *("__static_attributes__", "__firstlineno__", "_abc_impl"),
    )
)


def visit_function(walk: Walk, function: types.FunctionType, path: str) -> None:
    code = function.__code__
    walk.add_slot(path, Object(types.FunctionType, id(code)))
    walk.is_new(code)  # which holds it
    walk.found.functions.append(function)
    is_library = is_library_file(code.co_filename)
    if walk.may_run:
        walk.found.running.append(function)
        walk.note_names(names_in(code))
        if not is_library and computes_names(code):
            walk.note_all_names()
    visit_reader(walk, function, path)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if not walk.is_new_at(cell, name):
            continue
        visit_cell(walk, cell, f"{path}.{name}" if is_library else name)
    for name in ("__defaults__", "__kwdefaults__"):
        walk.visit_later(getattr(function, name), f"{path}.{name}")
    visit_dict(walk, vars(function), f"{path}.", attributes=True)
    if not is_library:
        _visit_globals(walk, function)


def visit_cell(walk: Walk, cell: types.CellType, path: str) -> None:
    walk.found.cells.append(cell)
    content = content_of(cell)
    if content:
        walk.visit_later(content[0], path)
    else:
        walk.add_slot(path, "nothing was assigned yet")


def _visit_globals(walk: Walk, function: types.FunctionType) -> None:
    scope = function.__globals__
    for chain in globals_used_by(function.__code__):
        visit_global(walk, scope, chain)
        if reads_any_global(scope, chain):
            visit_scope(walk, scope, "")
    inner = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for chain in closures_used_by(function.__code__):
        cell = inner.get(chain[0])  # none: a variable of the function's own
        content = () if cell is None else content_of(cell)
        if content and len(chain) > 1 and isinstance(content[0], types.ModuleType):
            visit_chain(walk, content[0], chain[1:], f"{chain[0]}.")
        if content and reads_any_global({chain[0]: content[0]}, chain):
            visit_scope(walk, scope, "")
    for found in imports_in(function.__code__):
        visit_import(walk, found, scope)
    visit_names(walk, function)


def visit_method(walk: Walk, method: types.MethodType, path: str) -> None:
    walk.visit_later(method.__self__, f"{path}.__self__")
    walk.visit_later(method.__func__, path)


def visit_builtin(walk: Walk, function: Any, path: str) -> None:
    walk.add_slot(path, (getattr(function, "__module__", None), function.__qualname__))
    visit_reader(walk, function, path)
    walk.found.builtins.add(function.__name__)
    if not is_of(function.__self__, (types.ModuleType, type(None))):
        walk.visit_later(function.__self__, f"{path}.__self__")


def visit_wrapped(walk: Walk, value: Any, path: str) -> None:
    walk.visit_later(value.__func__, path)


def visit_property(walk: Walk, value: property, path: str) -> None:
    parts = (value.fget, value.fset, value.fdel)
    walk.pending.extend((of, path) for of in parts if of is not None)


def visit_partial(walk: Walk, value: Any, path: str) -> None:
    for name in ("func", "args", "keywords"):
        walk.visit_later(getattr(value, name), f"{path}.{name}")


def visit_generator(walk: Walk, generator: Any, path: str) -> None:
    """Also a coroutine. Its variables, what its loops go through, and the globals and imports that it
    reads."""
    frame, used = frame_of(generator), code_of(generator)
    if frame is None:  # it has ended
        return
    walk.note_names(names_in(used))
    visit_held(walk, iterators_of(generator), path)
    for name, value in frame.f_locals.items():
        if type(value) not in probes.ATOMS:
            visit_held(walk, [value], f"{path}.{name}")
    if not is_library_file(used.co_filename):
        for chain in globals_used_by(used):
            visit_global(walk, frame.f_globals, chain)
        for found in imports_in(used):
            visit_import(walk, found, frame.f_globals)


def visit_frame(walk: Walk, frame: types.FrameType, path: str) -> None:
    """Of a function that is running, or that an object keeps: its variables change unseen."""
    if not walk.may_run:
        return
    raise Unseen(cannot_watch(path))


def visit_weak_proxy(walk: Walk, value: Any, path: str) -> None:
    """What a weak proxy stands for."""
    referent_of = runtime.engine().referent_of
    walk.add_probe(f"{path}()", lambda: id(referent_of(value)))
    walk.visit_later(referent_of(value), f"{path}()")


def visit_reference(walk: Walk, value: Any, path: str) -> None:
    walk.add_probe(f"{path}()", lambda: id(value()))
    walk.visit_later(value(), f"{path}()")


def visit_class(walk: Walk, type_: type, path: str) -> None:
    """Attributes of the program's own classes; of others which objects they are, and among them what is
    the program's, and containers."""
    metaclass: type = type(type_)
    walk.add_slot(path, Object(metaclass, id(type_)))
    visit_reader(walk, type_, path)
    if isinstance(type_, abc.ABCMeta) and is_class_of_program(type_):
        walk.add_probe(f"{path}#registered", abc.get_cache_token)
    if is_class_of_program(type_):
        for class_ in type_.__mro__:
            if class_ is not object and not is_class_of_program(class_):
                walk.note_names(names_of_class(class_))  # its code may call the program's methods
    for class_ in itertools.chain(type_.__mro__, metaclass.__mro__):
        if class_ in (object, type) or not (class_ is type_ or walk.is_new(class_)):
            continue
        walk.found.classes.append(class_)
        if may_change_its_class(class_):
            walk.found.instances.append(class_)
        items = list(vars(class_).items())
        kept = {k: v for k, v in items if k not in OF_PYTHON and not is_hook(v)}
        if is_class_of_program(class_):
            walk.add_slot(f"{class_.__name__}#attributes", tuple(kept))
            text = vars(class_).get("__doc__")
            walk.add_slot(f"{class_.__name__}.__doc__", text if type(text) is str else None)
        else:
            walk.add_slot(f"{class_.__name__}#attributes", hash(tuple(map(id, kept.values()))))
            walk.found.held.extend(kept.values())
            # The program has put them there; it may have put containers, too.
            kept = {k: v for k, v in kept.items() if _is_of_program(v) or _is_container(class_, k, v)}
        for name, value in kept.items():
            path = f"{class_.__name__}.{name}"
            if is_of(value, _METHODS) and not _is_pythons(name) and is_class_of_program(class_):
                walk.visit_if_named(name, value, path)
            else:
                walk.visit_later(value, path)


def _is_pythons(name: str) -> bool:
    """Whether Python calls a method of this name by itself."""
    return name[:2] == "__" and name[-2:] == "__"


def _is_container(class_: type, name: str, value: Any) -> bool:
    """Whether it is a container in a library's class, under a name that is not Python's own."""
    if name[:1] == "_" and name[-1:] == "_":
        return False
    return is_of(value, _CONTAINERS) and not is_of_compiler(class_)


def _is_of_program(of: Any, depth: int = 0) -> bool:
    """Whether it is the program's own code, or stands for some: a function of a library's that wraps
    it, a property; or an object of the program's."""
    if depth > _DEEPEST_WRAPPER:
        return False
    if is_of(of, (staticmethod, classmethod)):
        parts: list[Any] = [of.__func__]
    elif is_of(of, property):
        parts = [of.fget, of.fset, of.fdel]
    elif is_of(of, (functools.partial, functools.partialmethod)):
        parts = [of.func]
    elif is_of(of, types.FunctionType):
        if is_function_of_program(of):
            return True
        parts = [part for cell in of.__closure__ or () for part in content_of(cell)]
    else:
        class_ = of if is_of(of, type) else type(of)
        return class_.__module__ != "builtins" and is_class_of_program(class_)
    return any(_is_of_program(part, depth + 1) for part in parts)


def content_of(cell: Any) -> tuple[Any, ...]:
    """Empty if nothing is in it."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
