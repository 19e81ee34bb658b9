"""The files that PyTorch's and Triton's keys are computed from (:mod:`.stored_keys`), and the folders
in which a new file would change a key."""

from __future__ import annotations

import importlib.machinery
import inspect
import os
import sys
from collections.abc import Iterator

import torch

SUFFIXES = tuple(importlib.machinery.all_suffixes())
# Files that PyTorch reads beside the modules, by their place in torch._inductor.
_MORE_FILES = ("codegen/aoti_runtime/interface.cpp", "codegen/aoti_runtime/streams.h", "script.ld")


def modules_in(folder: str) -> Iterator[str]:
    """The folder, its modules, all its folders, and the same of those that are packages: everything
    that ``pkgutil.iter_modules`` looks at."""
    yield folder
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir():
            if entry.name != "__pycache__" and "." not in entry.name:
                names = os.listdir(entry.path)
                is_package = any(inspect.getmodulename(name) == "__init__" for name in names)
                yield from modules_in(entry.path) if is_package else (entry.path,)
        elif entry.name.endswith(SUFFIXES) or entry.is_symlink():  # which may lead to a package later
            yield entry.path


def of_torch() -> Iterator[str]:
    folder = os.path.dirname(torch.__file__)
    yield from modules_in(folder)
    yield from (os.path.join(folder, "_inductor", name) for name in _MORE_FILES)


def of_triton() -> Iterator[str]:
    """Raises ImportError if Triton's key is not one of all files: its function imports packages, skips
    those that cannot be imported here, and goes where their ``__path__`` leads."""
    import triton
    import triton.runtime.cache

    folder = os.path.dirname(triton.__file__)
    for name in ("compiler", "backends", "language"):
        for path in modules_in(os.path.join(folder, name)):
            if inspect.getmodulename(path) == "__init__":
                package = os.path.dirname(path)
                module = ".".join(("triton", *os.path.relpath(package, folder).split(os.sep)))
                if list(getattr(sys.modules.get(module), "__path__", ())) != [package]:
                    raise ImportError(f"{module} has not been imported from {package}")
            yield path
    library = f"libtriton.{importlib.machinery.EXTENSION_SUFFIXES[0].split('.')[-1]}"
    yield from (triton.__file__, triton.runtime.cache.__file__)
    yield os.path.join(folder, "_C", library)
