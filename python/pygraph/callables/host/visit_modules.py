"""Modules that a callable can reach: by a chain of names, such as ``settings.training.flag``, of which
what the last name is bound to is visited, or as objects, of which any attribute may be read."""

from __future__ import annotations

import builtins
import types
from typing import Any

import torch

from pygraph.callables.host.user_code import (
    is_class_of_program,
    is_function_of_program,
    is_of_program,
)
from pygraph.callables.host.walk import Walk

CODE = (types.FunctionType, types.ModuleType, type)
_CODE_OF_LIBRARIES = (*CODE, types.BuiltinFunctionType)
# What Python itself puts there, besides their names.
_OF_MODULES = frozenset(
    ("__builtins__", "__loader__", "__spec__", "__cached__", "__doc__", "__annotations__")
)


def visit_chain(walk: Walk, scope: dict[str, Any], chain: tuple[str, ...], path: str = "") -> None:
    """A global, and attributes of it as long as it is a module. path: of the scope. A module at the end
    of the chain, or whose dictionary is read, is a value."""
    module: types.ModuleType | None = None
    if not path and chain[0] not in scope:  # one of Python's
        walk.found.dicts.append((scope, chain[:1], ()))
        scope = vars(builtins)
    for name in chain:
        if name == "__dict__" and module is not None:
            break
        if isinstance(module, torch._ops._OpNamespace):
            getattr(module, name, None)  # makes it for good, as a rehearsal would
        walk.found.dicts.append((scope, (name,), ()))
        value = scope.get(name, walk)
        if value is walk:
            walk.add_slot(path + name, "it is not there")
            if module is not None:
                _visit_computed(walk, module)
            return
        if not isinstance(value, types.ModuleType):
            walk.visit_later(value, path + name)
            return
        if walk.add_module(value, path + name):
            _visit_class_of(walk, value)
        module, scope, path = value, vars(value), f"{path}{name}."
    if module is not None:
        walk.visit_later(module, path.rstrip("."))


def visit_switch(walk: Walk, module: types.ModuleType, name: str) -> None:
    """A value that functions of a library read from their module."""
    visit_chain(walk, vars(module), (name,), f"{module.__name__}.")


def visit_module(walk: Walk, module: types.ModuleType, path: str) -> None:
    """A module as a value, of which any attribute may be read."""
    if walk.add_module(module, path):
        _visit_class_of(walk, module)
    if is_of_program(module):
        visit_scope(walk, vars(module), f"{path}.")
    else:
        _visit_code_of_library(walk, module, path)


def _visit_computed(walk: Walk, module: types.ModuleType) -> None:
    """The program's own function that computes attributes that a module does not have (PEP 562)."""
    walk.found.dicts.append((vars(module), ("__getattr__",), ()))
    compute = vars(module).get("__getattr__")
    if is_function_of_program(compute):
        walk.visit_later(compute, f"{module.__name__}.__getattr__")


def _visit_class_of(walk: Walk, module: types.ModuleType) -> None:
    """A class of the program's may have properties."""
    if is_class_of_program(type(module)):
        walk.visit_later(type(module), type(module).__name__)


def visit_scope(walk: Walk, scope: dict[str, Any], path: str) -> None:
    """All that one of the program's modules has, besides what Python puts there."""
    left_out = tuple(name for name in scope if name in _OF_MODULES)
    kept = {name: value for name, value in scope.items() if name not in _OF_MODULES}
    walk.found.dicts.append((scope, None, left_out))
    walk.add_slot(f"{path}#names", tuple(kept))
    walk.pending.extend((value, f"{path}{name}") for name, value in kept.items())


def _visit_code_of_library(walk: Walk, module: types.ModuleType, path: str) -> None:
    """Which functions, classes and modules it has; those of the program's have replaced one."""
    kept = {k: v for k, v in vars(module).items() if issubclass(type(v), _CODE_OF_LIBRARIES)}
    walk.found.dicts.append((vars(module), tuple(kept), ()))
    walk.add_slot(f"{path}#code", hash(tuple(map(id, kept.values()))))
    replaced = ((v, f"{path}.{k}") for k, v in kept.items() if is_function_of_program(v))
    walk.pending.extend(replaced)
