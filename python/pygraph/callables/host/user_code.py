"""Which code is the program's own, the globals that it reads, and the line where it is.

The names in a function's code are not enough: ``optimizer.step()`` has the name ``step``, too, and a
training loop often has a variable of that name. So the instructions are read.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import functorch
import torch

_DICT_OF_MODULE: Any = vars(ModuleType)["__dict__"]  # its descriptor
_PACKAGE = str(Path(__file__).parents[2]) + os.sep
# Modules whose functions make classes, which get the module's name: types.new_class, make_dataclass.
_MAKERS = ("types", "dataclasses", "abc", "enum", "collections", "typing")
_COMPILER = (
    *("torch._dynamo.", "torch._inductor.", "torch._functorch.", "torch._guards.", "torch.fx."),
)
_counted: tuple[str, ...] = ()  # beginnings of paths of what counts as the program's, though installed


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Folders of code that is not the program's: Python's library, installed packages, PyGraph."""
    folders = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")]
    # PyTorch may be used from its sources.
    folders += [str(Path(module.__file__).parent) for module in (torch, functorch) if module.__file__]
    beginnings = {os.path.realpath(folder) + os.sep for folder in folders}
    return (*beginnings, *_folders_of_packages(), _PACKAGE)


@functools.cache
def _folders_of_packages() -> tuple[str, ...]:
    folders = [sysconfig.get_paths()[name] for name in ("purelib", "platlib")]
    # Where `pip install --target` puts packages.
    folders += [path for path in sys.path if any(Path(path or ".").glob("*.dist-info"))]
    return tuple({os.path.realpath(folder) + os.sep for folder in folders})


@functools.lru_cache(maxsize=4096)
def is_library_file(name: str) -> bool:
    """Whether a source file belongs to Python's library, an installed package or PyGraph. (An installed
    package counts as the program's once one of its functions was graphed: ``installed.py``.)"""
    if name.startswith("<frozen"):
        return True
    path = os.path.realpath(name)
    if path.startswith(_counted):
        return False
    return path.startswith(_libraries()) or _is_in_packages(path)


def _is_in_packages(path: str) -> bool:
    return "site-packages" in path or "dist-packages" in path


def is_installed_file(name: str) -> bool:
    """Whether a source file belongs to an installed package other than PyGraph."""
    path = os.path.realpath(name)
    if path.startswith(_PACKAGE):
        return False
    return _is_in_packages(path) or path.startswith(_folders_of_packages())


def count_as_programs(beginning: str) -> None:
    """Files whose real path begins so are the program's own from now on."""
    global _counted
    if beginning not in _counted:
        _counted = (*_counted, beginning)
        is_library_file.cache_clear()


def count_as_librarys(beginning: str) -> None:
    """Undoes ``count_as_programs``."""
    global _counted
    _counted = tuple(of for of in _counted if of != beginning)
    is_library_file.cache_clear()


def attributes_of(module: ModuleType) -> dict[str, Any]:
    """Its dictionary, without code of its class."""
    found: dict[str, Any] = _DICT_OF_MODULE.__get__(module)
    return found


def is_of_program(module: ModuleType) -> bool:
    """Whether a module is the program's own: a file, a folder of files, or made by the program."""
    attributes = attributes_of(module)
    file = attributes.get("__file__")
    if file is not None:
        return not is_library_file(str(file))
    if attributes.get("__spec__") is not None:  # built in, or a folder
        return any(not is_library_file(str(path)) for path in attributes.get("__path__", ()))
    package = sys.modules.get(str(attributes.get("__name__")).partition(".")[0])
    if isinstance(package, ModuleType) and package is not module:  # made by a package
        return is_of_program(package)
    return type(module) is ModuleType or is_class_of_program(type(module))


def is_function_of_program(value: object) -> bool:
    """Whether it is a function whose code is the program's own."""
    return isinstance(value, FunctionType) and not is_library_file(value.__code__.co_filename)


def is_class_of_program(class_: type) -> bool:
    """Whether a class was defined in one of the program's own modules."""
    name = str(class_.__module__)
    module = sys.modules.get(name) or sys.modules.get(name.partition(".")[0])
    if name == "__main__" or module is None:  # from a file that was run, or whose module has gone
        return True
    if name in _MAKERS and not hasattr(module, class_.__name__):
        return True
    return isinstance(module, ModuleType) and is_of_program(module)


def is_of_compiler(class_: type) -> bool:
    """Whether it belongs to PyTorch's compiler, whose inside changes while it compiles."""
    return f"{class_.__module__}.".startswith(_COMPILER)


WITHOUT_EFFECT = ("CACHE", "EXTENDED_ARG", "NOP", "PRECALL")  # on what the next instruction uses
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
_CLOSURES = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR")


def globals_used_by(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """The globals that a function and the functions inside of it read or write, each with the chain of
    attributes that follows: ``("settings", "training", "flag")``."""
    return _chains_in(code, _GLOBALS)


def closures_used_by(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """The same for variables of enclosing functions."""
    return _chains_in(code, _CLOSURES)


@functools.lru_cache(maxsize=4096)
def _chains_in(code: CodeType, begins: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    found: dict[tuple[str, ...], None] = {}
    for part in with_inner(code):
        chain: tuple[str, ...] = ()
        for instruction in dis.get_instructions(part):
            if instruction.opname in ATTRIBUTES and chain:
                chain = (*chain, str(instruction.argval))
            elif instruction.opname not in WITHOUT_EFFECT:
                found[chain] = None  # as a whole: a module alone is used as a value
                chain = (str(instruction.argval),) if instruction.opname in begins else ()
        found[chain] = None
    return tuple(chain for chain in found if chain)


@functools.lru_cache(maxsize=4096)
def mentions(code: CodeType, name: str) -> bool:
    """Whether a function, or one inside of it, has an attribute, a global or a text of this name."""
    return any(name in part.co_names or name in part.co_consts for part in with_inner(code))


@functools.lru_cache(maxsize=4096)
def texts_in(code: CodeType) -> tuple[str, ...]:
    """The texts in a function, and in those inside of it."""
    return tuple(of for part in with_inner(code) for of in part.co_consts if isinstance(of, str))


def with_inner(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of all functions and classes inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from with_inner(constant)


def calling_line() -> str:
    """Where the program's own code is now, in parentheses; empty if it is nowhere."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and is_library_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else _place(frame.f_code, frame.f_lineno)


def line_of(error: Exception) -> str:
    """Where in the program's own code an error was raised, in parentheses; empty if nowhere."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(code, line) for code, line in frames if not is_library_file(code.co_filename)]
    return _place(*own[-1]) if own else calling_line()


def _place(code: CodeType, line: int) -> str:
    return f" ({code.co_filename.rsplit('/', 1)[-1]}:{line})"
