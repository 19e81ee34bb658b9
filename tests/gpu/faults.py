"""Calls of the driver that fail on demand.

PyGraph finds the driver's functions through a table (``include/pygraph/driver.h``). :func:`install`
puts a library in front of the driver that hands out wrappers of these functions; it has to come before
PyGraph first asks for the driver. Only PyGraph's own calls go through it, not PyTorch's. Thread-safe.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_SOURCE = Path(__file__).with_name("driver_faults.cc")
_VARIABLE = "PYGRAPH_LIBCUDA"

INVALID_VALUE, OUT_OF_MEMORY, NOT_SUPPORTED = 1, 2, 801  # CUresult

# Functions that give something back. Where they fail, the driver keeps it.
GIVE_BACK = (
    "cuCtxPopCurrent",
    "cuStreamDestroy",
    "cuEventDestroy",
    "cuGraphDestroy",
    "cuGraphDestroyNode",
    "cuGraphExecDestroy",
    "cuModuleUnload",
    "cuMemFree",
    "cuMemAddressFree",
    "cuMemRelease",
    "cuMemUnmap",
)


def install() -> bool:
    """Whether driver calls can be made to fail in this process: there is a C++ compiler, and PyGraph
    has not asked for the driver yet."""
    if os.environ.get(_VARIABLE):
        return _library.cache_info().currsize > 0
    if shutil.which("c++") is None:
        return False
    os.environ[_VARIABLE] = str(_build())
    _library()
    return True


def names() -> list[str]:
    """The driver's functions that PyGraph calls, by their names in cuda.h."""
    return list(_indices())


def inject(name: str, error: int = OUT_OF_MEMORY, call: int = 1) -> None:
    """Lets the next call of a function, or the ``call``-th from now on, return an error, once."""
    _library().pygraph_faults_inject(_indices()[name], call, error)


def clear() -> None:
    """Nothing is to fail any more."""
    for index in _indices().values():
        _library().pygraph_faults_inject(index, 0, 0)


def calls(name: str) -> int:
    """Calls of a function so far, those that failed included."""
    return int(_library().pygraph_faults_calls(_indices()[name]))


def failures(name: str) -> int:
    """How many calls of a function were made to fail so far."""
    return int(_library().pygraph_faults_failures(_indices()[name]))


def _build() -> Path:
    header = _ROOT / "include" / "pygraph" / "driver.h"
    text = b"".join(path.read_bytes() for path in (_SOURCE, header, header.with_name("cuda_abi.h")))
    digest = hashlib.sha256(text).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"pygraph_driver_faults_{os.getuid()}_{digest}.so"
    if not library.exists():
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
        command += ["-I", str(_ROOT / "include"), str(_SOURCE), "-o", str(unfinished), "-ldl"]
        subprocess.run(command, check=True)
        unfinished.replace(library)
    return library


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ[_VARIABLE])
    library.pygraph_faults_name.restype = ctypes.c_char_p
    library.pygraph_faults_name.argtypes = [ctypes.c_int]
    for name in ("pygraph_faults_calls", "pygraph_faults_failures"):
        getattr(library, name).restype = ctypes.c_long
        getattr(library, name).argtypes = [ctypes.c_int]
    library.pygraph_faults_inject.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_int]
    library.pygraph_faults_inject.restype = None
    return library


@functools.cache
def _indices() -> dict[str, int]:
    library = _library()
    return {
        library.pygraph_faults_name(index).decode(): index
        for index in range(library.pygraph_faults_count())
    }
