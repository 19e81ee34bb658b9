"""The keys of PyTorch's and of Triton's own code, kept on disk beside Inductor's cache.

The compiler's caches are for one version of that code: each key in them contains a hash of its files.
Each process reads all files for it, among them Triton's library of 500 MB, which takes some 0.45 s. A
hash on disk is used instead if all files, and all folders in which files could be added, have the
inodes, sizes and times that they had before it was computed. In all other cases, and after any error,
PyTorch computes it, and it is stored. Nothing here raises, but for an unknown source at the beginning.

As with everything that Inductor keeps, ``TORCHINDUCTOR_FORCE_DISABLE_CACHES=1`` switches this off.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import cache_dir

from pygraph import stored
from pygraph.runtime import log
from pygraph.torch_patches.stored_digests import StoredDigests

# Of the function behind PyTorch's cache of its one result, which the table of patches cannot name.
_KNOWN = ("677e589d16daf11b",)
# Files that it reads beside the modules, by their place in torch._inductor.
_MORE_FILES = ("codegen/aoti_runtime/interface.cpp", "codegen/aoti_runtime/streams.h", "script.ld")
_SETTLED_SECONDS = 10.0  # files that changed within them may do so again, at the same time of the clock

_State = list[int] | None  # of a file or folder; None if it does not exist
_SUFFIXES = tuple(importlib.machinery.all_suffixes())


class StoredKey:
    """A key on disk, with the states of all that it is computed from."""

    def __init__(self, name: str, paths: Callable[[], Iterable[str]]) -> None:
        """name: what the key is of, and where. paths: of the files, and of the folders in which a new
        file would change the key."""
        self._paths = paths
        self._name = name
        self._states: dict[str, _State] | None = None
        self._noted_at = 0.0

    def find(self) -> str:
        """The key; empty if it is to be computed."""
        try:
            found = stored.read(_path(self._name))
            key, states = found["key"], found["states"]
            if isinstance(key, str) and states and all(_state(p) == s for p, s in states.items()):
                return key
        except FileNotFoundError:
            pass
        except Exception as error:
            log.debug("a key on disk cannot be read: %s", error)
        return ""

    def note(self) -> None:
        """To be called before the key is computed, where it is to be kept."""
        try:
            self._noted_at = time.time()
            self._states = {path: _state(path) for path in self._paths()}
        except Exception as error:
            log.debug("no key is kept: %s", error)

    def keep(self, key: str) -> None:
        """Stores the key, unless its files have changed a moment before they were noted."""
        states, self._states = self._states, None
        try:
            if states and max(_changed_at(state) for state in states.values()) < self._noted_at:
                stored.write(_path(self._name), {"key": key, "states": states})
        except Exception as error:  # the folder cannot be written
            log.debug("a key was not kept: %s", error)


def _path(name: str) -> Path:
    parts = (name, torch.__version__, sys.version)
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    return Path(cache_dir()) / "pygraph" / f"key-{digest}.json"


def _state(path: str) -> _State:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _changed_at(state: _State) -> float:
    return 0.0 if state is None else max(state[2:]) / 1e9 + _SETTLED_SECONDS


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
        elif entry.name.endswith(_SUFFIXES):
            yield entry.path


def _of_torch() -> Iterator[str]:
    folder = os.path.dirname(torch.__file__)
    yield from modules_in(folder)
    yield from (os.path.join(folder, "_inductor", name) for name in _MORE_FILES)


def _of_triton() -> Iterator[str]:
    import triton
    import triton.runtime.cache

    folder = os.path.dirname(triton.__file__)
    for name in ("compiler", "backends", "language"):
        yield from modules_in(os.path.join(folder, name))
    library = f"libtriton.{importlib.machinery.EXTENSION_SUFFIXES[0].split('.')[-1]}"
    yield from (triton.__file__, triton.runtime.cache.__file__)
    yield os.path.join(folder, "_C", library)


_to_keep: list[tuple[StoredKey, Callable[[], str]]] = []


@functools.cache
def install() -> None:
    """Gives PyTorch the keys that are on disk. Raises RuntimeError if it computes them in a way that
    is not known."""
    from torch._inductor import codecache
    from torch._inductor.runtime import triton_compat

    compute = inspect.getclosurevars(codecache.torch_key).nonlocals
    digests = StoredDigests("torch_key")
    if digests.digest_of(compute["func"]) not in _KNOWN:
        raise RuntimeError("torch_key is computed in another way")
    digests.save()
    if config.force_disable_caches or config.is_fbcode():
        return
    if not isinstance(compute["_cache"], bytes):  # or else PyTorch has it already
        key = StoredKey(f"torch {torch.__file__}", _of_torch)
        found = key.find()
        if found:
            codecache.torch_key.set(bytes.fromhex(found))
        else:
            key.note()
            _to_keep.append((key, lambda: codecache.torch_key().hex()))
    original = triton_compat.triton_key
    if original.cache_info().currsize == 0:
        key = StoredKey(f"triton {inspect.getfile(inspect.unwrap(original))}", _of_triton)
        found = key.find()
        if found:
            triton_compat.triton_key = functools.wraps(original)(lambda: found)
        else:
            key.note()
            _to_keep.append((key, original))


def keep() -> None:
    """To be called after a program has been looked up in the compiler's caches, which computes the
    keys: stores those that were not on disk."""
    while _to_keep:
        key, compute = _to_keep.pop()
        try:
            key.keep(compute())
        except Exception as error:
            log.debug("a key was not kept: %s", error)
