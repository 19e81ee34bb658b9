"""Installed packages whose functions are graphed: a trainer that was installed with pip.

What such a package has in its globals is read by the graphed callable, as a program's own are. So its
files count as the program's own code: that of the callable; and, where a walk through their globals is
not much longer, all of its package, and those of its base classes. (The globals of a large library lead
everywhere.)
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from pygraph.callables.host.kinds import is_of
from pygraph.callables.host.user_code import count_as_programs, is_installed_file

# Packages whose globals are switches and registries of their own.
_NEVER = ("torch", "functorch", "torchgen", "triton", "numpy", "pygraph")
_DEEPEST_WRAPPER = 8
_decided: set[str] = set()  # packages, and files of base classes


def note_files_of(root: Any) -> list[list[str]]:
    """That a callable is graphed: its file counts as the program's, and so does its class's. Returns
    what may count as well, if it is the first time: the folders of each package that these are in, and
    the files of base classes."""
    found = []
    for of in _parts(root, 0):
        is_function = is_of(of, types.FunctionType)
        name = _module_of(of.__globals__) if is_function else str(of.__module__)
        package = name.partition(".")[0]
        if package in _NEVER:
            continue
        file = of.__code__.co_filename if is_function else _file_of(name)
        if file and is_installed_file(file):
            count_as_programs(os.path.realpath(file))
        if package not in _decided:
            _decided.add(package)
            folders = [str(path) for path in getattr(sys.modules.get(package), "__path__", ())]
            found.append(
                [os.path.realpath(of) + os.sep for of in folders if is_installed_file(of + os.sep)]
            )
        for base in () if is_function else of.__mro__[1:]:
            file = _file_of(str(base.__module__))
            is_other = base.__module__.partition(".")[0] not in _NEVER and file not in _decided
            if file and is_other and is_installed_file(file):
                _decided.add(file)
                found.append([os.path.realpath(file)])
    return [group for group in found if group]


def _module_of(scope: dict[str, Any]) -> str:
    """Also of one that is run (``python -m``)."""
    name = scope.get("__name__")
    if name == "__main__":
        name = getattr(scope.get("__spec__"), "name", None) or scope.get("__package__")
    return str(name)


def _file_of(module: str) -> str:
    return str(getattr(sys.modules.get(module), "__file__", None) or "")


def _parts(of: Any, depth: int) -> Iterator[Any]:
    """Functions and classes that a callable consists of."""
    if depth > _DEEPEST_WRAPPER:
        return
    if is_of(of, types.FunctionType):
        yield of
        if "__wrapped__" in vars(of):
            yield from _parts(vars(of)["__wrapped__"], depth + 1)
    elif is_of(of, types.MethodType):
        yield from _parts(of.__func__, depth + 1)
        yield type(of.__self__)
    elif is_of(of, (functools.partial, functools.partialmethod)):
        yield from _parts(of.func, depth + 1)
    else:
        yield of if is_of(of, type) else type(of)
