"""Modules that a callable can reach.

By a chain of names, such as ``settings.training.flag``: what the last name is bound to is visited. As
objects, such as an argument: any attribute may be read, so all are visited.
"""

from __future__ import annotations

import builtins
import sys
import types
from typing import Any

import torch

from pygraph.callables.host.imports import Import
from pygraph.callables.host.user_code import (
    attributes_of,
    is_class_of_program,
    is_function_of_program,
    is_of_program,
)
from pygraph.callables.host.walk import Object, Walk

CODE = (types.FunctionType, types.ModuleType, type)
_CODE_OF_LIBRARIES = (*CODE, types.BuiltinFunctionType)
# What Python itself puts there, besides their names.
_OF_MODULES = frozenset(
    ("__builtins__", "__loader__", "__spec__", "__cached__", "__doc__", "__annotations__")
)


def visit_global(walk: Walk, scope: dict[str, Any], chain: tuple[str, ...]) -> None:
    """A global, or one of Python's names, and attributes of it as long as it is a module."""
    name, *rest = chain
    walk.found.dicts.append((scope, (name,), ()))
    if name not in scope:
        scope = vars(builtins)
        walk.found.dicts.append((scope, (name,), ()))
    value = scope.get(name, walk)
    if value is walk:
        walk.add_slot(name, "it is not there")
    elif isinstance(value, types.ModuleType):
        visit_chain(walk, value, tuple(rest), f"{name}.")
    else:
        walk.visit_later(value, name)


def visit_chain(walk: Walk, module: types.ModuleType, chain: tuple[str, ...], path: str) -> None:
    """Attributes of a module, as long as they are modules. A module at the end of the chain, or whose
    dictionary is read, is a value. path: where the module is, with a dot at the end."""
    for name in chain:
        _visit_as_it_is(walk, module, path.rstrip("."))
        if name == "__dict__":
            break
        if isinstance(module, torch._ops._OpNamespace):
            getattr(module, name, None)  # makes it for good, as a rehearsal would
        walk.found.dicts.append((attributes_of(module), (name,), ()))
        value = attributes_of(module).get(name, walk)
        if value is walk:
            walk.add_slot(path + name, "it is not there")
            _visit_computed(walk, module)
            if hasattr(types.ModuleType, name):  # such as __dir__, which reads the whole module
                walk.visit_later(module, path.rstrip("."))
            return
        if not isinstance(value, types.ModuleType):
            walk.visit_later(value, path + name)
            return
        module, path = value, f"{path}{name}."
    walk.visit_later(module, path.rstrip("."))


def visit_import(walk: Walk, found: Import, scope: dict[str, Any]) -> None:
    """What a function imports. scope: its globals."""
    name = found.module_of(scope)
    module = _visit_links(walk, name)
    if not isinstance(module, types.ModuleType):  # another object in its place, or none
        walk.visit_later(module, name)
        return
    for chain in found.chains:
        visit_chain(walk, module, chain, f"{name}.")
        if found.is_from and chain[0] not in attributes_of(module):
            walk.visit_later(_visit_links(walk, f"{name}.{chain[0]}"), f"{name}.{chain[0]}")


def _visit_links(walk: Walk, name: str) -> Any:
    """The module of a whole name, or None: where Python finds it, and those that it is in, in
    ``sys.modules`` and as attributes of each other."""
    value: Any = None
    for i, child in enumerate(parts := name.split(".")):
        parent, path = value, ".".join(parts[: i + 1])
        value = sys.modules.get(path)
        walk.found.dicts.append((sys.modules, (path,), ()))
        links = [value]
        if isinstance(parent, types.ModuleType):
            walk.found.dicts.append((attributes_of(parent), (child,), ()))
            attribute = attributes_of(parent).get(child)
            links.append(attribute)
            if attribute is not value:  # what "import a.b as c" takes
                walk.visit_later(attribute, path)
        walk.add_slot(path, tuple(Object(type(link), id(link)) for link in links))
        walk.found.held.extend(links)
    return value


def visit_switch(walk: Walk, module: types.ModuleType, name: str) -> None:
    """A value that functions of a library read from their module."""
    visit_chain(walk, module, (name,), f"{module.__name__}.")


def visit_module(walk: Walk, module: types.ModuleType, path: str) -> None:
    """A module as a value, of which any attribute may be read."""
    _visit_as_it_is(walk, module, path)
    if is_of_program(module):
        visit_scope(walk, attributes_of(module), f"{path}.")
    else:
        _visit_code_of_library(walk, module, path)


def _visit_computed(walk: Walk, module: types.ModuleType) -> None:
    """The program's own function that computes attributes that a module does not have (PEP 562)."""
    walk.found.dicts.append((attributes_of(module), ("__getattr__",), ()))
    compute = attributes_of(module).get("__getattr__")
    if compute is not None and (is_of_program(module) or is_function_of_program(compute)):
        walk.visit_later(compute, f"{module.__name__}.__getattr__")


def _visit_as_it_is(walk: Walk, module: types.ModuleType, path: str) -> None:
    """Without its attributes, but if its class is the program's, which may read any of them."""
    walk.add_slot(path, Object(type(module), id(module)))
    if walk.is_new_module(module):
        walk.found.instances.append(module)
        if is_class_of_program(type(module)):
            walk.visit_later(type(module), type(module).__name__)
            walk.visit_later(module, path)


def visit_scope(walk: Walk, scope: dict[str, Any], path: str) -> None:
    """All that one of the program's modules has, besides what Python puts there."""
    items = scope.copy().items()  # other threads may import
    left_out = tuple(name for name, _ in items if name in _OF_MODULES)
    kept = {name: value for name, value in items if name not in _OF_MODULES}
    walk.found.dicts.append((scope, None, left_out))
    walk.add_slot(f"{path}#names", tuple(kept))
    walk.pending.extend((value, f"{path}{name}") for name, value in kept.items())


def _visit_code_of_library(walk: Walk, module: types.ModuleType, path: str) -> None:
    """Which functions, classes and modules it has, and which objects of the program's. What is the
    program's has replaced something, or was put there."""
    items = attributes_of(module).copy().items()  # other threads may import
    kept = {name: value for name, value in items if _is_code(value) or _is_object_of_program(value)}
    walk.found.dicts.append((attributes_of(module), tuple(kept), ()))
    walk.add_slot(f"{path}#code", hash(tuple(map(id, kept.values()))))
    walk.pending.extend((v, f"{path}.{name}") for name, v in kept.items() if _is_of_program(v))


def _is_code(value: Any) -> bool:
    return issubclass(type(value), _CODE_OF_LIBRARIES)


def _is_object_of_program(value: Any) -> bool:
    return type(value).__module__ != "builtins" and is_class_of_program(type(value))


def _is_of_program(code: Any) -> bool:
    if isinstance(code, type):
        return is_class_of_program(code)
    if isinstance(code, types.ModuleType):
        return is_of_program(code)
    return is_function_of_program(code) if _is_code(code) else True
