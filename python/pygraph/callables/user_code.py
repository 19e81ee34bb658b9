"""Which code is the program's own, and the globals that it reads.

The names in a function's code are not enough: ``optimizer.step()`` has the name ``step``, too, and a
training loop often has a variable of that name. So the instructions are read.
"""

from __future__ import annotations

import dis
import functools
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Folders of code that is not the program's: Python's library, installed packages, PyGraph."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {os.path.realpath(sysconfig.get_paths()[name]) + os.sep for name in names}
    return (*folders, _PACKAGE)


@functools.lru_cache(maxsize=4096)
def is_library_file(name: str) -> bool:
    """Whether a source file belongs to Python's library, an installed package or PyGraph."""
    if name.startswith("<frozen"):
        return True
    path = os.path.realpath(name)
    return path.startswith(_libraries()) or "site-packages" in path or "dist-packages" in path


def is_of_program(module: ModuleType) -> bool:
    """Whether a module is a file of the program's own."""
    file = getattr(module, "__file__", None)
    return file is not None and not is_library_file(file)


@functools.lru_cache(maxsize=4096)
def globals_read_by(code: CodeType) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Names of globals that a function and the functions inside of it read, each with the attributes
    that are read of it."""
    found: dict[str, dict[str, None]] = {}
    for part in _with_inner(code):
        last: str | None = None  # the global that the next instruction takes an attribute of
        for instruction in dis.get_instructions(part):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                last = str(instruction.argval)
                found.setdefault(last, {})
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and last is not None:
                found[last][str(instruction.argval)] = None
                last = None
            elif instruction.opname not in ("CACHE", "PRECALL"):
                last = None
    return tuple((name, tuple(attributes)) for name, attributes in found.items())


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
