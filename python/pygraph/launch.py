"""Runs a script or a module as ``python script.py`` or ``python -m module`` would.

The program sees the same ``sys.argv``, ``sys.path``, ``__main__``, tracebacks and exit status. This
module imports no PyTorch.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any


class NotFoundError(Exception):
    """There is no such script or module. status: what the interpreter's exit status would be."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def run(target: str, arguments: Sequence[str], is_module: bool = False) -> None:
    """Runs the program to its end.

    target: path of a script, or with ``is_module`` the name of a module.
    Raises NotFoundError, and what the program raises; the interpreter prints no second traceback.
    """
    if is_module:
        _run_module(target, arguments)
    else:
        _run_script(target, arguments)


def _run_script(path: str, arguments: Sequence[str]) -> None:
    absolute = os.path.abspath(path)
    try:
        with io.open_code(absolute) as file:
            source = file.read()
    except OSError as error:
        text = f"can't open file {absolute!r}: [Errno {error.errno}] {error.strerror}"
        raise NotFoundError(text, 2) from None
    sys.argv = [path, *arguments]
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader("__main__", absolute)
    main = _main_module(absolute, None, loader)
    _execute(main, lambda: compile(source, absolute, "exec", dont_inherit=True))


def _run_module(name: str, arguments: Sequence[str]) -> None:
    sys.argv = ["-m", *arguments]
    _set_first_path(os.getcwd())
    spec = _spec_of(name)
    get_code = getattr(spec.loader, "get_code", None)
    if get_code is None:
        raise NotFoundError(f"No code object available for {spec.name}", 1)
    if spec.origin is not None:
        sys.argv[0] = spec.origin
    main = _main_module(spec.origin, spec.parent, spec.loader)
    main.__spec__ = spec
    _execute(main, lambda: get_code(spec.name))


def _main_module(file: str | None, package: str | None, loader: Any) -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__file__, main.__package__, main.__loader__ = file, package, loader
    return main


def _spec_of(name: str) -> importlib.machinery.ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            package, spec = name, importlib.util.find_spec(f"{name}.__main__")
            if spec is None:
                text = f"No module named {package}.__main__; {package!r} is a package and cannot be "
                raise NotFoundError(f"{text}directly executed", 1)
    except (ModuleNotFoundError, ValueError) as error:
        text = (
            f"Error while finding module specification for {name!r} ({type(error).__name__}: {error})"
        )
        raise NotFoundError(text, 1) from None
    if spec is None:
        raise NotFoundError(f"No module named {name}", 1)
    return spec


def _set_first_path(folder: str) -> None:
    """Puts the program's folder where that of PyGraph's command is."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _execute(main: types.ModuleType, code: Callable[[], types.CodeType]) -> None:
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    if main.__spec__ is None:
        main.__dict__["__cached__"] = None
    else:
        main.__dict__["__cached__"] = main.__spec__.cached
    sys.modules["__main__"] = main
    try:
        exec(code(), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        # The program's own hook, with the program's frames. Then Python ends as after any such error.
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename == __file__:
            own = own.tb_next
        error.__traceback__ = own
        sys.excepthook(type(error), error, own)
        sys.excepthook = lambda *_: None  # the error was printed already
        raise
